"""Text to token ids and back, by the `tokenizers` library alone: transformers takes seconds to import."""

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from batchrun.engine.errors import ModelError

DEFAULT_TEMPLATE_NAME = "default"


class Tokenizer:
    """A Hugging Face tokenizer with its special tokens, BOS rule and chat template.

    Two copies of the tokenizer exist: one parses special strings such as `<|im_start|>` into their tokens, the other
    takes them for plain text, so that no prompt can open a turn by writing one. Thread-safe once made; nothing mutates it.
    """

    def __init__(self, tokenizer_json: str, config: dict[str, Any], chat_template: str | None) -> None:
        """tokenizer_json is the content of tokenizer.json; config that of tokenizer_config.json.

        Raises:
            ModelError: the tokenizer cannot be read, or its decoder is of a kind that is not supported.
        """
        self.chat_template = chat_template
        """Jinja source, or None."""
        self.bos_token = _token_text(config.get("bos_token"))
        """Its text, or "" when there is none."""
        self.eos_token = _token_text(config.get("eos_token"))
        """Its text, or "" when there is none."""
        self._parsing = _load(tokenizer_json, config)
        self._plain = _load(tokenizer_json, config)
        self._plain.encode_special_tokens = True
        added = self._parsing.get_added_tokens_decoder()
        self._added = {index: token.content for index, token in added.items()}
        self.special_tokens: dict[str, int] = {token.content: index for index, token in added.items() if token.special}
        """Text to id of the control tokens: skipped when decoding, never parsed out of plain text."""
        self._special_ids = frozenset(self.special_tokens.values())
        if "add_bos_token" in config or "add_eos_token" in config:
            self._set_bos_rule(bool(config.get("add_bos_token")), bool(config.get("add_eos_token")))
        self._alphabet, self.strips_leading_space = _decoder_kind(json.loads(tokenizer_json).get("decoder"))

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Read tokenizer.json, tokenizer_config.json and chat_template.jinja (the last two may be missing).

        Raises:
            ModelError: no tokenizer.json, or one that cannot be read.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{folder} has no tokenizer.json: only tokenizers saved in that format are read")
        config = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
        template_file = folder / "chat_template.jinja"
        template = _pick_template(config.get("chat_template"))
        if template_file.is_file():
            template = template_file.read_text(encoding="utf-8")
        try:
            return cls(path.read_text(encoding="utf-8"), config, template)
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from error

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id; the model's embedding may have more rows."""
        highest: int = max(self._parsing.get_vocab(with_added_tokens=True).values())
        return highest + 1

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """Ids of text, nothing added; special strings become their tokens only when parse_special."""
        return self.encode_batch([text], parse_special)[0]

    def encode_batch(self, texts: Sequence[str], parse_special: bool) -> list[list[int]]:
        """As `encode`, many texts on all cores."""
        tokenizer = self._parsing if parse_special else self._plain
        return [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_raw(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of texts to continue: special strings parsed, and what the tokenizer itself puts around a text (BOS) added."""
        return [encoding.ids for encoding in self._parsing.encode_batch_fast(list(texts), add_special_tokens=True)]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of ids: their `token_bytes` as UTF-8, each broken character U+FFFD. No other clean-up of spaces."""
        pieces = [self.token_bytes(index, skip_special) for index in ids]
        text = b"".join(pieces).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def token_bytes(self, index: int, skip_special: bool = True) -> bytes:
        """What one token adds to the text, perhaps part of a character.

        Empty for a special token (unless skip_special is False) and for an id that the tokenizer does not have.
        `decode` is these bytes joined; when `strips_leading_space`, it drops one space at the very start.
        """
        if index in self._special_ids:
            return b"" if skip_special else self._added[index].encode()
        return self._bytes[index] if 0 <= index < len(self._bytes) else b""

    @cached_property
    def _bytes(self) -> list[bytes]:
        table = [b""] * self.vocab_size
        for token, index in self._parsing.get_vocab(with_added_tokens=False).items():
            table[index] = _byte_level(token, self._alphabet) if self._alphabet else _sentencepiece(token)
        for index, content in self._added.items():
            table[index] = content.encode()
        return table

    def _set_bos_rule(self, add_bos: bool, add_eos: bool) -> None:
        # As transformers does: the flags, where given, replace the rule that tokenizer.json carries.
        from tokenizers.processors import TemplateProcessing

        tokens = [token for token, wanted in ((self.bos_token, add_bos), (self.eos_token, add_eos)) if token and wanted]
        bos = [self.bos_token] if add_bos and self.bos_token else []
        eos = [self.eos_token] if add_eos and self.eos_token else []
        pairs = []
        for token in dict.fromkeys(tokens):
            index = self._parsing.token_to_id(token)
            if index is None:
                raise ModelError(f"the tokenizer adds {token!r} to a text but has no such token")
            pairs.append((token, index))
        self._parsing.post_processor = TemplateProcessing(single=[*bos, "$A", *eos], pair=None, special_tokens=pairs)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ModelError: unreadable, or not an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object")
    return content


def _load(tokenizer_json: str, config: dict[str, Any]) -> Any:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_str(tokenizer_json)
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"the tokenizer cannot be read: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    # Older folders name tokens here that tokenizer.json lacks.
    known = backend.get_vocab(with_added_tokens=True)
    for index, token in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
        if token["content"] not in known and int(index) >= len(known):
            flags = {key: bool(token.get(key, False)) for key in ("single_word", "lstrip", "rstrip", "normalized", "special")}
            backend.add_tokens([AddedToken(token["content"], **flags)])
    return backend


def _token_text(token: Any) -> str:
    if isinstance(token, dict):
        return str(token.get("content", ""))
    return token if isinstance(token, str) else ""


def _pick_template(template: Any) -> str | None:
    if isinstance(template, list):
        named = {item["name"]: item["template"] for item in template}
        return named.get(DEFAULT_TEMPLATE_NAME)
    return template if isinstance(template, str) else None


def _decoder_kind(decoder: dict[str, Any] | None) -> tuple[dict[str, int] | None, bool]:
    """(the byte of each character, or None for SentencePiece's `▁` and `<0xNN>`; whether one leading space is dropped)."""
    steps = (decoder or {}).get("decoders", [decoder or {}])
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return _byte_alphabet(), False
    if "ByteFallback" in kinds:
        return None, any(step.get("type") == "Strip" and step.get("start", 0) > 0 for step in steps)
    if "Metaspace" in kinds:
        prepend = steps[0].get("prepend_scheme", "always")
        return None, prepend != "never"
    raise ModelError(f"the tokenizer's decoder is {sorted(map(str, kinds))}: supported are ByteLevel, ByteFallback and Metaspace")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in of each byte: itself where printable, else the next free code point from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


def _byte_level(token: str, alphabet: dict[str, int]) -> bytes:
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:  # a token outside the alphabet stands for itself
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()
