"""What goes into the engine and what comes out of it."""

from dataclasses import dataclass, field

import numpy as np

from batchrun.engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The rows to run, as arrays, so that a million of them cost no Python object each.

    Rows are numbered 0..len-1 here ("local row"); `row_index` says which row of the input file each one is.
    """

    tokens: np.ndarray
    """int32 [total tokens], possibly a memory map; row i is tokens[begin[i]:begin[i] + length[i]]."""
    begin: np.ndarray
    """int64 [rows]"""
    length: np.ndarray
    """int32 [rows], prompt tokens of each row."""
    row_index: np.ndarray
    """int64 [rows], position in the input; the key of results and of unseeded draws."""
    params_id: np.ndarray
    """int32 [rows], index into params_table."""
    params_table: list[SamplingParams]
    """The distinct settings."""

    def __len__(self) -> int:
        return len(self.begin)

    def token_ids(self, row: int) -> np.ndarray:
        """int32 [length], a view."""
        low = int(self.begin[row])
        return self.tokens[low : low + int(self.length[row])]

    def params(self, row: int) -> SamplingParams:
        params: SamplingParams = self.params_table[int(self.params_id[row])]
        return params


@dataclass(slots=True)
class Completion:
    """One finished sample of one row. Times are seconds on the engine's clock, whose zero is the first step."""

    row: int
    """row_index of the input."""
    sample: int
    output_ids: list[int]
    """The end token included where there was one."""
    text: str
    finish_reason: str
    """'stop', 'length', 'timeout' or 'error'."""
    error: str | None
    prompt_tokens: int
    cached_tokens: int
    started: float | None = None
    """Start of the first step that computed a token for this row; None for an error row."""
    token_times: list[float] = field(default_factory=list)
    """When each output token was there."""


@dataclass(slots=True)
class EngineStats:
    """Counts of one engine run, in tokens, steps and sequences."""

    computed_prompt_tokens: int = 0
    """Prompt positions computed, those computed again included."""
    recomputed_tokens: int = 0
    """Prompt positions computed again after an eviction or a preemption."""
    recomputed_output_tokens: int = 0
    """Output positions computed again after a preemption."""
    output_tokens: int = 0
    peak_kv_tokens: int = 0
    """Most KV slots in use at once, whole pages."""
    preemptions: int = 0
    evictions: int = 0
    """Tree nodes whose KV was dropped while rows still needed it."""
    steps: int = 0
    decode_steps: int = 0
    """Steps that computed no prompt token."""
    peak_running: int = 0


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
