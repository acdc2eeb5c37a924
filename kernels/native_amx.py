"""Whether attention may use the CPU's matrix tiles (Intel AMX): only if the system allows it and the results are right.

The tiles have been tested in an emulation. On a CPU that has them, a small step is therefore computed both ways before the first
pool is made, which takes milliseconds; if the two differ, the tiles stay unused.
"""

import functools
from typing import NamedTuple

import torch

from batchrun.kernels.native import Native
from batchrun.kernels.native_plan import attend, build_plan
from batchrun.kernels.native_pool import NativeKVCache, write_kv
from batchrun.kernels.spec import PAGE_SIZE, AttentionItem, KVConfig

LEAST_ROWS = 8
"""Query rows of a task for which tiles are used: with fewer, most of a tile is empty and reading keys is most of the time."""


class Choice(NamedTuple):
    """What was found."""

    rows: int
    """`NativeKVCache.amx_rows`."""
    remark: str
    """For the user; empty where the CPU has no tiles."""
    allowed: bool
    """Whether the CPU has tiles and the system does not refuse them: oneDNN uses them then, whether or not attention does."""


@functools.cache
def choose(native: Native) -> Choice:
    """Ask the system for the tiles and try them, once."""
    if not native.amx:
        return Choice(0, "", allowed=False)
    refused: int = native.library.batchrun_allow_amx()
    if refused < 0:
        return Choice(0, "without AMX: the compiler does not know it", allowed=True)
    if refused:
        return Choice(0, f"without AMX: the system refused it (error {refused})", allowed=False)
    if not all(_agrees(native, dim) for dim in (64, 80)):
        return Choice(0, "without AMX: it failed a comparison with AVX-512", allowed=True)
    return Choice(LEAST_ROWS, "with AMX", allowed=True)


def _agrees(native: Native, dim: int) -> bool:
    """Whether attention with and without tiles is the same but for rounding, poison beside the keys included."""
    config = KVConfig(1, 6, 2, dim, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    first, keys, queries = 5, 333, 40
    k, v, q = (torch.randn(n, heads, dim, generator=generator).bfloat16() for n, heads in ((keys, 2), (keys, 2), (queries, 6)))
    items = [
        AttentionItem(0, queries, [(first, keys)], keys, True),
        AttentionItem(7, 7, [(first + 16, 99)], 99, False),  # 21 query rows: a full tile and a part of one
    ]
    results = []
    for rows in (0, LEAST_ROWS):
        kv = NativeKVCache(config, -(-(first + keys) // PAGE_SIZE), native, rows)
        kv.data.fill_(torch.nan)
        write_kv(kv, 0, k, v, torch.arange(first, first + keys))
        results.append(attend(kv, 0, q, build_plan(kv, items, queries)).float())
    without, tiles = results
    return bool(torch.isfinite(tiles).all()) and torch.allclose(tiles, without, rtol=0.01, atol=0.002)
