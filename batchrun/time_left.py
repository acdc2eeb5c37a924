"""How long a run still takes: what is left of prompt and output tokens, at what each kind has cost so far."""

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

SAMPLE_S = 1.0
LEAST_SAMPLES = 3
MEMORY = 0.97
"""Weight of a sample beside the next one: costs follow the number of rows that run side by side, which changes."""
LEAST_INDEPENDENCE = 0.03
"""Below this, prompt and output tokens have come in too constant a proportion to tell their costs apart."""
LEAST_SHARE = 0.02
"""Of the whole run: before that much has gone by, a guess of the rest is worth nothing."""


class OutputsLeft:
    """Expects the output tokens that are still to come, from the outputs that have ended."""

    def __init__(self, row_index: npt.NDArray[np.int64], max_tokens: npt.NDArray[np.int64], samples: npt.NDArray[Any]) -> None:
        """Of each computed row: its row_index, ascending, its longest output, and its samples."""
        self._row_index, self._max_tokens = row_index, max_tokens
        self._samples = int(samples.sum())
        self._most = int((max_tokens * samples).sum())
        self._num_ended = 0
        self._ended_tokens = 0

    def end(self, row_index: int, output_tokens: int) -> None:
        """One sample more of the row is finished."""
        self._num_ended += 1
        self._most -= int(self._max_tokens[np.searchsorted(self._row_index, row_index)])
        self._ended_tokens += output_tokens

    def tokens(self, generated: int) -> float:
        """Output tokens to come, when `generated` are there.

        All tokens over the ended outputs are the mean length as if an output could end at any token alike: the estimate for
        a constant rate when some are still running. No output gets longer than it may be.
        """
        most = max(0, self._most - (generated - self._ended_tokens))
        return min(most, (self._samples - self._num_ended) * generated / self._num_ended) if self._num_ended else most


class _Sample(NamedTuple):
    at: float
    prompt: int
    output: int


class TimeLeft:
    """Fits seconds = a x prompt tokens + b x output tokens to what each second brought, by weighted least squares."""

    def __init__(self) -> None:
        self._first: _Sample | None = None
        self._last: _Sample | None = None
        self._num_samples = 0
        self._pp = self._po = self._oo = self._pt = self._ot = 0.0

    def add(self, now: float, prompt: int, output: int) -> None:
        """Tokens computed by this process so far, prompt and output."""
        sample = _Sample(now, prompt, output)
        if self._first is None or self._last is None:
            self._first = self._last = sample
            return
        seconds = now - self._last.at
        if seconds < SAMPLE_S:
            return
        p, o = prompt - self._last.prompt, output - self._last.output
        self._pp, self._po, self._oo, self._pt, self._ot = (
            MEMORY * before + new
            for before, new in zip(
                (self._pp, self._po, self._oo, self._pt, self._ot),
                (p * p, p * o, o * o, p * seconds, o * seconds),
                strict=True,
            )
        )
        self._last = sample
        self._num_samples += 1

    def seconds(self, prompt_left: float, output_left: float) -> float | None:
        """For the tokens that are left; None while it cannot be told."""
        if self._first is None or self._last is None or self._num_samples < LEAST_SAMPLES:
            return None
        left = self._fitted(prompt_left, output_left)
        gone = self._last.at - self._first.at
        return left if left is not None and gone >= LEAST_SHARE * (gone + left) else None

    def _fitted(self, prompt_left: float, output_left: float) -> float | None:
        p, o = self._pp, self._oo
        if not p or not o:
            kind_left, other_left, squares, times = (
                (prompt_left, output_left, p, self._pt) if p else (output_left, prompt_left, o, self._ot)
            )
            return None if other_left or not squares else kind_left * times / squares
        determinant = p * o - self._po**2
        if determinant < LEAST_INDEPENDENCE * p * o:
            # In one proportion so far: what is left can be told only if it is in the same, or nearly all of one kind is done.
            done, left = (p / o) ** 0.5, prompt_left / output_left if output_left else math.inf
            return output_left * self._ot / o if done / 1.5 <= left <= done * 1.5 else None
        a = max(0.0, (self._pt * o - self._ot * self._po) / determinant)
        b = max(0.0, (self._ot * p - self._pt * self._po) / determinant)
        if not a or not b:
            a, b = (self._pt / p, 0.0) if a else (0.0, self._ot / o)
        return a * prompt_left + b * output_left
