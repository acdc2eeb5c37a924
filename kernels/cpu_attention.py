"""Attention over segments of keys on the CPU, in torch operations: a plan once per membership change, `attend` per layer.

An item's keys become *parts* with disjoint keys; a part yields `(out, logsumexp)` for its queries, and a token's partial
results are merged exactly: l = logsumexp_i(l_i), o = sum_i exp(l_i - l) o_i. Two kinds of parts:

    gathered    few queries on few keys (a decoding row's own keys, a short shared node): the keys of many items are copied
                into one padded batch and attended in one call. Padding reads the pool's slot of zeros and is masked.
    direct      everything else: one call on the pool's memory as it lies (copied first when the runs are scattered).

A causal item behind keys of its own becomes a part of all queries on those keys and a causal square.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from batchrun.kernels.cpu import KVCache
from batchrun.kernels.spec import AttentionItem, check_items

Ints = npt.NDArray[np.int64]

GATHER_MAX_QUERIES = 16
GATHER_MAX_KEYS = 256
"""From here on one call per item is cheaper than copying its keys into the padded batch."""
GATHER_MAX_WASTE = 512
"""Padding keys in a batch before the shorter items get a batch of their own; about what another call costs."""


class _Keys(NamedTuple):
    """Where keys [0, count) of a part lie: from slot `first` on when consecutive, else at `index`."""

    first: int
    count: int
    index: torch.Tensor | None


@dataclass
class _Direct:
    level: int
    start: int
    count: int
    keys: _Keys
    square: bool
    item: int
    """Position in the plan's items, for growth."""


@dataclass
class _Entry:
    """An item in a gathered batch."""

    level: int
    item: int


class _Batch(NamedTuple):
    """Items of a gathered call: B items of Q query rows (padded) on L keys (padded)."""

    queries: int
    num_keys: int
    slots: torch.Tensor
    """int64 [B * L]."""
    mask: torch.Tensor | None
    """[B, 1, 1 or Q * group, L] of 0 and -inf; None when every query sees every key."""
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
    levels: int = 0
    directs: list[_Direct] = field(default_factory=list)
    entries: list[_Entry] = field(default_factory=list)
    entry_slots: Ints = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    """Slots of each entry's keys, reserved ones included."""
    batches: list[_Batch] = field(default_factory=list)
    covered: bool = True
    """Every (level, token) has a partial result."""
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None


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
        item = plan.items[i]
        if plan.num_keys[i] >= sum(count for _, count in item.runs):
            raise ValueError(f"item {i} has {plan.num_keys[i]} keys and no reserved slot left: build a plan with more slots")
    before = plan.num_keys
    plan.num_keys = before + plan.grows
    changed = (before == 0) | (before == GATHER_MAX_KEYS)
    if bool((changed & plan.grows).any()):
        _lay_out(plan)
        return
    for part in plan.directs:
        if plan.grows[part.item]:
            part.keys = part.keys._replace(count=int(plan.num_keys[part.item]))
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


def _find_keys(runs: list[tuple[int, int]], low: int, high: int, grows: bool) -> _Keys:
    """Keys [low, high) of the runs; a growing part's index goes on to the end of its reserved slots."""
    depth = 0
    for first, count in runs:
        if depth <= low and (high <= depth + count):
            return _Keys(first + low - depth, high - low, None)
        depth += count
    slots = _slots(runs)
    return _Keys(0, high - low, torch.from_numpy(slots[low:] if grows else slots[low:high]))


def _lay_out(plan: AttentionPlan) -> None:
    """Split the items into parts, give each a level, and make room for the partial results."""
    plan.directs, plan.entries = [], []
    entry_slots: list[Ints] = []
    for i, item in enumerate(plan.items):
        keys, queries, grows = int(plan.num_keys[i]), item.query_count, bool(plan.grows[i])
        if keys == 0:
            continue
        runs = _joined_runs(item)
        if queries <= GATHER_MAX_QUERIES and keys <= GATHER_MAX_KEYS:
            plan.entries.append(_Entry(0, i))
            entry_slots.append(_slots(runs)[:GATHER_MAX_KEYS])
            continue
        own = queries if item.causal and queries > 1 else 0
        if keys > own:
            found = _find_keys(runs, 0, keys - own, grows)
            plan.directs.append(_Direct(0, item.query_start, queries, found, False, i))
        if own:
            found = _find_keys(runs, keys - own, keys, False)
            plan.directs.append(_Direct(0, item.query_start, queries, found, True, i))
    capacity = max((len(slots) for slots in entry_slots), default=0)
    plan.entry_slots = np.full((len(entry_slots), capacity), plan.kv.zero_slot, np.int64)
    for row, slots in zip(plan.entry_slots, entry_slots, strict=True):
        row[: len(slots)] = slots
    _assign_levels(plan)
    _make_room(plan)
    plan.batches = _make_batches(plan)


