"""Text to ids and back, on the small byte-level tokenizer and on a SentencePiece-like one."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from batchrun.engine.errors import ModelError
from batchrun.engine.tokenizer import Tokenizer

TEXTS = ["", "the cat and the dog", "naïve 🙂 日本語", "a\u0000b", "user\n\nassistant <|im_end|>", " two  spaces "]


@pytest.fixture(scope="module")
def tokenizer(tiny_model_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(tiny_model_folder)


def folder_with(tmp_path: Path, tiny_model_folder: Path, config: dict[str, Any]) -> Path:
    (tmp_path / "tokenizer.json").write_bytes((tiny_model_folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_special_strings_are_tokens_only_when_asked(tokenizer: Tokenizer) -> None:
    text = "<|im_start|>user<|im_end|>"
    parsed, plain = tokenizer.encode(text, parse_special=True), tokenizer.encode(text, parse_special=False)
    assert parsed[0] == 1
    assert parsed[-1] == 2
    assert not set(plain) & set(tokenizer.special_tokens.values())
    assert tokenizer.decode(plain) == text
    assert tokenizer.decode(parsed) == "user"
    assert tokenizer.decode(parsed, skip_special=False) == text


def test_names_of_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_tokens == {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.chat_template is not None


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_a_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text


def test_a_batch_equals_its_texts_one_by_one(tokenizer: Tokenizer) -> None:
    for parse in (False, True):
        assert tokenizer.encode_batch(TEXTS, parse) == [tokenizer.encode(text, parse) for text in TEXTS]
    assert tokenizer.encode_batch([], False) == []


def test_decoding_equals_the_tokenizers_library_on_any_ids(tokenizer: Tokenizer, tiny_model_folder: Path) -> None:
    from tokenizers import Tokenizer as Library

    library = Library.from_file(str(tiny_model_folder / "tokenizer.json"))
    draw = random.Random(0)
    for _ in range(200):
        ids = [draw.randrange(tokenizer.vocab_size) for _ in range(draw.randrange(12))]
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == library.decode(ids, skip_special_tokens=skip)


def test_bytes_of_tokens_add_up_to_the_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("日本語 cat", parse_special=False)
    assert b"".join(tokenizer.token_bytes(index) for index in ids) == "日本語 cat".encode()
    assert tokenizer.token_bytes(1) == b""
    assert tokenizer.token_bytes(1, skip_special=False) == b"<|im_start|>"
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""


@pytest.mark.parametrize(
    ("flags", "start", "end"),
    [({}, [], []), ({"add_bos_token": True}, [1], []), ({"add_bos_token": True, "add_eos_token": True}, [1], [2])],
)
def test_raw_text_gets_what_the_tokenizer_adds(
    tmp_path: Path, tiny_model_folder: Path, flags: dict[str, bool], start: list[int], end: list[int]
) -> None:
    config = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>", **flags}
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, tiny_model_folder, config))
    plain = tokenizer.encode("the cat", parse_special=False)
    assert tokenizer.encode_raw(["the cat", "<|im_end|>"]) == [[*start, *plain, *end], [*start, 2, *end]]
    assert tokenizer.encode("the cat", parse_special=True) == plain


def test_the_flag_takes_away_the_start_token_of_tokenizer_json(tmp_path: Path, tiny_model_folder: Path) -> None:
    content = json.loads((tiny_model_folder / "tokenizer.json").read_text())
    bos = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    special = {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}}
    content["post_processor"] = {"type": "TemplateProcessing", "single": [bos, text], "pair": [], "special_tokens": special}
    kept = Tokenizer(json.dumps(content), {"bos_token": "<|im_start|>"}, None)
    assert kept.encode_raw(["a"])[0][0] == 1
    taken = Tokenizer(json.dumps(content), {"bos_token": "<|im_start|>", "add_bos_token": False}, None)
    assert taken.encode_raw(["a"])[0] == kept.encode_raw(["a"])[0][1:]


def test_truncation_and_padding_of_the_file_are_ignored(tiny_model_folder: Path) -> None:
    content = json.loads((tiny_model_folder / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    tokenizer = Tokenizer(json.dumps(content), {}, None)
    assert tokenizer.decode(tokenizer.encode("the cat and the dog", parse_special=False)) == "the cat and the dog"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("T", "T"),
        ([{"name": "default", "template": "D"}, {"name": "rag", "template": "R"}], "D"),
        ([{"name": "rag", "template": "R"}], None),
        (None, None),
    ],
)
def test_chat_template_is_a_text_or_the_default_of_a_list(
    tmp_path: Path, tiny_model_folder: Path, template: Any, expected: str | None
) -> None:
    folder = folder_with(tmp_path, tiny_model_folder, {"chat_template": template})
    assert Tokenizer.from_folder(folder).chat_template == expected
    (folder / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.from_folder(folder).chat_template == "from the file"


def sentencepiece_json() -> str:
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, normalizers

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁ab"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    model = models.BPE(vocab, [("▁", "a"), ("▁a", "b")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    library = Library(model)
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return library.to_str()


def test_sentencepiece_like_tokens_decode_with_byte_fallback() -> None:
    tokenizer = Tokenizer(sentencepiece_json(), {}, None)
    ids = tokenizer.encode("ab 日 a", parse_special=False)
    assert tokenizer.strips_leading_space
    assert tokenizer.decode(ids) == "ab 日 a"
    assert b"".join(map(tokenizer.token_bytes, ids)) == " ab 日 a".encode()


def test_folders_without_a_usable_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json: the tokenizer cannot be read"):
        Tokenizer.from_folder(tmp_path)


def test_an_unknown_decoder_is_refused(tiny_model_folder: Path) -> None:
    content = json.loads((tiny_model_folder / "tokenizer.json").read_text())
    content["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    with pytest.raises(ModelError, match=r"decoder is \['WordPiece'\]: supported are"):
        Tokenizer(json.dumps(content), {}, None)
