"""The prompts of a whole file as a radix tree, in NumPy arrays.

    row 0: A B C D      row 1: A B      row 2: A B E      row 3: F

    node  parent  [start, end)  rows beneath (sorted: 1 0 2 3)
    0     -1      [0, 0)        all         the root, an empty edge
    1     0       [0, 2)  A B   1 0 2       row 1 ends here
    2     1       [2, 4)  C D   0           row 0 ends here
    3     1       [2, 3)  E     2
    4     0       [0, 1)  F     3

The sum of the edges' lengths, 2 + 2 + 1 + 1, is the least number of tokens that any engine can prefill.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from batchrun.prefix_cache.row_sort import sort_rows

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Number = TypeVar("Number", np.int64, np.float64)


@dataclass(frozen=True)
class Trie:
    """Nodes in depth-first preorder, node 0 the root with an empty edge. R rows, N nodes.

    parent int32 [N] (-1 for the root); start, end int32 [N], the edge's interval of token positions (start of a node =
    end of its parent); row_lo, row_hi int64 [N], the interval of `sorted_rows` beneath the node, those that end at it
    first; sorted_rows int64 [R], rows by their tokens, equal ones by number; row_node int32 [R], the node at whose end
    the row's prompt ends.
    """

    parent: Int32Array
    start: Int32Array
    end: Int32Array
    row_lo: Int64Array
    row_hi: Int64Array
    sorted_rows: Int64Array
    row_node: Int32Array

    @property
    def num_nodes(self) -> int:
        return len(self.parent)

    @property
    def num_rows(self) -> int:
        return len(self.row_node)

    @cached_property
    def trie_tokens(self) -> int:
        """Distinct prefix tokens: the sum of the edges' lengths."""
        return int(self.end.sum(dtype=np.int64) - self.start.sum(dtype=np.int64))

    def path(self, row: int) -> list[int]:
        """The nodes that hold the row's tokens, first to last, without the root."""
        path = []
        node = int(self.row_node[row])
        while node:
            path.append(node)
            node = int(self.parent[node])
        path.reverse()
        return path

    @cached_property
    def subtree_end(self) -> Int64Array:
        """Per node, the first node in preorder that is not beneath it: int64 [N]."""
        end = np.searchsorted(self.row_lo, self.row_hi)
        end[0] = self.num_nodes  # also when there are no rows
        return end.astype(np.int64, copy=False)

    def path_sums(self, value: Int64Array) -> Int64Array:
        """Per node, the sum of `value` (int64 [N]) over the nodes of its path, itself and the root included."""
        # In preorder: all values so far, without those of the subtrees that have ended.
        change = np.append(value, 0)
        np.subtract.at(change, self.subtree_end, value)
        return np.cumsum(change[:-1])

    def over_rows(self, reduce: np.ufunc, value: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """Per node, `reduce` (np.minimum, say) of `value` ([R]) over the rows beneath it. The trie must have a row."""
        # The intervals between a node's end and the next one's beginning are left out; the last end needs an entry.
        bounds = np.stack([self.row_lo, self.row_hi], axis=1).ravel()
        values = value[self.sorted_rows]
        found: npt.NDArray[Number] = reduce.reduceat(np.append(values, values[-1:]), bounds)[::2]
        return found

    def keep_rows(self, kept: npt.NDArray[np.bool_]) -> Trie:
        """The trie of the rows where `kept` (bool [R]) is true, numbered anew. At least one must be kept of those that end at
        each node where any end, so that the nodes are the same."""
        kept_in_order = kept[self.sorted_rows]
        before = np.concatenate([[0], np.cumsum(kept_in_order, dtype=np.int64)])
        number = np.cumsum(kept, dtype=np.int64) - 1
        return Trie(
            self.parent,
            self.start,
            self.end,
            row_lo=before[self.row_lo],
            row_hi=before[self.row_hi],
            sorted_rows=number[self.sorted_rows[kept_in_order]],
            row_node=self.row_node[kept],
        )


def build_trie(
    tokens: Int32Array,
    begin: Int64Array,
    length: Int32Array,
    shared: bool = True,
    alone: npt.NDArray[np.bool_] | None = None,
) -> Trie:
    """The radix tree of the rows `tokens[begin[i] : begin[i] + length[i]]`.

    tokens int32, ids >= 0, may be a memory map; begin int64 [R]; length int32 [R], each at least 1.
    With `shared` False no two rows share a node: one node per row, in row order. `alone`, bool [R], names rows that share
    no node with any other; they come last. Raises ValueError when a row is empty, or when rows part at a negative id.

    Rows are sorted; a stack turns the longest common prefixes of neighbours into nodes (the tree of LCP intervals: Kasai et
    al. 2001, Abouelhoda et al. 2004).
    """
    if len(length) and int(length.min()) < 1:
        raise ValueError(f"row {int((length < 1).argmax())} has no tokens")
    if not shared:
        return _one_node_per_row(length)
    if alone is None or not alone.any():
        sorted_rows, lcp = sort_rows(tokens, begin, length)
        return _build_nodes(sorted_rows, lcp, length)
    others, last = np.flatnonzero(~alone), np.flatnonzero(alone)
    order, lcp = sort_rows(tokens, begin[others], length[others])
    return _build_nodes(np.append(others[order], last), np.append(lcp, np.zeros(len(last), lcp.dtype)), length)


def _one_node_per_row(length: Int32Array) -> Trie:
    num_rows = len(length)
    rows = np.arange(num_rows, dtype=np.int64)
    return Trie(
        parent=np.concatenate([[-1], np.zeros(num_rows)]).astype(np.int32),
        start=np.zeros(num_rows + 1, np.int32),
        end=np.concatenate([[0], length]).astype(np.int32),
        row_lo=np.concatenate([[0], rows]),
        row_hi=np.concatenate([[num_rows], rows + 1]),
        sorted_rows=rows,
        row_node=(rows + 1).astype(np.int32),
    )


class _Nodes(NamedTuple):
    """Node columns while the tree is built, in the order in which the nodes were met. 8 bytes an entry, not an object."""

    parent: array[int]
    end: array[int]
    row_lo: array[int]
    row_hi: array[int]


def _build_nodes(sorted_rows: Int64Array, lcp: Int32Array, length: Int32Array) -> Trie:
    nodes, place_node = _walk(lcp, length[sorted_rows])
    parent, end, row_lo, row_hi = (np.array(column, np.int64) for column in nodes)
    # A node that two rows share is met after the first of them. Preorder is by first row, then the ancestor first.
    preorder = np.lexsort((end, row_lo))
    renumbered = np.empty(len(end), np.int32)
    renumbered[preorder] = np.arange(len(end), dtype=np.int32)
    parent, end = parent[preorder], end[preorder]
    parent[1:] = renumbered[parent[1:]]
    start = np.zeros_like(end)
    start[1:] = end[parent[1:]]
    row_node = np.empty(len(length), np.int32)
    row_node[sorted_rows] = renumbered[np.array(place_node, np.int64)]
    return Trie(
        parent.astype(np.int32),
        start.astype(np.int32),
        end.astype(np.int32),
        row_lo[preorder],
        row_hi[preorder],
        sorted_rows,
        row_node,
    )


def _walk(lcp: Int32Array, length: Int32Array) -> tuple[_Nodes, array[int]]:
    """Nodes from neighbours' common prefixes and lengths in sorted order; per place, the node where its row ends.

    The stack holds the path of the row before: a cheap step per row, since each node is pushed and popped once.
    """
    nodes = _Nodes(array("q", [-1]), array("q", [0]), array("q", [0]), array("q", [len(length)]))
    parent, end, row_lo, row_hi = nodes
    place_node = array("q")
    stack = [0]
    for place, (common, num_tokens) in enumerate(zip(lcp.data, length.data, strict=True)):
        last = -1
        while end[stack[-1]] > common:
            last = stack.pop()
            row_hi[last] = place
        if end[stack[-1]] < common:  # the rows part within an edge: its upper part becomes a node of its own
            node = len(end)
            parent.append(stack[-1])
            parent[last] = node
            end.append(common)
            row_lo.append(row_lo[last])
            row_hi.append(len(length))
            stack.append(node)
        if num_tokens > common:
            parent.append(stack[-1])
            stack.append(len(end))
            end.append(num_tokens)
            row_lo.append(place)
            row_hi.append(len(length))
        place_node.append(stack[-1])
    return nodes, place_node