def _assign_levels(plan: AttentionPlan) -> None:
    """Give parts levels such that those of one level have disjoint query intervals (first fit by start)."""
    parts: list[tuple[int, int, _Direct | _Entry]] = [(p.start, p.start + p.count, p) for p in plan.directs]
    for entry in plan.entries:
        item = plan.items[entry.item]
        parts.append((item.query_start, item.query_start + item.query_count, entry))
    parts.sort(key=lambda part: part[:2])
    ends: list[int] = []
    for start, end, part in parts:
        level = next((i for i, last in enumerate(ends) if last <= start), len(ends))
        if level == len(ends):
            ends.append(0)
        ends[level] = end
        part.level = level
    plan.levels = max(1, len(ends))
    plan.covered = sum(end - start for start, end, _ in parts) == plan.levels * plan.num_tokens


def _make_room(plan: AttentionPlan) -> None:
    """Allocate the partial results. What no part writes stays 0 with logsumexp -inf, so it merges as absent."""
    plan.out = plan.lse = None
    if plan.levels > 1:
        config, rows = plan.kv.config, plan.levels * plan.num_tokens + 1
        plan.out = torch.zeros(rows, config.num_heads, config.head_dim, dtype=config.dtype)
        plan.lse = torch.full((rows, config.num_heads), -torch.inf)


def _make_batches(plan: AttentionPlan) -> list[_Batch]:
    """Cut the gathered items into batches of like length, longest first."""
    if not plan.entries:
        return []
    item = np.array([entry.item for entry in plan.entries], np.int64)
    lengths = plan.num_keys[item]
    queries = np.array([1 << (plan.items[i].query_count - 1).bit_length() for i in item], np.int64)
    batches: list[_Batch] = []
    for size in np.unique(queries):
        rows = np.flatnonzero(queries == size)
        rows = rows[np.argsort(-lengths[rows], kind="stable")]
        first, waste = 0, 0
        for i, length in enumerate(lengths[rows].tolist()):
            waste += int(lengths[rows[first]]) - length
            if waste > GATHER_MAX_WASTE:
                batches.append(_make_batch(plan, np.sort(rows[first:i]), int(size)))
                first, waste = i, 0
        batches.append(_make_batch(plan, np.sort(rows[first:]), int(size)))
    return batches


def _make_batch(plan: AttentionPlan, rows: Ints, queries: int) -> _Batch:
    """Index tensors and mask of one gathered call; `rows` are positions in plan.entries."""
    entries = [plan.entries[row] for row in rows]
    items = [plan.items[entry.item] for entry in entries]
    lengths = plan.num_keys[[entry.item for entry in entries]]
    starts = np.array([item.query_start for item in items], np.int64)
    counts = np.array([item.query_count for item in items], np.int64)
    causal = np.array([item.causal for item in items], bool)
    levels = np.array([entry.level for entry in entries], np.int64)
    num_keys = int(lengths.max())
    columns = np.arange(num_keys)
    slots = np.where(columns < lengths[:, None], plan.entry_slots[rows, :num_keys], plan.kv.zero_slot)
    query = np.arange(queries)
    real = query < counts[:, None]
    hidden = np.where(causal[:, None] & real, counts[:, None] - 1 - query, 0)
    limits = lengths[:, None] - hidden
    mask = None
    if bool((limits < num_keys).any()):
        blocked = torch.from_numpy(columns >= limits[:, :, None])
        mask = torch.zeros(blocked.shape, dtype=plan.kv.config.dtype).masked_fill_(blocked, -torch.inf)
        if queries > 1:
            mask = mask.repeat_interleave(plan.kv.config.group, dim=1)
        mask = mask[:, None]
    tokens = np.where(real, starts[:, None] + query, 0).ravel()
    targets = np.where(real, levels[:, None] * plan.num_tokens + starts[:, None] + query, plan.levels * plan.num_tokens).ravel()
    consecutive = bool((np.diff(tokens) == 1).all())
    return _Batch(
        queries,
        num_keys,
        torch.from_numpy(slots.ravel()),
        mask,
        slice(int(tokens[0]), int(tokens[0]) + len(tokens)) if consecutive else torch.from_numpy(tokens),
        torch.from_numpy(targets),
    )


