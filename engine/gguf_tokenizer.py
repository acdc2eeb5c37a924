"""The tokenizer that a GGUF file describes, as the files of a Hugging Face folder."""

from collections.abc import Mapping
from typing import Any

from batchrun.engine.errors import ModelError

# Token types of the format.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

# What `tokenizer.ggml.pre` names: the expressions that split a text, one after the other, before merging. They are those of
# the models' own tokenizer.json; for `default`, a name that exists only in llama.cpp, those of llama.cpp.
_DIGITS = r"\p{N}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS: dict[str, tuple[str, ...]] = {
    "smollm": (_DIGITS, _GPT2),
    "gpt-2": (_GPT2,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "llama-bpe": (_CASELESS % "{1,3}",),
    "qwen2": (_CASELESS % "",),
}
_WHOLE_WORDS_FIRST = ("llama-bpe",)
"""A piece that is itself a token is taken whole, whatever the merges say; these also start a text with BOS."""
_COMPOSED = ("qwen2",)
"""Text is brought to Unicode's composed form (NFC) first."""


def tokenizer_json(metadata: Mapping[str, Any]) -> str:
    """The content of a tokenizer.json equal to the file's vocabulary, merges, token types and splitting rule.

    Raises:
        ModelError: not byte-level BPE (SentencePiece, WordPiece), an unknown splitting rule, or merges that do not fit.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        known = {"llama": "SentencePiece", "bert": "WordPiece", "t5": "SentencePiece unigram"}.get(str(kind), "unknown")
        raise ModelError(f"the file's tokenizer is {kind!r} ({known}): only 'gpt2' (byte-level BPE) is supported in a .gguf file")
    pre = split_rule(metadata)
    tokens, merges = metadata.get("tokenizer.ggml.tokens", []), metadata.get("tokenizer.ggml.merges", [])
    if not tokens:
        raise ModelError("the file has no tokenizer.ggml.tokens: it carries no vocabulary")
    pairs = [_merge_pair(merge) for merge in merges]
    vocab = {token: index for index, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab, pairs, ignore_merges=pre in _WHOLE_WORDS_FIRST)
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"the file's merges do not fit its vocabulary: {error}") from error
    tokenizer = Tokenizer(model)
    if pre in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(_SPLITS[pre])
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type", [])
    special = [token for token, kind in zip(tokens, types, strict=False) if kind in (_UNKNOWN, _CONTROL)]
    plain = [token for token, kind in zip(tokens, types, strict=False) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])
    content: str = tokenizer.to_str()
    return content


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a tokenizer_config.json: named tokens, the rule for BOS and EOS, the chat template."""
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None and 0 <= index < len(tokens):
            config[name] = tokens[index]
    adds_bos = split_rule(metadata) in _WHOLE_WORDS_FIRST
    config["add_bos_token"] = bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos))
    config["add_eos_token"] = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return config


def split_rule(metadata: Mapping[str, Any]) -> str:
    """The name of the file's splitting rule.

    Raises:
        ModelError: one that is not supported.
    """
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    if pre not in _SPLITS:
        raise ModelError(f"the file's tokenizer splits text by the rule {pre!r}: supported are {', '.join(_SPLITS)}")
    return pre


def _pre_tokenizer(patterns: tuple[str, ...]) -> Any:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    # The library has two of the rules built in, which is faster than general expressions.
    built_in = patterns[-1] == _GPT2
    steps = [
        Digits(individual_digits=True) if pattern == _DIGITS else Split(Regex(pattern), "isolated")
        for pattern in (patterns[:-1] if built_in else patterns)
    ]
    return Sequence([*steps, ByteLevel(add_prefix_space=False, use_regex=built_in)])


def _merge_pair(merge: str) -> tuple[str, str]:
    left, _, right = merge[1:].partition(" ")  # the first character may be a space itself in odd vocabularies
    return merge[:1] + left, right
