"""Where an output ends: end tokens, stop strings anywhere in the text, the token limit."""

import itertools
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchrun.engine.detokenize import TextStream, TokenText
from batchrun.engine.loader import load_tokenizer, resolve_model
from batchrun.engine.sampling_params import SamplingParams
from batchrun.engine.stopping import StopChecker
from batchrun.engine.tokenizer import Tokenizer

PARAGRAPH = "Ça va, naïve 日本語😀? The 2nd café — “déjà vu”, 👩\u200d🚀 and then some more of the same text, ending here."
NIHONGO = [23274, 115, 40993, 179, 120, 248, 10813, 242, 218]  # SmolLM2's ids of 日本語😀
NO_END = frozenset[int]()


class Ended(NamedTuple):
    num_tokens: int
    reason: str | None
    text: str


def generate(tokenizer: TokenText, ids: list[int], eos_ids: frozenset[int] = NO_END, **params: object) -> Ended:
    """Feed ids as a model would until the checker ends the sequence."""
    checker = StopChecker(SamplingParams(**{"max_tokens": 1000} | params), eos_ids, tokenizer)  # type: ignore[arg-type]
    reason, count = None, 0
    while reason is None and count < len(ids):
        count += 1
        reason = checker.push(ids[count - 1], count)
    return Ended(count, reason, checker.final_text(ids[:count]))


def expected(tokenizer: TokenText, ids: list[int], stop: str) -> Ended:
    """The rule, by brute force: the first k tokens whose text contains the string, cut before it."""
    for k in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:k])
        if stop in text:
            return Ended(k, "stop", text[: text.index(stop)])
    return Ended(len(ids), None, tokenizer.decode(ids))


