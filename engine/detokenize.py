"""Token ids to text, one token at a time, never half a character."""

import codecs
from typing import Protocol


class TokenText(Protocol):
    """The part of a tokenizer that turns ids into text; `batchrun.engine.tokenizer.Tokenizer` has it."""

    strips_leading_space: bool

    def decode(self, ids: list[int], skip_special: bool = True) -> str: ...

    def token_bytes(self, index: int, skip_special: bool = True) -> bytes: ...


class TextStream:
    """The text of one output as its tokens arrive, special tokens left out.

    Works on the tokens' bytes, so each token costs the same however long the output is, and a character is out once its
    last byte is there. Bytes that cannot be UTF-8 become U+FFFD as soon as that is certain.

    Invariant: `text + held` is the tokenizer's `decode` of all tokens so far.
    """

    def __init__(self, tokenizer: TokenText) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = tokenizer.strips_leading_space  # until the first character is out
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """All completed text so far."""
        return "".join(self._pieces)

    @property
    def held(self) -> str:
        """What the incomplete character at the end looks like in `decode`: U+FFFD, or '' when there is none."""
        return self._decoder.getstate()[0].decode("utf-8", errors="replace")

    def push(self, token_id: int) -> str:
        """Add a token; the text that it completes: '' while a character is incomplete, or for a special token."""
        piece = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        if piece and self._strip:
            self._strip = False
            piece = piece.removeprefix(" ")
        if piece:
            self._pieces.append(piece)
        return piece

    def finish(self) -> str:
        """The whole text, equal to decoding all tokens at once; a character cut at the end is U+FFFD, as in transformers."""
        return self.text + self.held
