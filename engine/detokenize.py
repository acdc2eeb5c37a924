"""Token ids to text, one token at a time, never half a character."""

from typing import Protocol

REPLACEMENT = "\ufffd"
_MAX_INCOMPLETE = 3  # bytes of a cut UTF-8 character; a byte-fallback decoder shows one U+FFFD for each of them


class Decodes(Protocol):
    """The part of a tokenizer that this needs."""

    def decode(self, ids: list[int], skip_special: bool = True) -> str: ...


class TextStream:
    """The text of one output as its tokens arrive, special tokens left out.

    A decoder may treat the first token apart (SentencePiece drops its leading space), so a new token is decoded behind
    the tokens of the last piece of text, and what that piece alone gives is cut off: the two-offset method of
    text-generation-inference and vLLM.

    Invariant: `text + held` is the decoded text of all tokens so far; `held` is at most three U+FFFD, which the next
    token may turn into a character. (A byte-fallback decoder can take back a character when invalid bytes follow
    it; then `finish` is right and `text` is not.)
    """

    def __init__(self, tokenizer: Decodes) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._window: list[int] = []  # context, then the tokens whose text is not all out
        self._context = 0  # tokens of the window whose text is out
        self._context_text = ""
        self._emitted = 0  # characters of the window's text behind the context that are out
        self._pieces: list[str] = []
        self.held = ""
        """What an incomplete character at the end looks like now: '' or up to three U+FFFD."""

    @property
    def text(self) -> str:
        """All completed text so far."""
        return "".join(self._pieces)

    def push(self, token_id: int) -> str:
        """Add a token; the text that it completes, '' while a character is incomplete or the token is special."""
        self._ids.append(token_id)
        self._window.append(token_id)
        new = self._tokenizer.decode(self._window)[len(self._context_text) :]
        if not new and not self.held:
            # A special token: out of the window, or a long run of them would push the context out.
            self._window.pop()
            return ""
        complete = len(new)
        while complete > max(self._emitted, len(new) - _MAX_INCOMPLETE) and new[complete - 1] == REPLACEMENT:
            complete -= 1
        piece, self.held = new[self._emitted : complete], new[complete:]
        self._emitted = max(self._emitted, complete)
        if not self.held:
            del self._window[: self._context]
            self._context = len(self._window)
            self._context_text = self._tokenizer.decode(self._window)
            self._emitted = 0
        if piece:
            self._pieces.append(piece)
        return piece

    def finish(self) -> str:
        """The whole text, equal to decoding all tokens at once; a character cut at the end is U+FFFD, as in transformers."""
        return self._tokenizer.decode(self._ids)