@pytest.fixture(scope="module", params=["smollm2", "tiny"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """The embedded model's, and one that gives a token to nearly each byte."""
    if request.param == "tiny":
        folder: Path = request.getfixturevalue("tiny_model_folder")
        return Tokenizer.from_folder(folder)
    return load_tokenizer(resolve_model(str(request.getfixturevalue("embedded_model"))))[1]


@pytest.fixture(scope="module")
def smollm2(embedded_model: Path) -> Tokenizer:
    return load_tokenizer(resolve_model(str(embedded_model)))[1]


class Output(NamedTuple):
    ids: list[int]
    pieces: list[str]
    text: str


@pytest.fixture(scope="module")
def output(tokenizer: Tokenizer) -> Output:
    ids = tokenizer.encode(PARAGRAPH, parse_special=False)
    stream = TextStream(tokenizer)
    return Output(ids, [stream.push(token) for token in ids], PARAGRAPH)


def test_stop_across_each_pair_of_pieces(tokenizer: Tokenizer, output: Output) -> None:
    pieces = [piece for piece in output.pieces if piece]
    assert len(pieces) > 24
    for left, right in itertools.pairwise(pieces):
        stop = left[-1] + right[0]
        ended = generate(tokenizer, output.ids, stop=(stop,))
        assert ended == expected(tokenizer, output.ids, stop)
        assert ended.text == output.text[: output.text.index(stop)]
        assert ended.reason == "stop"


def test_stop_of_a_whole_first_piece_and_of_its_first_character_gives_empty_output(tokenizer: Tokenizer, output: Output) -> None:
    first = next(piece for piece in output.pieces if piece)
    for stop in (first, output.text[0]):
        ended = generate(tokenizer, output.ids, stop=(stop,))
        assert ended == (output.pieces.index(first) + 1, "stop", "")


def test_stop_that_is_nowhere_in_the_output_never_fires(tokenizer: Tokenizer, output: Output) -> None:
    ended = generate(tokenizer, output.ids, stop=("only in the prompt",), max_tokens=len(output.ids))
    assert ended == (len(output.ids), "length", output.text)


def test_of_two_stops_the_earlier_match_counts_not_the_earlier_listed(tokenizer: Tokenizer, output: Output) -> None:
    ended = generate(tokenizer, output.ids, stop=("same text", "café"))
    assert ended == expected(tokenizer, output.ids, "café")


def test_of_two_stops_completed_by_one_token_the_one_that_begins_first_counts(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("I like cats", parse_special=False)
    assert len(ids) == 3
    assert generate(smollm2, ids, stop=("ats", "cat")).text == "I like "
    assert generate(smollm2, ids, stop=("cat", "ats")).text == "I like "
    # Both begin together: the longer one is kept whole.
    for stop in (("cat", "cats"), ("cats", "cat")):
        assert generate(smollm2, ids, stop=stop, include_stop=True).text == "I like cats"


def test_include_stop_keeps_it_once_and_cuts_behind_it(tokenizer: Tokenizer, output: Output) -> None:
    for stop in ("naïve 日", "déj", "e"):
        end = output.text.index(stop) + len(stop)
        ended = generate(tokenizer, output.ids, stop=(stop,), include_stop=True)
        assert ended.text == output.text[:end]
        assert ended.text.count(stop) == 1


def test_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="--stop"):
        SamplingParams(stop=("",))


def test_end_token_ends_and_is_not_shown(tokenizer: Tokenizer, output: Output) -> None:
    end = tokenizer.special_tokens["<|im_end|>"]
    ids = [*output.ids[:7], end, *output.ids[7:]]
    assert generate(tokenizer, ids, frozenset({end})) == (8, "stop", tokenizer.decode(ids[:7]))
    assert generate(tokenizer, ids, frozenset({0, end}), max_tokens=8).reason == "stop"
    ignored = generate(tokenizer, ids, frozenset({end}), ignore_eos=True)
    assert ignored == (len(ids), None, output.text)


def test_an_end_token_that_is_a_plain_word_is_not_shown_either(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("I like cats", parse_special=False)
    assert generate(smollm2, ids, frozenset({ids[-1]})) == (3, "stop", "I like")
    # A stop string that begins in an earlier token and would end in the end token's text is not in the output.
    assert generate(smollm2, ids, frozenset({ids[-1]}), stop=("ke cats",)).text == "I like"


def test_token_limit(tokenizer: Tokenizer, output: Output) -> None:
    assert generate(tokenizer, output.ids, max_tokens=5) == (5, "length", tokenizer.decode(output.ids[:5]))
    assert generate(tokenizer, output.ids, max_tokens=1) == (1, "length", tokenizer.decode(output.ids[:1]))


def test_last_token_that_completes_a_stop_is_a_stop(tokenizer: Tokenizer, output: Output) -> None:
    k = expected(tokenizer, output.ids, "café").num_tokens
    assert generate(tokenizer, output.ids, stop=("café",), max_tokens=k).reason == "stop"
    assert generate(tokenizer, output.ids, stop=("café",), max_tokens=k - 1).reason == "length"


def test_stop_of_one_character_that_spans_tokens_hits_at_its_last_one(smollm2: Tokenizer) -> None:
    assert generate(smollm2, NIHONGO, stop=("語",)) == (6, "stop", "日本")
    assert generate(smollm2, NIHONGO, stop=("本語",)) == (6, "stop", "日")
    assert generate(smollm2, NIHONGO, stop=("😀",), include_stop=True) == (9, "stop", "日本語😀")


def test_output_cut_inside_a_character_ends_in_a_replacement_character(smollm2: Tokenizer) -> None:
    assert generate(smollm2, NIHONGO, max_tokens=4) == (4, "length", "日本\ufffd")
    assert generate(smollm2, NIHONGO, max_tokens=4, stop=("x",)) == (4, "length", "日本\ufffd")


def test_without_stop_strings_nothing_is_decoded_before_the_end() -> None:
    class Untouchable:
        strips_leading_space = False

        def token_bytes(self, index: int, skip_special: bool = True) -> bytes:
            raise AssertionError("decoded a token")

        def decode(self, ids: list[int], skip_special: bool = True) -> str:
            raise AssertionError("decoded the output")

    checker = StopChecker(SamplingParams(max_tokens=3), frozenset({9}), Untouchable())
    assert [checker.push(1, 1), checker.push(2, 2), checker.push(3, 3)] == [None, None, "length"]


class ByteTokens:
    """Every byte is a token."""

    strips_leading_space = False

    def token_bytes(self, index: int, skip_special: bool = True) -> bytes:
        return bytes([index])

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


@settings(max_examples=300)
@given(st.lists(st.sampled_from(list(b"aab\xc3\xa9\xe6")), max_size=30), st.text("abé\ufffd", min_size=1, max_size=4))
def test_any_stop_string_in_any_output_follows_the_rule(ids: list[int], stop: str) -> None:
    assert generate(ByteTokens(), ids, stop=(stop,)) == expected(ByteTokens(), ids, stop)
