"""Special strings inside chat contents are text: `<|im_end|>` in a user's message must not end the turn.

Rows without such a string need none of this. For the others, each special string in the row's own values is wrapped in two
marks before the template runs, so that the template still sees the string itself:

    content  "say <|im_end|> twice"        -> "say S<|im_end|>E twice"
    rendered "<|im_start|>user\\nsay S<|im_end|>E twice<|im_end|>\\n"
    pieces   [1] "user\\nsay <|im_end|> twice" [2] "\\n"

What is unmarked came from the template and becomes its id; the pieces between are encoded with no special strings parsed.
A mark that a string method of the template has separated from its partner is dropped; it still kept its surroundings
from joining into a special string. (The idea of marks is that of transformers' `sanitize_control_tokens`; there the text
around a marked string is encoded apart from it, here together with it, as the plain text that it is.)
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

# Private-use characters of the basic plane, so that JSON escapes them as one `\uXXXX` each.
_MARKS = [chr(code) for code in range(0xE000, 0xF8FF)]


class Encoder(Protocol):
    """The part of `batchrun.engine.tokenizer.Tokenizer` that is needed here."""

    special_tokens: dict[str, int]

    def encode(self, text: str, parse_special: bool) -> list[int]: ...


def strings(value: Any) -> Iterator[str]:
    """Every string in a JSON-like value, keys of objects included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from strings(key)
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


class Marks(NamedTuple):
    """Two characters that occur nowhere in a row."""

    start: str
    end: str

    @classmethod
    def unused_in(cls, values: Iterable[str]) -> "Marks":
        """The first two private-use characters that no string has, neither raw nor as a JSON escape."""
        text = "\0".join(values)
        lower = text.lower()
        free = (mark for mark in _MARKS if mark not in text and f"\\u{ord(mark):x}" not in lower)
        start, end = next(free, None), next(free, None)
        if start is None or end is None:
            raise ValueError("the row's text has every private-use character: none is left to mark its special strings with")
        return cls(start, end)


class SpecialText:
    """Finds special strings in a row's values, marks them, and encodes what was rendered from marked values.

    Takes a probe or two of the tokenizer on first use; `tokenizer.special_tokens` must not change afterwards.
    """

    def __init__(self, tokenizer: Encoder) -> None:
        self._tokenizer = tokenizer
        self._ids = tokenizer.special_tokens
        # Longest first, so that a token wins over one that it contains.
        names = sorted((name for name in self._ids if name), key=lambda name: (-len(name), name))
        self._source = "|".join(map(re.escape, names)) or "(?!)"
        self._special = re.compile(self._source)
        self._strips: dict[str, tuple[bool, bool]] = {}
        self._anchored: bool | None = None

    def occurs_in(self, value: Any) -> bool:
        """Whether any string of the value, or the adjacent texts of one content list together, hold a special string."""
        if any(self._special.search(text) for text in strings(value)):
            return True
        return isinstance(value, list) and any(self._special.search(joined) for joined in _joined_parts(value))

    def mark(self, value: Any, marks: Marks) -> Any:
        """A copy with every special string wrapped, and every content part closed by a lone mark."""
        if isinstance(value, str):
            return self._special.sub(lambda found: f"{marks.start}{found[0]}{marks.end}", value)
        if isinstance(value, dict):
            marked = {self.mark(key, marks): self.mark(item, marks) for key, item in value.items()}
            if value.get("type") == "text" and isinstance(value.get("text"), str):
                # Two parts may make up a special string between them.
                marked["text"] += marks.end
            return marked
        return [self.mark(item, marks) for item in value] if isinstance(value, list) else value

    def encode(self, rendered: str, marks: Marks) -> list[int]:
        """Ids of a text rendered from marked values: unmarked special strings as tokens, the rest as plain text."""
        ids: list[int] = []
        literal: list[str] = []
        escaped = tuple(f"\\\\u{ord(mark):x}" for mark in marks)
        start, end = (f"(?:{mark}|{escape})" for mark, escape in zip(marks, escaped, strict=True))
        scanner = re.compile(f"{start}(?P<text>{self._source}){end}|{start}|{end}|(?P<token>{self._source})")
        position, strip_left = 0, False
        for found in scanner.finditer(rendered):
            literal.append(rendered[position : found.start()])
            position = found.end()
            if found["token"] is None:
                literal.append(found["text"] or "")
                continue
            strips = self._strips_of(found["token"])
            text = "".join(literal)
            text = text.lstrip() if strip_left else text
            ids += self._encode_piece(text.rstrip() if strips[0] else text, first=not ids)
            ids.append(self._ids[found["token"]])
            literal, strip_left = [], strips[1]
        text = "".join([*literal, rendered[position:]])
        return ids + self._encode_piece(text.lstrip() if strip_left else text, first=not ids)

    def _encode_piece(self, text: str, first: bool) -> list[int]:
        if not text:
            return []
        if self._anchored is None:
            self._anchored = self._probe_anchor()
        if first or not self._anchored:
            return self._tokenizer.encode(text, parse_special=False)
        anchor = self._tokenizer.encode("\n", parse_special=False)
        ids = self._tokenizer.encode("\n" + text, parse_special=False)
        if ids[: len(anchor)] == anchor:
            return ids[len(anchor) :]
        return self._tokenizer.encode(text, parse_special=False)

    def _probe_anchor(self) -> bool:
        """Whether text after a special token is encoded otherwise than at the start, as SentencePiece's leading space does."""
        token, number = next(iter(self._ids.items()))
        whole = self._tokenizer.encode(f"{token}a b", parse_special=True)
        return whole != [number, *self._tokenizer.encode("a b", parse_special=False)]

    def _strips_of(self, token: str) -> tuple[bool, bool]:
        """Whether the token takes the whitespace to its left, and to its right, into itself."""
        if token not in self._strips:
            bare = self._tokenizer.encode(token, parse_special=True)
            left = self._tokenizer.encode(f" {token}", parse_special=True)
            right = self._tokenizer.encode(f"{token} ", parse_special=True)
            self._strips[token] = (left == bare, right == bare)
        return self._strips[token]


def _joined_parts(messages: list[Any]) -> Iterator[str]:
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            yield "".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
