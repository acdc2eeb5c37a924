"""In which order to start the rows.

Any depth-first order of the trie computes each distinct token once when the pool holds the longest row (Zheng et al.
2024, SGLang: the theorem on offline RadixAttention). Children of a node may be permuted freely, which costs no reuse:
here the child with the longest expected output goes first, so that no long row is left for the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from batchrun.prefix_cache.trie import Int32Array, Int64Array, Trie


@dataclass(frozen=True)
class RowOrder:
    """A permutation of R rows over a trie of N nodes.

    rows int64 [R], rows in the order to start them; position int64 [R], its inverse; node_rank int64 [N], preorder rank
    of each node in the planned walk of the tree. The rank is the tree's also for rows in the given order: work sorted
    by it has the rows beneath a node side by side.
    """

    rows: Int64Array
    position: Int64Array
    node_rank: Int64Array


def order_rows(trie: Trie, expected_output: npt.NDArray[np.float64], order: Literal["plan", "given"]) -> RowOrder:
    """The order to start the rows in. expected_output float64 [R], output tokens expected of each row.

    "plan": depth first; the rows that end at a node before its children; of siblings the one with the longest expected
    output beneath it first, ties by the smallest row number. "given": by row number.
    """
    if not trie.num_rows:
        return RowOrder(np.empty(0, np.int64), np.empty(0, np.int64), np.zeros(trie.num_nodes, np.int64))
    own = np.bincount(trie.row_node, minlength=trie.num_nodes).astype(np.int64)
    longest = trie.over_rows(np.maximum, expected_output)
    first_row = trie.over_rows(np.minimum, np.arange(trie.num_rows, dtype=np.int64))
    siblings = np.lexsort((first_row[1:], -longest[1:], trie.parent[1:])) + 1  # siblings side by side, best first
    num_nodes = trie.subtree_end - np.arange(trie.num_nodes)  # preorder: a subtree is an interval of nodes
    num_rows = trie.row_hi - trie.row_lo
    # A node comes after its parent and the siblings before it, its rows after its parent's own and those siblings'.
    node_step = _sum_of_earlier_siblings(trie.parent, siblings, num_nodes) + 1
    row_step = _sum_of_earlier_siblings(trie.parent, siblings, num_rows) + own[trie.parent]
    node_step[0] = row_step[0] = 0
    node_rank = trie.path_sums(node_step)
    if order == "given":
        rows = np.arange(trie.num_rows, dtype=np.int64)
        return RowOrder(rows, rows, node_rank)
    by_node = np.lexsort((-expected_output, trie.row_node))  # stable: equal expectations by row number
    within = np.arange(trie.num_rows) - (np.cumsum(own) - own)[trie.row_node[by_node]]
    position = np.empty(trie.num_rows, np.int64)
    position[by_node] = trie.path_sums(row_step)[trie.row_node[by_node]] + within
    rows = np.empty(trie.num_rows, np.int64)
    rows[position] = np.arange(trie.num_rows)
    return RowOrder(rows, position, node_rank)


def _sum_of_earlier_siblings(parent: Int32Array, siblings: Int64Array, value: Int64Array) -> Int64Array:
    """Per node, the sum of `value` over the siblings before it in `siblings` (all nodes but the root, grouped by parent)."""
    total = np.cumsum(value[siblings]) - value[siblings]
    parents = parent[siblings]
    first_of_group = np.flatnonzero(np.diff(parents, prepend=-1))
    base = np.repeat(total[first_of_group], np.diff(np.append(first_of_group, len(siblings))))
    before = np.zeros(len(value), np.int64)
    before[siblings] = total - base
    return before
