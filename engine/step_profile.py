"""Where the seconds of each step go. The engine fills one record per step when it is asked to."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from batchrun.engine.outputs import StepRecord
from batchrun.engine.step import StepPlan
from batchrun.kernels import ops


class StepProfiler:
    """Measures one step after the other.

    Args:
        emit: gets each record when its step is over.
    """

    KINDS = ("plan", "linear", "attention", "elementwise", "rotary")

    def __init__(self, emit: Callable[[StepRecord], None]) -> None:
        self._emit = emit
        self._record = StepRecord(0, 0.0)
        self._segments = 0

    def begin(self, step: int, now: float) -> None:
        """A step begins at `now` on the engine's clock."""
        self._record = StepRecord(step, now)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """The block's seconds belong to the field `NAME_s`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._spend(name, time.perf_counter() - began)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The block is the forward pass, whose operations are told apart."""
        began = time.perf_counter()
        with ops.timing() as spent:
            yield
        total = time.perf_counter() - began
        for kind in self.KINDS:
            self._spend(kind, spent.pop(kind, 0.0))
            total -= getattr(self._record, f"{kind}_s")
        assert not spent, f"operations of an unknown kind: {sorted(spent)}"
        self._spend("forward_other", total)

    def count(self, step: StepPlan, rows: int, kv_tokens: int) -> None:
        """Note the step's sizes."""
        record = self._record
        if step.segments is not None:
            self._segments = len(step.segments)
        record.rows, record.kv_tokens, record.segments = rows, kv_tokens, self._segments
        record.prompt_tokens = step.prompt_tokens
        record.output_tokens = len(step.token_ids) - step.prompt_tokens
        record.logit_rows = len(step.logit_rows)

    def end(self) -> None:
        """The step is over: emit its record."""
        self._emit(self._record)

    def _spend(self, name: str, seconds: float) -> None:
        setattr(self._record, f"{name}_s", getattr(self._record, f"{name}_s") + seconds)
