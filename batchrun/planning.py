"""The step between tokenising and the engine: which rows are computed, in which order, in how much memory.

    all rows with tokens
      - longer than the context            -> error rows
      - identical greedy rows, n > 1       -> one representative each, fanned out afterwards
      - never fit into the pool            -> error rows
      = the rows that run                  -> trie, order, pool

Everything here is a function of the file, the options and the machine's size. Nothing looks at free memory or at the clock,
so that two runs on one machine form the same batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from batchrun.engine.config import EngineConfig, ModelConfig
from batchrun.engine.outputs import PromptSet
from batchrun.engine.sampling_params import SamplingParams
from batchrun.errors import Refused
from batchrun.prefix_cache.dedupe import find_duplicates
from batchrun.prefix_cache.estimate import pages_for_path
from batchrun.prefix_cache.order import RowOrder, order_rows
from batchrun.prefix_cache.trie import Trie, build_trie
from batchrun.rows import RowError

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

DEFAULT_MAX_RUNNING = 256
DEFAULT_CHUNK_TOKENS = 1024
# Rows that started early and run long keep their paths while later ones start, so a window of the order is not all there is.
POOL_SLACK = 1.5


class Limits(Protocol):
    """The part of RunOptions that planning reads; None means chosen here."""

    @property
    def kv_tokens(self) -> int | None: ...
    @property
    def kv_memory(self) -> int | None: ...
    @property
    def chunk_tokens(self) -> int | None: ...
    @property
    def max_running(self) -> int | None: ...
    @property
    def order(self) -> str: ...
    @property
    def dedupe(self) -> bool: ...
    @property
    def prefix_cache(self) -> bool: ...
    @property
    def seed(self) -> int: ...


class KVSize(NamedTuple):
    """What the pool is made of, and how much of it the machine can give."""

    page_size: int
    """Tokens per page, as `kernels.ops.page_size` reports it."""
    bytes_per_token: int
    memory: int
    """Bytes that the pool may take by default, from `hardware.pool_memory`."""
    dtype: str = "auto"
    """`EngineConfig.kv_dtype`."""

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.bytes_per_token


class Target(NamedTuple):
    """One row of the input that gets the outputs of a computed row."""

    row_index: int
    copies: int
    """Samples to write: n for a greedy row (its one sample that often), 1 per computed sample else (see `JobPlan.fan_out`)."""


@dataclass(frozen=True)
class JobPlan:
    """What the engine runs, and what becomes of its outputs."""

    layout: "Layout"
    order: RowOrder
    config: EngineConfig
    errors: list[RowError]
    """Rows that cannot run, ascending row_index."""
    warnings: list[str]
    prompt_tokens: int
    """Of all the rows that run or are fanned out, each once."""
    target_begin: Int64Array
    """[computed rows + 1], the interval of the target arrays that belongs to each."""
    target_row: Int64Array
    """[targets], row_index."""
    target_copies: Int32Array
    """[targets], how often each sample of the computed row is written: n for a greedy row, else 1."""

    @property
    def prompts(self) -> PromptSet:
        """The rows that are computed, ascending row_index; their max_tokens end at the context, n is 1 when greedy."""
        return self.layout.prompts

    @property
    def trie(self) -> Trie:
        return self.layout.trie

    @property
    def max_output_tokens(self) -> int:
        """Output tokens computed when every output is as long as it may be."""
        return int((self.layout.max_tokens * self.layout.samples).sum())

    def fan_out(self, row_index: int) -> list[Target]:
        """The input rows that a computed row stands for, itself first.

        A completion (row_index, sample) of the engine is written to each target: as samples 0..copies - 1 when the row
        is greedy (it has the one sample 0), else as its own sample (copies is 1).
        """
        local = int(np.searchsorted(self.prompts.row_index, row_index))
        assert self.prompts.row_index[local] == row_index, f"row {row_index} is not computed"
        low, high = int(self.target_begin[local]), int(self.target_begin[local + 1])
        return [Target(int(row), int(n)) for row, n in zip(self.target_row[low:high], self.target_copies[low:high], strict=True)]


class ParamsTable:
    """Numbers the distinct settings of rows, so that a row costs 4 bytes."""

    def __init__(self, table: Sequence[SamplingParams] = ()) -> None:
        self.table = list(table)
        self._numbers = {params: number for number, params in enumerate(self.table)}

    def add(self, params: SamplingParams) -> int:
        """The number of these settings, a new one when they are new."""
        number = self._numbers.setdefault(params, len(self.table))
        if number == len(self.table):
            self.table.append(params)
        return number


def prompt_set(
    tokens: Int32Array, begin: Int64Array, length: Int32Array, row_index: Int64Array, params: ParamsTable, params_id: Int32Array
) -> PromptSet:
    """The rows that have tokens; those of length 0 are in error and left out."""
    rows = PromptSet(tokens, begin, length, row_index, params_id, list(params.table))
    return take(rows, length > 0)


def make_plan(prompts: PromptSet, model: ModelConfig, limits: Limits, kv: KVSize) -> JobPlan:
    """Plan a job.

    Args:
        prompts: every row that was tokenised, ascending row_index, each of at least one token.
        model: its context limits the rows.
        limits: the user's choices.
        kv: page size, bytes per token and the memory at hand.

    Raises:
        Refused: --kv-tokens or --kv-memory is less than a page.
    """
    fixed_pages = _pages_asked_for(limits, kv)
    prompts, errors = _within_context(prompts, model.max_context)
    prompts, copies = _one_sample_when_greedy(prompts)
    repeated = int((copies > 1).sum())
    alone = np.zeros(len(prompts), bool)
    while True:
        trie = build_trie(prompts.tokens, prompts.begin, prompts.length, limits.prefix_cache, alone)
        representative = _representatives(trie, prompts, limits)
        kept = representative == np.arange(len(prompts))
        layout = _lay_out(take(prompts, kept), trie.keep_rows(kept), kv.page_size)
        most_pages = fixed_pages or _most_pages(layout, kv)
        local = (np.cumsum(kept) - 1)[representative]
        unfit = (layout.pages > most_pages)[local]
        if not unfit.any():
            break
        needed = -(-prompts.length // kv.page_size) + layout.output_pages[local]
        never = needed > most_pages
        errors += [_never_fits(prompts, int(row), int(needed[row]), most_pages, kv) for row in np.flatnonzero(never)]
        if not never.any():
            # Each node of a path begins a page: in one piece, shared with no other, these rows need fewer and do fit.
            alone |= unfit
        prompts, copies, alone = take(prompts, ~never), copies[~never], alone[~never]
    errors.sort(key=lambda error: error.row_index)
    expected_output = (layout.max_tokens * layout.samples).astype(np.float64)
    order = order_rows(layout.trie, expected_output, "given" if limits.order == "given" else "plan")
    max_running = limits.max_running or DEFAULT_MAX_RUNNING
    by_computed = np.argsort(local, kind="stable")
    return JobPlan(
        layout=layout,
        order=order,
        config=EngineConfig(
            num_pages=fixed_pages or min(most_pages, useful_pages(layout, order, limits.order == "plan", max_running)),
            page_size=kv.page_size,
            max_running=max_running,
            chunk_tokens=limits.chunk_tokens or DEFAULT_CHUNK_TOKENS,
            max_context=model.max_context,
            job_seed=limits.seed,
            kv_dtype=kv.dtype,
        ),
        errors=errors,
        warnings=_warnings(repeated, int(alone.sum())),
        prompt_tokens=int(prompts.length.sum(dtype=np.int64)),
        target_begin=np.searchsorted(local[by_computed], np.arange(len(layout.prompts) + 1)).astype(np.int64),
        target_row=prompts.row_index[by_computed],
        target_copies=copies[by_computed],
    )


def _warnings(repeated: int, alone: int) -> list[str]:
    warnings = []
    if repeated:
        warnings.append(f"{_rows(repeated)} greedy with n > 1: computed once, its one output written n times")
    if alone:
        warnings.append(f"{_rows(alone)} computed without sharing: the KV pool is too small for a prompt in pieces")
    return warnings


def _rows(count: int) -> str:
    return "1 row is" if count == 1 else f"{count} rows are"


def take(prompts: PromptSet, rows: npt.NDArray[np.bool_]) -> PromptSet:
    """The rows where `rows`, bool [rows], is true."""
    return replace(
        prompts,
        begin=prompts.begin[rows],
        length=prompts.length[rows],
        row_index=prompts.row_index[rows],
        params_id=prompts.params_id[rows],
    )


def _pages_asked_for(limits: Limits, kv: KVSize) -> int | None:
    if limits.kv_tokens is not None:
        asked, pages, least = f"--kv-tokens is {limits.kv_tokens}", limits.kv_tokens // kv.page_size, kv.page_size
    elif limits.kv_memory is not None:
        asked, pages, least = f"--kv-memory is {limits.kv_memory} bytes", limits.kv_memory // kv.page_bytes, kv.page_bytes
    else:
        return None
    if pages < 1:
        raise Refused(f"{asked}, less than one page of the pool: give at least {least}")
    return pages


def _within_context(prompts: PromptSet, max_context: int) -> tuple[PromptSet, list[RowError]]:
    """Without the prompts that leave no room for output; max_tokens ends at the context."""
    errors = []
    for row in np.flatnonzero(prompts.length >= max_context).tolist():
        length = int(prompts.length[row])
        what = "more than" if length > max_context else "which leaves no room for output in"
        message = f"the prompt has {length} tokens, {what} the model's context of {max_context}: shorten it"
        errors.append(RowError(row_index=int(prompts.row_index[row]), message=message))
    prompts = take(prompts, prompts.length < max_context)
    max_tokens = np.array([params.max_tokens for params in prompts.params_table], np.int64)[prompts.params_id]
    room = max_context - prompts.length.astype(np.int64)
    params_id, table = prompts.params_id.copy(), ParamsTable(prompts.params_table)
    cut = np.flatnonzero(max_tokens > room)
    # Of a million rows that ask for more than there is room for, few differ in settings and room.
    span = max_context + 1
    kinds, kind = np.unique(params_id[cut] * np.int64(span) + room[cut], return_inverse=True)
    new = [table.add(replace(prompts.params_table[at // span], max_tokens=at % span)) for at in kinds.tolist()]
    params_id[cut] = np.array(new, np.int32)[kind]
    return replace(prompts, params_id=params_id, params_table=table.table), errors


def _one_sample_when_greedy(prompts: PromptSet) -> tuple[PromptSet, Int32Array]:
    """The rows with n = 1 and no seed where these change nothing, and how often to write each sample, int32 [rows]."""
    copies = np.array([params.n if params.greedy else 1 for params in prompts.params_table], np.int32)[prompts.params_id]
    single = ParamsTable()
    number = [single.add(replace(params, n=1, seed=None) if params.greedy else params) for params in prompts.params_table]
    return replace(prompts, params_id=np.array(number, np.int32)[prompts.params_id], params_table=single.table), copies


def _representatives(trie: Trie, prompts: PromptSet, limits: Limits) -> Int64Array:
    """Row -> the first row with equal tokens and equal greedy settings; itself when dedupe is off or it draws."""
    if not (limits.dedupe and limits.prefix_cache):
        return np.arange(len(prompts), dtype=np.int64)
    greedy = np.array([params.greedy for params in prompts.params_table], bool)[prompts.params_id]
    return find_duplicates(trie, prompts.params_id.astype(np.int64), greedy)


@dataclass(frozen=True)
class Layout:
    """The computed rows as a tree, and what each needs in pages."""

    prompts: PromptSet
    trie: Trie
    node_pages: Int64Array
    """[nodes]: a node starts on a page boundary."""
    path_pages: Int64Array
    """[rows]"""
    output_pages: Int64Array
    """[rows], of one sample; its last token needs no slot."""
    max_tokens: Int64Array
    """[rows]"""
    samples: Int64Array
    """[rows]"""

    @property
    def pages(self) -> Int64Array:
        """[rows], what a row must have to run one sample to its end."""
        return self.path_pages + self.output_pages


def _lay_out(prompts: PromptSet, trie: Trie, page_size: int) -> Layout:
    node_pages = -(-(trie.end.astype(np.int64) - trie.start) // page_size)
    path_pages = pages_for_path(trie, page_size)
    max_tokens = np.array([params.max_tokens for params in prompts.params_table], np.int64)[prompts.params_id]
    samples = np.array([params.n for params in prompts.params_table], np.int64)[prompts.params_id]
    return Layout(prompts, trie, node_pages, path_pages, -(-(max_tokens - 1) // page_size), max_tokens, samples)


def _most_pages(layout: Layout, kv: KVSize) -> int:
    """The pool that the machine allows: its usual share, or for the sake of a single long row up to four times that."""
    usual = max(1, kv.memory // kv.page_bytes)
    longest = int(layout.pages.max(initial=0))
    return max(usual, min(longest, 4 * usual))


class _Walk(NamedTuple):
    """Pages along the order of the rows, int64 [rows] each but `total`."""

    path: Int64Array
    output: Int64Array
    """Of the samples that run side by side."""
    slots: Int64Array
    """Those samples."""
    total: Int64Array
    """[rows + 1], pages that the rows before this one added to those before them."""

    @property
    def alone(self) -> Int64Array:
        """What a window of rows that begins here needs beyond the rows after the first."""
        return self.path + self.output - self.total[1:]


def _walk(layout: Layout, order: RowOrder, depth_first: bool, max_running: int) -> _Walk:
    rows = order.rows
    slots = np.minimum(layout.samples, max_running)[rows]
    path, output = layout.path_pages[rows], layout.output_pages[rows] * slots
    new = np.zeros(len(rows), np.int64)
    if depth_first:
        first_use = layout.trie.over_rows(np.minimum, order.position)  # of each node
        np.add.at(new, first_use[1:], layout.node_pages[1:])  # the root has no pages
    else:
        new += path
    return _Walk(path, output, slots, np.append(0, np.cumsum(new + output)))


def useful_pages(layout: Layout, order: RowOrder, depth_first: bool, max_running: int) -> int:
    """The pool beyond which this job gains nothing: `max_running` samples side by side, with their paths and outputs."""
    if not len(layout.prompts):
        return 1
    everything = int(layout.node_pages.sum() + (layout.samples * layout.output_pages).sum())
    walk = _walk(layout, order, depth_first, max_running)
    first_slot = np.cumsum(walk.slots) - walk.slots
    window = walk.alone + walk.total[np.searchsorted(first_slot, first_slot + max_running)]
    # Twice the longest path: then the next row's prefix can be computed while the last one is still in use.
    wanted = max(int(POOL_SLACK * int(window.max())), int((2 * walk.path + walk.output).max()))
    return max(min(wanted, everything), int(layout.pages.max()))


def rows_side_by_side(plan: JobPlan, pages: int, depth_first: bool) -> int:
    """Samples that a pool of `pages` holds at once with their paths and longest outputs: the mean over places in the order."""
    if not len(plan.prompts):
        return 0
    walk = _walk(plan.layout, plan.order, depth_first, max_running=int(plan.layout.samples.max()))
    end = np.searchsorted(walk.total, pages - walk.alone, side="right") - 1
    num_samples = np.append(0, np.cumsum(walk.slots))
    # Windows that the end of the job cuts short say nothing, unless all of it fits.
    full = np.flatnonzero(end < len(walk.path)) if end[0] < len(walk.path) else np.array([0])
    return int(np.mean(np.maximum(num_samples[end[full]] - num_samples[full], 0)))


def _never_fits(prompts: PromptSet, row: int, pages: int, pool_pages: int, kv: KVSize) -> RowError:
    message = (
        f"the row needs {pages * kv.page_size} tokens of KV memory ({prompts.length[row]} prompt and up to "
        f"{prompts.params(row).max_tokens} output, in whole pages of {kv.page_size}) and the pool has "
        f"{pool_pages * kv.page_size}: raise --kv-tokens or --kv-memory, or lower max_tokens"
    )
    return RowError(row_index=int(prompts.row_index[row]), message=message)
