"""Where the seconds of each step go. The engine fills one record per step when it is asked to."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from batchrun.engine.step import StepPlan
from batchrun.kernels import ops


@dataclass(slots=True)
class StepRecord:
    """One step. Seconds are of the host's clock: where a device works behind it, of giving it the work."""

    step: int
    """From 0."""
    started_s: float
    """On the engine's clock, whose zero is the first step."""
    rows: int = 0
    """Samples that hold pages."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    """Tokens of outputs that were run through the model: one per decoding row."""
    logit_rows: int = 0
    segments: int = 0
    """Attention's pairs of queries and a run of keys; in a step with the members of the one before, those of that one."""
    kv_tokens: int = 0
    """Slots in use, whole pages."""
    schedule_s: float = 0.0
    """Admitting rows and building the step: Python."""
    plan_s: float = 0.0
    """The kernels' attention plan."""
    linear_s: float = 0.0
    """Linear layers, the gate of the MLP included."""
    attention_s: float = 0.0
    elementwise_s: float = 0.0
    """Norms and residuals."""
    rotary_s: float = 0.0
    """Rotary embedding and writing keys and values into the pool."""
    forward_other_s: float = 0.0
    """The rest of the forward pass: Python between the operations, gathers, the logits' conversion."""
    sample_s: float = 0.0
    collect_s: float = 0.0
    """Stop checks and detokenisation: Python."""
    write_s: float = 0.0
    """What the caller did with the step's outputs: recording rows, writing files, reporting."""


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
