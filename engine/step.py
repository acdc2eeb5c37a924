"""What one engine step computes: plain numbers, no tensors. Emitted by the scheduler, executed by the runner.

A step is a list of *query runs*: consecutive tokens of one tree node (prefill) or of one sequence's output (decode, or
recomputation). Short runs lie in depth-first order of the tree, so those beneath a node are an interval of the step's
tokens, and the keys of a node are read once for all of them. Long runs come after them, each with all its keys at once:

    step tokens   | row 1 | row 2 | row 3 | node A        | node D        |
    A's keys      |<-- queries beneath -->|
    B's keys      |<------------->|
    own keys      |<----->|<----->|<----->|<------------->|<- A's first ->|   each run causally behind itself
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchrun.engine.kv_pool import PageRun
from batchrun.engine.sequence import Sequence
from batchrun.prefix_cache.radix import Node

JOIN_PRIVATE_KEYS = 256
"""A node with one decoding row beneath it is read together with the row's own keys up to this length: one gather
instead of a call and a merge. Longer ones are read in place."""
JOIN_SHARED_KEYS = 48
"""The same for nodes with several decoding rows beneath: keys x rows up to this are cheaper to read once per row."""
LONG_RUN = 32
"""Tokens from which a run takes the keys of all its ancestors for itself: it computes so much on a key that reading it
once more costs nothing, while a partial result per token and ancestor does."""


class QueryRun(NamedTuple):
    """Consecutive tokens of one node or one sequence, with the keys that they own."""

    tree_key: tuple[int, int, int]
    ancestors: tuple[Node, ...]
    """Nodes whose keys all these tokens see, root first."""
    token_ids: npt.NDArray[np.int32]
    first_position: int
    slots: npt.NDArray[np.int64]
    """Where the tokens' keys go."""
    own_runs: list[PageRun]
    """Pages of the node or sequence itself."""
    first_own: int
    """Own keys that lie before the first token of the run."""
    wants_logits: bool
    """Whether the last token's logits are sampled from."""
    source: Node | Sequence
    """Whose tokens these are."""

    @property
    def is_long(self) -> bool:
        return len(self.token_ids) >= LONG_RUN

    @property
    def step_order(self) -> tuple[bool, tuple[int, int, int]]:
        """Short runs first, each kind in depth-first order."""
        return self.is_long, self.tree_key


class KeySegment(NamedTuple):
    """Queries [query_start, query_start + query_count) of the step see keys of these slots; see kernels/ops.py."""

    query_start: int
    query_count: int
    runs: list[tuple[int, int]]
    num_keys: int
    causal: bool


@dataclass(slots=True)
class StepPlan:
    """One step, ready to run."""

    runs: list[QueryRun]
    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    logit_rows: npt.NDArray[np.int64]
    """Step tokens whose logits are wanted, ascending."""
    segments: list[KeySegment] | None
    """None: the previous step's segments, each own segment one key longer (pure decode, same members)."""
    prompt_tokens: int


def slot_runs(runs: Iterable[PageRun], page_size: int, num_slots: int | None = None) -> list[tuple[int, int]]:
    """Pages as (first slot, number of slots), cut after num_slots; all of them when None."""
    spans: list[tuple[int, int]] = []
    for run in runs:
        size = run.count * page_size
        if num_slots is not None:
            size = min(size, num_slots)
            num_slots -= size
        if size:
            spans.append((run.start * page_size, size))
    return spans


def slot_array(runs: Iterable[PageRun], page_size: int) -> npt.NDArray[np.int64]:
    """The slots of the pages, in key order."""
    spans = [np.arange(first, first + size, dtype=np.int64) for first, size in slot_runs(runs, page_size)]
    return np.concatenate(spans) if spans else np.empty(0, np.int64)


def slots_between(runs: Iterable[PageRun], page_size: int, first: int, count: int) -> npt.NDArray[np.int64]:
    """Slots of own keys [first, first + count)."""
    pieces = []
    for start, size in slot_runs(runs, page_size):
        low, high = max(first, 0), min(first + count, size)
        if low < high:
            pieces.append(np.arange(start + low, start + high, dtype=np.int64))
        first -= size
    return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


def build_segments(runs: list[QueryRun], page_size: int) -> list[KeySegment]:
    """The attention of a step, from its runs in step order.

    A sweep with a stack: a node is open while consecutive short runs lie beneath it and becomes one segment when it closes.
    A short node above decoding rows is joined to their own keys instead (see JOIN_PRIVATE_KEYS), all nodes above a long run
    to that run's.
    """
    starts = np.cumsum([0] + [len(run.token_ids) for run in runs])
    segments: list[KeySegment] = []
    joined: list[list[Node]] = [[] for _ in runs]
    stack: list[tuple[Node, int]] = []

    def close(depth: int, end: int) -> None:
        while len(stack) > depth:
            node, begin = stack.pop()
            if _worth_joining(node, runs, begin, end):
                for index in range(begin, end):
                    joined[index].append(node)
            else:
                low, high = int(starts[begin]), int(starts[end])
                spans = slot_runs(node.runs, page_size, node.length)
                segments.append(KeySegment(low, high - low, spans, node.length, causal=False))

    for index, run in enumerate(runs):
        if run.is_long:
            close(0, index)
            joined[index] = list(run.ancestors)
            continue
        common = 0
        for (node, _), ancestor in zip(stack, run.ancestors, strict=False):
            if node is not ancestor:
                break
            common += 1
        close(common, index)
        stack.extend((node, index) for node in run.ancestors[common:])
    close(0, len(runs))

    for index, run in enumerate(runs):
        count = len(run.token_ids)
        spans = [span for node in joined[index] for span in slot_runs(node.runs, page_size, node.length)]
        before = sum(node.length for node in joined[index]) + run.first_own
        spans += slot_runs(run.own_runs, page_size)
        segments.append(KeySegment(int(starts[index]), count, spans, before + count, causal=True))
    return segments


def _worth_joining(node: Node, runs: list[QueryRun], begin: int, end: int) -> bool:
    if end - begin == 1:
        limit = JOIN_PRIVATE_KEYS
    elif node.length * (end - begin) <= JOIN_SHARED_KEYS:
        limit = JOIN_SHARED_KEYS
    else:
        return False
    return node.length <= limit and all(len(runs[index].token_ids) == 1 for index in range(begin, end))
