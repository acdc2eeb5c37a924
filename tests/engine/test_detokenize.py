"""Text as tokens arrive: whole characters only, and in the end what decoding everything gives."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrun.engine.detokenize import TextStream
from batchrun.engine.loader import load_tokenizer, resolve_model
from batchrun.engine.tokenizer import Tokenizer

NIHONGO = [23274, 115, 40993, 179, 120, 248, 10813, 242, 218]  # SmolLM2's ids of 日本語😀


class ByteTokens:
    """Every byte is a token and 256 is special; the decoder may drop one leading space, as SentencePiece's does."""

    def __init__(self, strips_leading_space: bool) -> None:
        self.strips_leading_space = strips_leading_space

    def token_bytes(self, index: int, skip_special: bool = True) -> bytes:
        return bytes([index]) if index < 256 else (b"" if skip_special else b"<s>")

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        text = b"".join(self.token_bytes(index, skip_special) for index in ids).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.strips_leading_space else text


@pytest.fixture(scope="module")
def smollm2(embedded_model: Path) -> Tokenizer:
    return load_tokenizer(resolve_model(str(embedded_model)))[1]


def test_characters_that_span_tokens_come_out_whole(smollm2: Tokenizer) -> None:
    stream = TextStream(smollm2)
    pieces = [stream.push(token) for token in NIHONGO]
    assert "".join(pieces) == stream.text == stream.finish() == "日本語😀"
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces.count("") == 5  # four characters, nine tokens


def test_a_cut_character_is_held_and_shown_as_replacement_at_the_end(smollm2: Tokenizer) -> None:
    stream = TextStream(smollm2)
    for token in NIHONGO[:4]:
        stream.push(token)
    assert stream.text == "日本"
    assert stream.held == "\ufffd"
    assert stream.finish() == smollm2.decode(NIHONGO[:4]) == "日本\ufffd"


def test_a_family_joined_by_zero_width_joiners_round_trips(smollm2: Tokenizer) -> None:
    family = "👨\u200d👩\u200d👧"
    ids = smollm2.encode(family, parse_special=False)
    stream = TextStream(smollm2)
    pieces = [stream.push(token) for token in ids]
    assert len(ids) == 13
    assert "".join(pieces) == family
    assert "\ufffd" not in "".join(pieces)


def test_special_tokens_add_nothing_wherever_they_stand(smollm2: Tokenizer) -> None:
    end = smollm2.special_tokens["<|im_end|>"]
    with_ends = [end, *[token for pair in zip(NIHONGO, [end] * len(NIHONGO), strict=True) for token in pair]]
    stream = TextStream(smollm2)
    assert "".join(stream.push(token) for token in with_ends) == "日本語😀"


def test_invalid_bytes_come_out_as_soon_as_they_cannot_become_a_character() -> None:
    stream = TextStream(ByteTokens(False))
    assert [stream.push(byte) for byte in b"\xe6\x97A\xffB"] == ["", "", "\ufffdA", "\ufffd", "B"]


def test_one_leading_space_is_dropped_for_sentencepiece_only_at_the_very_start() -> None:
    stream = TextStream(ByteTokens(True))
    assert [stream.push(token) for token in (256, 0x20, 0x20, 0x61, 0x20, 0x62)] == ["", "", " ", "a", " ", "b"]
    assert stream.finish() == " a b"


@given(st.lists(st.sampled_from([*b" aA\xe6\x97\xa5\xf0\x9f\x98\x80\xff\xc3", 256]), max_size=40), st.booleans())
def test_text_and_held_are_decode_of_the_tokens_after_each_of_them(ids: list[int], strips: bool) -> None:
    tokenizer = ByteTokens(strips)
    stream = TextStream(tokenizer)
    emitted = ""
    for count, token in enumerate(ids, 1):
        emitted += stream.push(token)
        assert emitted == stream.text
        assert stream.text + stream.held == stream.finish() == tokenizer.decode(ids[:count])
        assert len(stream.held) <= 1
