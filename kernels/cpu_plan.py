"""The CPU's attention plan: which items are attended together, in which calls. Built once per membership change.

An item's keys become *parts* with disjoint keys; a part yields `(out, logsumexp)` for its queries, and a token's partial
results are merged exactly: l = logsumexp_i(l_i), o = sum_i exp(l_i - l) o_i. Two kinds of parts:

    gathered    few queries (a decoding row's own keys, a node shared by few rows): the keys of many items are copied into one
                padded batch and attended in one call. Padding reads the pool's slot of zeros and is masked. A short node
                shared by decoding rows joins the rows' own keys.
    direct      everything else: calls on the pool's memory as it lies (copied first when the runs are scattered).

The thresholds change the order of additions, so they are constants and never come from timing during a run. They were
measured on a Zen 5 EPYC (AVX-512 with bf16, no AMX) with 9 query and 3 key-value heads of 64.
"""

import functools
import itertools
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from batchrun.kernels.cpu import KVCache
from batchrun.kernels.spec import AttentionItem, check_items

Ints = npt.NDArray[np.int64]

GATHER_MAX_QUERIES = 32
GATHER_MAX_KEYS = 2048
"""Longer items are attended where they lie: copying the keys no longer pays."""
JOIN_MAX_KEYS = 32
"""Shared keys of decoding rows that are copied to each row's own: fewer than a partial result per row would cost."""
BATCH_MAX_KEYS = 8192
"""Keys in one gathered call, so that the copies of a layer stay in the cache."""
BATCH_MAX_SCORES = 9 << 18
"""Query-key pairs of all heads in one gathered call: they take 8 bytes each."""
BATCH_MAX_WASTE = 1024
"""Padding keys in a gathered call before the shorter items get one of their own; about what a call costs."""
KEY_ALIGN = 16
"""Lengths of gathered calls are multiples of this: oneDNN builds its kernels anew for each shape it meets."""
QUERY_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Query counts of gathered calls; others are padded to the next."""
GEMM_MIN_ROWS = 96
"""Packed query rows from which an item where it lies is faster by matrix products than by the flash operation."""


@functools.cache
def _has_bf16_gemm() -> bool:
    # Private to torch: a release without it gets the flash operation, which is right everywhere.
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return torch.backends.mkldnn.is_available() and supported is not None and bool(supported())  # type: ignore[no-untyped-call]


def uses_gemm(dtype: torch.dtype) -> bool:
    """Whether attention in this dtype is computed by matrix products: where bfloat16 has its own instructions."""
    return dtype == torch.bfloat16 and _has_bf16_gemm()


@dataclass(frozen=True)
class Keys:
    """Where the keys of a direct part lie: from slot `first` on when consecutive, else at `index`."""

    first: int
    count: int
    index: torch.Tensor | None


@dataclass
class Direct:
    """Queries [start, start + count) on keys where they lie."""

    item: int
    """Position in the plan's items, for growth."""
    start: int
    count: int
    keys: Keys
    causal: bool
    """The last `count` keys are the queries' own."""
    gemm: bool
    """By matrix products, any causal part; else by the flash operation, causal only as a square."""
    level: int = 0


@dataclass
class Entry:
    """An item in a gathered call, behind `joined` keys of short shared items."""

    item: int
    joined: int = 0
    level: int = 0


class Batch(NamedTuple):
    """A gathered call: B items of Q query rows (padded) on L keys (padded)."""

    queries: int
    num_keys: int
    slots: torch.Tensor
    """int64 [B * L]."""
    mask: torch.Tensor | None
    """[B, 1 or Q * group, L] of 0 and -inf; None when every query sees every key."""
    tokens: torch.Tensor | slice
    """int64 [B * Q]: the query rows' tokens; any token for padding."""
    targets: torch.Tensor
    """int64 [B * Q]: rows of the partial results; padding goes to the spare last row."""


@dataclass
class AttentionPlan:
    """A step's attention, prepared for all layers. Opaque outside this folder; belongs to one pool."""

    kv: KVCache
    items: list[AttentionItem]
    num_tokens: int
    num_keys: Ints
    """Current keys of each item: those of `items` plus what `advance_plan` added."""
    grows: npt.NDArray[np.bool_]
    """Items that get one more key per `advance_plan`."""
    directs: list[Direct] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    entry_slots: Ints = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    """Slots of each entry's keys, reserved ones included."""
    batches: list[Batch] = field(default_factory=list)
    levels: int = 1
    covered: bool = True
    """Every token has a partial result in every level."""
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    """Partial results, only with more than one level."""


def build_plan(kv: KVCache, items: list[AttentionItem], num_tokens: int) -> AttentionPlan:
    """Prepare the attention of a step of `num_tokens` tokens.

    Every token is in at least one item, and the items a token is in have disjoint keys (not checked). The plan holds until
    membership changes; in steps that only decode, `advance_plan` moves it on.

    Raises:
        ValueError: intervals outside the step, runs outside the pool, more keys than slots, a token in no item.
    """
    check_items(items, num_tokens, kv.num_slots)
    num_keys = np.array([item.num_keys for item in items], np.int64)
    grows = np.array([item.causal and item.query_count == 1 for item in items], bool)
    plan = AttentionPlan(kv, items, num_tokens, num_keys, grows)
    _lay_out(plan)
    return plan


