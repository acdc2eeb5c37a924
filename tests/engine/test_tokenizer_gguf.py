"""The tokenizer rebuilt from a GGUF file's vocabulary, merges, token types and splitting rule."""

import json
from pathlib import Path
from typing import Any

import pytest

from batchrun.engine.errors import ModelError
from batchrun.engine.gguf_tokenizer import tokenizer_config, tokenizer_json
from batchrun.engine.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def metadata(tiny_model_folder: Path) -> dict[str, Any]:
    """What a GGUF file says of the shared tiny tokenizer, with merges of digits and a user-defined token added."""
    model = json.loads((tiny_model_folder / "tokenizer.json").read_text())["model"]
    extra = ["12", "123", "1234", "<think>"]
    tokens = [*model["vocab"], *extra]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]] + ["1 2", "12 3", "123 4"],
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 4) + [4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "TEMPLATE",
    }


def build(metadata: dict[str, Any], **changes: Any) -> Tokenizer:
    changed = {**metadata, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}
    config = tokenizer_config(changed)
    return Tokenizer(tokenizer_json(changed), config, config.get("chat_template"))


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([index]) for index in tokenizer.encode(text, parse_special=False)]


def test_ids_equal_those_of_the_folder_that_the_file_was_made_from(metadata: dict[str, Any], tiny_model_folder: Path) -> None:
    folder, file = Tokenizer.from_folder(tiny_model_folder), build(metadata)
    for text in ("the cat is in\n\nhello ing", "naïve 🙂", "<|im_start|>user", "  two  spaces\t"):
        for parse in (True, False):
            assert file.encode(text, parse) == folder.encode(text, parse)
    assert file.special_tokens == folder.special_tokens
    assert (file.bos_token, file.eos_token, file.chat_template) == ("<|im_start|>", "<|im_end|>", "TEMPLATE")


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["1234"]),
        ("smollm", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("default", ["123", "4"]),
    ],
)
def test_digits_are_split_as_the_rule_says(metadata: dict[str, Any], pre: str, expected: list[str]) -> None:
    assert pieces(build(metadata, pre=pre), "1234") == expected


def test_each_rule_covers_any_text(metadata: dict[str, Any]) -> None:
    text = "It's 12,345 things:\r\n\n  naïve\t🙂 日本語—don't!  "
    for pre in ("gpt-2", "smollm", "llama-bpe", "qwen2", "default"):
        tokenizer = build(metadata, pre=pre)
        assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text


def test_user_defined_tokens_are_always_parsed_and_kept_when_decoding(metadata: dict[str, Any]) -> None:
    tokenizer = build(metadata)
    index = metadata["tokenizer.ggml.tokens"].index("<think>")
    assert tokenizer.encode("<think>", parse_special=False) == [index]
    assert tokenizer.decode([index]) == "<think>"
    assert "<think>" not in tokenizer.special_tokens


@pytest.mark.parametrize(
    ("changes", "starts"),
    [
        ({}, False),
        ({"add_bos_token": True}, True),
        ({"pre": "llama-bpe"}, True),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
    ],
)
def test_raw_text_starts_with_bos_when_the_file_or_its_rule_says(
    metadata: dict[str, Any], changes: dict[str, Any], starts: bool
) -> None:
    (ids,) = build(metadata, **changes).encode_raw(["cat"])
    assert (ids[0] == 1) == starts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, r"'llama' \(SentencePiece\): only 'gpt2'"),
        ({"model": None}, r"None \(unknown\)"),
        ({"pre": "tekken"}, "'tekken': supported are smollm, gpt-2, default, llama-bpe, qwen2"),
        ({"tokens": []}, "carries no vocabulary"),
        ({"merges": ["q zz"]}, "merges do not fit"),
    ],
)
def test_what_cannot_be_rebuilt_is_named(metadata: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        build(metadata, **changes)
    assert "\n" not in str(caught.value)
