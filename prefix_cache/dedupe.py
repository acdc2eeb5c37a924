"""Rows that would compute the same thing: found by hash, decided by their tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from batchrun.prefix_cache.trie import Int32Array, Int64Array


def find_duplicates(
    tokens: Int32Array, begin: Int64Array, length: Int32Array, group: Int64Array, candidate: npt.NDArray[np.bool_]
) -> Int64Array:
    """The first row equal to each row, itself when there is none before it: int64 [R].

    Row i is `tokens[begin[i] : begin[i] + length[i]]`; int32, may be a memory map. Only candidates (bool [R]) of the same
    `group` (int64 [R]: rows whose results depend on the tokens alone in the same way) compare equal.
    """
    representative = np.arange(len(begin), dtype=np.int64)
    rows = np.flatnonzero(candidate)
    firsts: dict[tuple[int, int, int], list[int]] = {}  # hash, group, length -> rows with distinct tokens
    places = zip(rows.tolist(), begin[rows].tolist(), length[rows].tolist(), group[rows].tolist(), strict=True)
    plain = np.asarray(tokens)  # slicing a memory map object is slow
    for row, low, count, row_group in places:
        ids = plain[low : low + count]
        alike = firsts.setdefault((_hash(ids), row_group, count), [])
        for first in alike:
            if np.array_equal(plain[begin[first] : begin[first] + count], ids):
                representative[row] = first
                break
        else:
            alike.append(row)
    return representative


def _hash(ids: Int32Array) -> int:
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(ids).data)