def advance_plan(plan: AttentionPlan) -> None:
    """Move a plan of decoding rows to the next step: each causal item with one query gets one more key.

    The new key's slot is the next of the item's runs. Afterwards the plan equals one built anew of the longer items.

    Raises:
        ValueError: an item has no reserved slot left; the plan is unchanged.
    """
    for i in np.flatnonzero(plan.grows):
        reserved = sum(count for _, count in plan.items[i].runs)
        if plan.num_keys[i] >= reserved:
            raise ValueError(f"item {i} has {reserved} keys and no reserved slot left: build a plan with more slots")
    before = plan.num_keys
    plan.num_keys = before + plan.grows
    if bool((plan.grows & ((before == 0) | (before == GATHER_MAX_KEYS))).any()):
        _lay_out(plan)  # an item appears, or is gathered no longer
        return
    for part in plan.directs:
        if plan.grows[part.item]:
            part.keys = Keys(part.keys.first, int(plan.num_keys[part.item]), part.keys.index)
    plan.batches = _make_batches(plan)


def _joined_runs(item: AttentionItem) -> list[tuple[int, int]]:
    """The item's runs with neighbours joined and empty ones left out."""
    joined: list[tuple[int, int]] = []
    for first, count in item.runs:
        if joined and sum(joined[-1]) == first:
            joined[-1] = (joined[-1][0], joined[-1][1] + count)
        elif count:
            joined.append((first, count))
    return joined


def _slots(runs: list[tuple[int, int]]) -> Ints:
    return np.concatenate([np.arange(first, first + count, dtype=np.int64) for first, count in runs])


def _find_keys(runs: list[tuple[int, int]], low: int, high: int, reserved: int) -> Keys:
    """Keys [low, high) of the runs, which may grow to [low, reserved)."""
    depth = 0
    for first, count in runs:
        if depth <= low and reserved <= depth + count:
            return Keys(first + low - depth, high - low, None)
        depth += count
    return Keys(0, high - low, torch.from_numpy(_slots(runs)[low:reserved]))


def _lay_out(plan: AttentionPlan) -> None:
    """Split the items into parts, give each a level, and make room for the partial results."""
    plan.directs, plan.entries = [], []
    entry_slots: list[Ints] = []
    decoding: dict[int, int] = {}  # token -> entry of its own keys
    gathered = [item.query_count <= GATHER_MAX_QUERIES for item in plan.items] & (plan.num_keys <= GATHER_MAX_KEYS)
    for i in np.flatnonzero(plan.grows & gathered & (plan.num_keys > 0)).tolist():
        decoding[plan.items[i].query_start] = len(plan.entries)
        plan.entries.append(Entry(i))
        entry_slots.append(_slots(_joined_runs(plan.items[i]))[:GATHER_MAX_KEYS])
    for i, item in enumerate(plan.items):
        keys = int(plan.num_keys[i])
        if keys == 0 or (plan.grows[i] and gathered[i]):
            continue
        tokens = range(item.query_start, item.query_start + item.query_count)
        if not item.causal and keys <= JOIN_MAX_KEYS and all(token in decoding for token in tokens):
            slots = _slots(_joined_runs(item))[:keys]
            for row in (decoding[token] for token in tokens):
                plan.entries[row].joined += keys
                entry_slots[row] = np.concatenate((slots, entry_slots[row]))
        elif gathered[i]:
            plan.entries.append(Entry(i))
            entry_slots.append(_slots(_joined_runs(item))[:GATHER_MAX_KEYS])
        else:
            plan.directs += _direct_parts(plan, i, item, keys)
    capacity = max((len(slots) for slots in entry_slots), default=0)
    plan.entry_slots = np.full((len(entry_slots), capacity), plan.kv.zero_slot, np.int64)
    for row, slots in zip(plan.entry_slots, entry_slots, strict=True):
        row[: len(slots)] = slots
    _assign_levels(plan)
    _make_room(plan)
    plan.batches = _make_batches(plan)


def _direct_parts(plan: AttentionPlan, i: int, item: AttentionItem, keys: int) -> list[Direct]:
    config, start, queries = plan.kv.config, item.query_start, item.query_count
    runs = _joined_runs(item)
    causal = item.causal and queries > 1
    if uses_gemm(config.dtype) and queries * config.group >= GEMM_MIN_ROWS:
        return [Direct(i, start, queries, _find_keys(runs, 0, keys, keys), causal, True)]
    own = queries if causal else 0
    reserved = sum(count for _, count in runs) if plan.grows[i] else keys - own
    parts = []
    if keys > own:
        parts.append(Direct(i, start, queries, _find_keys(runs, 0, keys - own, reserved), False, False))
    if own:
        parts.append(Direct(i, start, queries, _find_keys(runs, keys - own, keys, keys), True, False))
    return parts