def attend(kv: KVCache, layer: int, q: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    """Attention of the step's tokens in one layer; scale 1/sqrt(head_dim), partial results merged in float32.

    Arguments: q [T, heads, head_dim], turned, in the pool's dtype; the step's keys and values have been written.
    Returns: [T, heads, head_dim] in q's dtype, a tensor of its own; 0 for a token all of whose items have no keys.
    """
    assert plan.kv is kv, "the plan was built for another pool"
    config = kv.config
    tokens, heads, dim = plan.num_tokens, config.num_heads, config.head_dim
    assert q.shape == (tokens, heads, dim), f"q is {tuple(q.shape)}, the plan is for {(tokens, heads, dim)}"
    q = q.contiguous()
    out, lse = plan.out, plan.lse
    if out is None:
        make = torch.empty if plan.covered else torch.zeros
        out = make(tokens + 1, heads, dim, dtype=q.dtype)
    for batch in plan.batches:
        _attend_batch(kv, layer, q, batch, out, lse)
    if plan.directs:
        packed = q.view(tokens, config.num_kv_heads, config.group, dim).transpose(0, 1).contiguous().flatten(1, 2)
        for part in plan.directs:
            _attend_direct(kv, layer, q, packed, part, out, lse)
    if lse is None:
        return out[:tokens]
    return _merge(out, lse, plan.levels, tokens)


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, is_causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, logsumexp in float32) of [batch, heads, rows, dim] on keys [batch, heads, keys, dim], at least one key."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, attn_mask=mask)
    return out, lse


def _attend_batch(
    kv: KVCache, layer: int, q: torch.Tensor, batch: _Batch, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    config = kv.config
    groups, group, dim = config.num_kv_heads, config.group, config.head_dim
    keys = kv.scratch("keys", batch.slots.numel(), 2, groups, dim)
    torch.index_select(kv.data[layer], 0, batch.slots, out=keys)
    k, v = keys.view(-1, batch.num_keys, 2, groups, dim).permute(2, 0, 3, 1, 4).unbind(0)
    rows = q[batch.tokens].view(-1, batch.queries, groups, group, dim).transpose(1, 2).reshape(-1, groups, batch.queries * group, dim)
    part, part_lse = _flash(rows, k, v, batch.mask)
    heads = config.num_heads
    part = part.reshape(-1, groups, batch.queries, group, dim).transpose(1, 2)
    out.index_copy_(0, batch.targets, part.reshape(-1, heads, dim))
    if lse is not None:
        part_lse = part_lse.reshape(-1, groups, batch.queries, group).transpose(1, 2)
        lse.index_copy_(0, batch.targets, part_lse.reshape(-1, heads))


def _attend_direct(
    kv: KVCache, layer: int, q: torch.Tensor, packed: torch.Tensor, part: _Direct, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    config, keys = kv.config, part.keys
    groups, group, dim = config.num_kv_heads, config.group, config.head_dim
    pool, count = kv.data[layer], part.count
    if keys.index is None:
        segment = pool[keys.first : keys.first + keys.count]
    else:
        segment = kv.scratch("keys", keys.count, 2, groups, dim)
        torch.index_select(pool, 0, keys.index[: keys.count], out=segment)
    k, v = segment.permute(1, 2, 0, 3).unbind(0)
    rows = slice(part.start, part.start + count)
    if part.square:  # packed rows of a token would need one mask row each: heads apart, keys repeated by stride 0
        heads = q[rows].view(count, groups, group, dim).permute(1, 2, 0, 3)
        shape = (groups, group, count, dim)
        part_out, part_lse = _flash(heads, k[:, None].expand(shape), v[:, None].expand(shape), is_causal=True)
        part_out, part_lse = part_out.permute(2, 0, 1, 3), part_lse.permute(2, 0, 1)
    else:
        query = packed[:, part.start * group : (part.start + count) * group]
        part_out, part_lse = _flash(query[None], k[None], v[None])
        part_out = part_out.reshape(groups, count, group, dim).transpose(0, 1)
        part_lse = part_lse.reshape(groups, count, group).transpose(0, 1)
    base = part.level * len(q) + part.start
    out[base : base + count].view(count, groups, group, dim).copy_(part_out)
    if lse is not None:
        lse[base : base + count].view(count, groups, group).copy_(part_lse)


def _merge(out: torch.Tensor, lse: torch.Tensor, levels: int, tokens: int) -> torch.Tensor:
    """Merge the partial results of all levels: [levels * tokens + 1, heads, dim] -> [tokens, heads, dim]."""
    rows = levels * tokens
    partial = out[:rows].view(levels, tokens, *out.shape[1:])
    weights = lse[:rows].view(levels, tokens, -1)
    # The clamps only bite where every level is absent: -inf - -inf and 0 / 0 would be NaN. A NaN passes through them.
    weights = (weights - weights.amax(0).clamp_min_(torch.finfo(torch.float32).min)).exp_()
    weights /= weights.sum(0).clamp_min_(1.0)
    merged = partial[0] * weights[0, :, :, None]
    for level in range(1, levels):
        merged.addcmul_(partial[level], weights[level, :, :, None])
    return merged.to(out.dtype)
