"""The compiled kernel's attention plan: flat arrays that C reads, built once per membership change.

An item's pages are cut into intervals, its queries into blocks; each pair of the two and each kv head is a task. Cuts depend
on the items alone, so results are the same for any number of threads. A token that one task per head reaches gets its output
from there; others have a partial result per interval of pages, added up in the order of the items.
"""

import ctypes
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from batchrun.kernels.native_pool import NativeKVCache
from batchrun.kernels.spec import PAGE_SIZE, AttentionItem, check_items

Ints = npt.NDArray[np.int32]

TASK_ROWS = 192
"""Packed query rows of a task: their sums stay in the second-level cache."""
MANY_ROWS = 64
MANY_ROWS_PAGES = 256
"""Pages of a task of at least MANY_ROWS rows: a partial result per row costs about as much as 16 keys."""
READING_A_KEY = 24
"""Query rows whose work on a key takes about as long as its way from memory."""
FEW_ROWS_PAGES = 64
"""Pages of a task of fewer rows, which is mostly the reading of keys."""


AMX_TILE_ROWS = 16
BLOCK_KEYS = 128
"""AMX_ROWS and BLOCK_KEYS of csrc."""


class _Arguments(ctypes.Structure):
    """`Plan` of csrc/attention.c."""

    _fields_ = [
        ("num_heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("num_tasks", ctypes.c_int32),
        ("num_pages", ctypes.c_int64),
        ("items", ctypes.c_void_p),
        ("entries", ctypes.c_void_p),
        ("tasks", ctypes.c_void_p),
        ("num_merged", ctypes.c_int64),
        ("merged", ctypes.c_void_p),
        ("merge_offsets", ctypes.c_void_p),
        ("merge_rows", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("maxima", ctypes.c_void_p),
        ("totals", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("scratch_size", ctypes.c_int64),
        ("amx_rows", ctypes.c_int32),
        ("is_int8", ctypes.c_int32),
        ("few_rows", ctypes.c_int32),
    ]


@dataclass
class NativePlan:
    """A step's attention, prepared for all layers. Opaque outside this folder; belongs to one pool."""

    kv: NativeKVCache
    num_tokens: int
    items: Ints
    """[items, 4]: first query, queries, current keys, causal."""
    reserved: Ints
    """Slots of each item's runs."""
    grows: npt.NDArray[np.bool_]
    """Items that get one more key per `advance_plan`."""
    entries: Ints
    """[entries, 4]: page, position of its first key in the item, first and last + 1 lane of the page."""
    tasks: Ints
    """[tasks, 8]: item, kv head, first query, queries, first entry, entries, partial row or -1, unused; first those that
    mostly read, longest first, then those that mostly compute, longest last: threads take from both ends."""
    merged: Ints
    """Tokens with partial results."""
    merge_offsets: Ints
    merge_rows: Ints
    num_partials: int
    arguments: _Arguments = field(default_factory=_Arguments)


def build_plan(kv: NativeKVCache, items: list[AttentionItem], num_tokens: int) -> NativePlan:
    """The contract is in `ops.build_plan`."""
    check_items(items, num_tokens, kv.num_slots)
    rows = [(i.query_start, i.query_count, i.num_keys, i.causal) for i in items]
    table = np.array(rows, np.int32).reshape(-1, 4)
    entries, counts, reserved = _page_entries(items)
    tasks, partials = _make_tasks(kv, table, entries, counts, num_tokens)
    tokens, part_rows = partials
    order = np.argsort(tokens, kind="stable")
    merged, sizes = np.unique(tokens, return_counts=True)
    plan = NativePlan(
        kv=kv,
        num_tokens=num_tokens,
        items=table,
        reserved=reserved,
        grows=(table[:, 3] == 1) & (table[:, 1] == 1),
        entries=entries,
        tasks=tasks,
        merged=merged.astype(np.int32),
        merge_offsets=np.concatenate(([0], sizes.cumsum())).astype(np.int32),
        merge_rows=part_rows[order].astype(np.int32),
        num_partials=len(tokens),
    )
    _fill_arguments(plan)
    return plan


def advance_plan(plan: NativePlan) -> None:
    """The contract is in `ops.advance_plan`."""
    keys = plan.items[:, 2]
    full = plan.grows & (keys >= plan.reserved)
    if full.any():
        i = int(full.argmax())
        raise ValueError(f"item {i} has {plan.reserved[i]} keys and no reserved slot left: build a plan with more slots")
    keys += plan.grows


def _repeat_ranges(counts: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """For counts [2, 3]: which 0 0 1 1 1, position 0 1 0 1 2."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - np.repeat(counts.cumsum() - counts, counts)


def _page_entries(items: list[AttentionItem]) -> tuple[Ints, npt.NDArray[np.int64], Ints]:
    """The items' pages, reserved slots included: entries [n, 4], how many belong to each item, slots of each item."""
    runs = np.array([run for item in items for run in item.runs], np.int64).reshape(-1, 2)
    run_item = np.repeat(np.arange(len(items)), [len(item.runs) for item in items])
    first, count = runs[:, 0], runs[:, 1]
    end = first + count
    reserved = np.bincount(run_item, weights=count, minlength=len(items)).astype(np.int64)
    before = count.cumsum() - count  # slots of all runs before; less those of the items before
    position = before - (reserved.cumsum() - reserved)[run_item]
    run, number = _repeat_ranges(np.where(count > 0, -(-end // PAGE_SIZE) - first // PAGE_SIZE, 0))
    page = (first // PAGE_SIZE)[run] + number
    low = np.maximum(first[run] - page * PAGE_SIZE, 0)
    high = np.minimum(end[run] - page * PAGE_SIZE, PAGE_SIZE)
    entries = np.stack((page, position[run] + page * PAGE_SIZE + low - first[run], low, high), axis=1)
    counts = np.bincount(run_item[run], minlength=len(items))
    return np.ascontiguousarray(entries, np.int32), counts, reserved.astype(np.int32)


def _make_tasks(
    kv: NativeKVCache, table: Ints, entries: Ints, counts: npt.NDArray[np.int64], num_tokens: int
) -> tuple[Ints, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """The tasks, and the partial results as (token, row)."""
    group, heads = kv.config.group, kv.config.num_kv_heads
    start, queries, keys = (table[:, i].astype(np.int64) for i in range(3))
    first_entry = counts.cumsum() - counts
    pages = np.where(queries * group >= MANY_ROWS, MANY_ROWS_PAGES, FEW_ROWS_PAGES)
    part_item, part = _repeat_ranges(np.maximum(1, -(-counts // pages)))

    reach = np.zeros(num_tokens + 1, np.int64)  # parts that reach each token
    np.add.at(reach, start[part_item], 1)
    np.add.at(reach, start[part_item] + queries[part_item], -1)
    total = np.concatenate(([0], reach[:-1].cumsum().cumsum()))
    shared = (total[start + queries] - total[start] > queries)[part_item]
    sizes = np.where(shared, queries[part_item], 0)
    part_row = np.where(shared, sizes.cumsum() - sizes, -1)
    owner, offset = _repeat_ranges(sizes)
    partials = start[part_item][owner] + offset, part_row[owner] + offset

    block = max(1, TASK_ROWS // group)
    block_part, number = _repeat_ranges(-(-queries[part_item] // block))
    item, low = part_item[block_part], part[block_part] * pages[part_item[block_part]]
    first = number * block
    size = np.minimum(block, queries[item] - first)
    length = np.minimum(pages[item], counts[item] - low)
    row = part_row[block_part]
    columns = (item, first, size, first_entry[item] + low, length, np.where(row < 0, -1, row + first))
    flat = np.zeros((len(item), heads, 8), np.int32)
    flat[:, :, 1] = np.arange(heads)
    for at, column in zip((0, 2, 3, 4, 5, 6), columns, strict=True):
        flat[:, :, at] = column[:, None]
    seen = np.minimum(length * PAGE_SIZE, np.maximum(0, keys[item] - low * PAGE_SIZE))
    cost = seen * (size * group + READING_A_KEY)
    order = np.argsort(np.where(size * group < READING_A_KEY, -cost, cost), kind="stable")
    order = order[np.argsort(size[order] * group >= READING_A_KEY, kind="stable")]
    return np.ascontiguousarray(flat[order].reshape(-1, 8)), partials


def _fill_arguments(plan: NativePlan) -> None:
    config, arguments = plan.kv.config, plan.arguments
    arguments.num_heads, arguments.kv_heads, arguments.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    arguments.num_tasks, arguments.num_pages, arguments.num_merged = len(plan.tasks), plan.kv.num_pages, len(plan.merged)
    for name in ("items", "entries", "tasks", "merged", "merge_offsets", "merge_rows"):
        setattr(arguments, name, getattr(plan, name).ctypes.data)
    arguments.amx_rows, arguments.is_int8, arguments.few_rows = plan.kv.amx_rows, config.is_int8, READING_A_KEY
    rows = -(-max(1, TASK_ROWS // config.group) * config.group // AMX_TILE_ROWS) * AMX_TILE_ROWS
    # Floats: maximum, total and sums of each row; bfloat16: the rows' queries, a block's values, its keys and values widened.
    halves = rows + BLOCK_KEYS + (2 * BLOCK_KEYS if config.is_int8 else 0)
    arguments.scratch_size = rows * (2 + config.head_dim) + halves * config.head_dim // 2


def attend(kv: NativeKVCache, layer: int, q: torch.Tensor, plan: NativePlan) -> torch.Tensor:
    """Attention of the step's tokens in one layer; the contract is in `ops.attend`.

    Scores, softmax and sums are float32; weights are rounded to bfloat16 for their product with the values.
    """
    assert plan.kv is kv, "the plan was built for another pool"
    config, arguments = kv.config, plan.arguments
    shape = (plan.num_tokens, config.num_heads, config.head_dim)
    assert (q.shape, q.dtype) == (shape, config.dtype), f"q is {q.dtype} {tuple(q.shape)}, the plan is for {shape}"
    q = q.contiguous()
    out = torch.empty_like(q)
    threads = torch.get_num_threads()
    rows = plan.num_partials * config.num_heads
    arguments.sums = kv.scratch("sums", rows * config.head_dim)
    arguments.maxima = kv.scratch("maxima", rows)
    arguments.totals = kv.scratch("totals", rows)
    arguments.scratch = kv.scratch("threads", threads * arguments.scratch_size)
    kv.native.library.batchrun_attend(ctypes.byref(arguments), kv.layers[layer], q.data_ptr(), out.data_ptr(), threads)
    return out