def _assign_levels(plan: AttentionPlan) -> None:
    """Give parts levels such that those of one level have disjoint query intervals (first fit by start)."""
    parts: list[tuple[int, int, Direct | Entry]] = [(part.start, part.start + part.count, part) for part in plan.directs]
    for entry in plan.entries:
        item = plan.items[entry.item]
        parts.append((item.query_start, item.query_start + item.query_count, entry))
    parts.sort(key=lambda part: part[:2])
    ends: list[int] = []
    for start, end, part in parts:
        part.level = next((level for level, last in enumerate(ends) if last <= start), len(ends))
        if part.level == len(ends):
            ends.append(0)
        ends[part.level] = end
    plan.levels = max(1, len(ends))
    plan.covered = sum(end - start for start, end, _ in parts) == plan.levels * plan.num_tokens


def _make_room(plan: AttentionPlan) -> None:
    """Allocate the partial results. What no part writes stays 0 with logsumexp -inf, so it merges as absent."""
    plan.out = plan.lse = None
    if plan.levels > 1:
        config, rows = plan.kv.config, plan.levels * plan.num_tokens + 1
        plan.out = torch.zeros(rows, config.num_heads, config.head_dim, dtype=config.dtype)
        plan.lse = torch.full((rows, config.num_heads), -torch.inf)


def _make_batches(plan: AttentionPlan) -> list[Batch]:
    """Cut the gathered items into calls of like query count and length, longest first."""
    if not plan.entries:
        return []
    items = np.array([entry.item for entry in plan.entries], np.int64)
    lengths = plan.num_keys[items] + np.array([entry.joined for entry in plan.entries], np.int64)
    sizes = _query_sizes(np.array([plan.items[i].query_count for i in items], np.int64), lengths)
    batches: list[Batch] = []
    for size in np.unique(sizes).tolist():
        rows = np.flatnonzero(sizes == size)
        rows = rows[np.argsort(-lengths[rows], kind="stable")]
        limit = min(BATCH_MAX_KEYS, BATCH_MAX_SCORES // (size * plan.kv.config.num_heads))
        first, waste = 0, 0
        ordered = lengths[rows].tolist()
        for i, length in enumerate([*ordered, 0]):
            waste += ordered[first] - length
            if i == len(ordered) or waste > BATCH_MAX_WASTE:
                calls = min(i - first, -(-(i - first) * ordered[first] // limit))
                batches += [_make_batch(plan, np.sort(part), size) for part in np.array_split(rows[first:i], calls)]
                first, waste = i, 0
    return batches


def _query_sizes(counts: Ints, lengths: Ints) -> Ints:
    """The padded query count of each gathered item; sizes with few keys in all join the next that occurs."""
    sizes = np.array(QUERY_SIZES, np.int64)[np.searchsorted(QUERY_SIZES, counts)]
    present = np.unique(sizes)
    for size, following in itertools.pairwise(present):
        members = sizes == size
        if lengths[members].sum() <= BATCH_MAX_WASTE:
            sizes[members] = following
    return sizes


def _make_batch(plan: AttentionPlan, rows: Ints, queries: int) -> Batch:
    """Index tensors and mask of one gathered call; `rows` are positions in plan.entries."""
    entries = [plan.entries[row] for row in rows]
    items = [plan.items[entry.item] for entry in entries]
    lengths = np.array([plan.num_keys[entry.item] + entry.joined for entry in entries], np.int64)[:, None]
    starts = np.array([item.query_start for item in items], np.int64)[:, None]
    counts = np.array([item.query_count for item in items], np.int64)[:, None]
    causal = np.array([item.causal for item in items], bool)[:, None]
    levels = np.array([entry.level for entry in entries], np.int64)[:, None]
    num_keys = -(-int(lengths.max()) // KEY_ALIGN) * KEY_ALIGN
    column, query = np.arange(num_keys), np.arange(queries)
    slots = np.full((len(rows), num_keys), plan.kv.zero_slot, np.int64)
    width = min(num_keys, plan.entry_slots.shape[1])
    slots[:, :width] = np.where(column[:width] < lengths, plan.entry_slots[rows, :width], plan.kv.zero_slot)
    real = query < counts
    limits = lengths - np.where(causal & real, counts - 1 - query, 0)
    mask = None
    if bool((limits < num_keys).any()):
        blocked = torch.from_numpy(column >= limits[:, :, None])
        mask = torch.zeros(blocked.shape).masked_fill_(blocked, -torch.inf)
        if queries > 1:
            mask = mask.repeat_interleave(plan.kv.config.group, dim=1)
    tokens = np.where(real, starts + query, 0).ravel()
    spare = plan.levels * plan.num_tokens
    targets = np.where(real, levels * plan.num_tokens + starts + query, spare).ravel()
    consecutive = bool((np.diff(tokens) == 1).all())
    return Batch(
        queries,
        num_keys,
        torch.from_numpy(slots.ravel()),
        mask,
        slice(int(tokens[0]), int(tokens[0]) + len(tokens)) if consecutive else torch.from_numpy(tokens),
        torch.from_numpy(targets),
    )
