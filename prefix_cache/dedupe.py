"""Rows that would compute the same thing."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from batchrun.prefix_cache.trie import Int64Array, Trie


def find_duplicates(trie: Trie, group: Int64Array, candidate: npt.NDArray[np.bool_]) -> Int64Array:
    """The first row equal to each row, itself when there is none before it: int64 [R].

    Rows that end at one node of the trie (which must be a shared one) have the same tokens. Only candidates (bool [R]) of the
    same `group` (int64 [R], >= 0: rows whose results depend on the tokens alone in the same way) compare equal.
    """
    representative = np.arange(trie.num_rows, dtype=np.int64)
    rows = np.flatnonzero(candidate)
    kind = trie.row_node[rows] * (np.int64(1) + group.max(initial=0)) + group[rows]
    by_kind = np.argsort(kind, kind="stable")  # of equal rows the first stays first
    is_first = np.diff(kind[by_kind], prepend=-1) != 0
    place_of_first = np.flatnonzero(is_first)[np.cumsum(is_first) - 1]
    representative[rows[by_kind]] = rows[by_kind[place_of_first]]
    return representative
