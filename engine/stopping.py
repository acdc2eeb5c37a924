"""When a sequence ends, and what text is left of it."""

from batchrun.engine.detokenize import TextStream, TokenText
from batchrun.engine.sampling_params import SamplingParams


class StopChecker:
    """Watches one sequence's output; made when the sequence starts and kept with it, preemption included.

    A token is checked in this order:
      1. an end token, unless `ignore_eos`: 'stop'. It stays in the output ids and is not shown in the text;
      2. a stop string in the output's text (never in the prompt's): 'stop'. The last token is the first after which the
         decoded output contains one. Of several, the one that begins first counts, and of those that begin together the
         longest. The text ends before it, or behind it with `include_stop`;
      3. `max_tokens`: 'length'.

    Without stop strings no text is decoded until the end.
    """

    def __init__(self, params: SamplingParams, eos_ids: frozenset[int], tokenizer: TokenText) -> None:
        self._params = params
        self._end_ids = frozenset() if params.ignore_eos else eos_ids
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer) if params.stop else None
        self._overlap = max((len(stop) for stop in params.stop), default=1) - 1
        self._tail = ""  # end of the text so far, in which a stop string may have begun
        self._length = 0  # characters of text so far
        self._text_end: int | None = None  # where a stop string cuts the text
        self._ended = False  # the last token was an end token

    def push(self, token_id: int, num_output: int) -> str | None:
        """Look at the newest output token.

        Args:
            token_id: the token.
            num_output: output tokens so far, this one included.

        Returns:
            None to go on, else 'stop' or 'length'.
        """
        if token_id in self._end_ids:
            self._ended = True
            return "stop"
        if self._stream is not None and self._search(self._stream.push(token_id), self._stream.held):
            return "stop"
        return "length" if num_output >= self._params.max_tokens else None

    def final_text(self, output_ids: list[int]) -> str:
        """The text of the whole output, after the last token was pushed; a character cut at the end is U+FFFD."""
        if self._stream is not None and self._text_end is not None:
            return (self._stream.text + self._stream.held)[: self._text_end]
        return self._tokenizer.decode(output_ids[:-1] if self._ended else output_ids)

    def _search(self, piece: str, held: str) -> bool:
        """Whether a stop string ends in the new piece, or in the replacement characters behind it; notes where to cut."""
        text = self._tail + piece + held
        begin = self._length - len(self._tail)
        found = [(at, -len(stop)) for stop in self._params.stop if (at := text.find(stop)) >= 0]
        if found:
            at, negative_length = min(found)
            self._text_end = begin + at - (negative_length if self._params.include_stop else 0)
            return True
        self._length += len(piece)
        text = self._tail + piece
        self._tail = text[max(0, len(text) - self._overlap) :]
        return False
