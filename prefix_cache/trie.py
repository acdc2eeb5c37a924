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

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

# Tokens compared per pass. Rows that still tie afterwards go into the next pass, the others are done, so keys stay
# short however long the prompts are: 256 bytes a row instead of a copy of the file.
BLOCK_TOKENS = 64
# Rows gathered at once, which bounds the index arrays to 16 MB.
BATCH_ROWS = 1 << 15


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

    def path_sums(self, value: Int64Array) -> Int64Array:
        """Per node, the sum of `value` (int64 [N]) over the nodes of its path, itself and the root included."""
        sums = value.tolist()
        for node, parent in enumerate(self.parent[1:].tolist(), start=1):
            sums[node] += sums[parent]  # preorder: the parent is complete
        return np.array(sums, np.int64)


def build_trie(tokens: Int32Array, begin: Int64Array, length: Int32Array, shared: bool = True) -> Trie:
    """The radix tree of the rows `tokens[begin[i] : begin[i] + length[i]]`.

    tokens int32, ids >= 0, may be a memory map; begin int64 [R]; length int32 [R], each at least 1.
    With `shared` False no two rows share a node: one node per row, in row order. Raises ValueError when a row is empty
    or has a negative id.

    Rows are sorted by tokens in blocks; a stack turns the longest common prefixes of neighbours into nodes (the tree of
    LCP intervals: Kasai et al. 2001, Abouelhoda et al. 2004).
    """
    if len(length) and int(length.min()) < 1:
        raise ValueError(f"row {int((length < 1).argmax())} has no tokens")
    if not shared:
        return _one_node_per_row(length)
    sorted_rows, lcp = _sort_rows(tokens, begin, length)
    return _build_nodes(sorted_rows, lcp, length)


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


def _sort_rows(tokens: Int32Array, begin: Int64Array, length: Int32Array) -> tuple[Int64Array, Int32Array]:
    """Rows in token order, and the tokens that each has in common with the one before it (int32 [R], 0 for the first)."""
    order = np.arange(len(length), dtype=np.int64)
    lcp = np.zeros(len(length), np.int32)
    places = order.copy()  # places of `order` that still tie with a neighbour
    ties = np.zeros(len(length), bool)  # per place: ties with the one before it on all tokens so far
    ties[1:] = True
    depth = 0
    while len(places):
        rows = order[places]
        keys = _block_keys(tokens, begin[rows] + depth, length[rows] - depth, np.cumsum(~ties, dtype=np.uint32))
        ranking = _argsort_keys(keys)
        order[places] = rows = rows[ranking]
        common = _common_with_previous(keys, ranking)
        reached = np.minimum(depth + common, np.minimum(length[rows], length[np.roll(rows, 1)]))
        lcp[places[ties]] = reached[ties]
        ties &= common == BLOCK_TOKENS
        depth += BLOCK_TOKENS
        # Rows that tie on the block and on having ended in it are equal: nothing more to compare. One that ended with
        # the block's last token has yet to part from its continuations.
        ties &= length[rows] >= depth
        kept = ties | np.append(ties[1:], False)
        places, ties = places[kept], ties[kept]
    return order, lcp


def _block_keys(tokens: Int32Array, begin: Int64Array, left: Int32Array, group: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """One key per row, uint32 big-endian [rows, 1 + BLOCK_TOKENS], whose byte order is the order of the rows.

    First the group of rows that tie so far, then the tokens of the block at `begin` plus one, 0 from the `left` tokens
    that the row still has on: so that a row comes before its continuations.
    """
    keys = np.zeros((len(begin), 1 + BLOCK_TOKENS), ">u4")
    keys[:, 0] = group
    column = np.arange(BLOCK_TOKENS)
    for batch in _batches(len(begin)):
        inside = column < left[batch, None]
        # Past the row's end any token that exists will do: its last one, or the one before the block.
        at = begin[batch, None] + np.minimum(column, left[batch, None] - 1)
        block = tokens[at]
        if int(block.min()) < 0:
            raise ValueError(f"a token id is negative: {int(block.min())}")
        keys[batch, 1:] = (block + 1) * inside
    return keys


def _argsort_keys(keys: npt.NDArray[np.uint32]) -> Int64Array:
    """Stable order of the keys' bytes. Only distinct keys are compared: in prompts that share much they are few."""
    # NumPy strips trailing zero bytes here; a shorter key then still sorts before its continuations.
    texts = keys.view(f"S{keys.shape[1] * 4}").ravel().tolist()
    rank = {text: place for place, text in enumerate(sorted(set(texts)))}
    ranks = np.fromiter(map(rank.__getitem__, texts), np.int64, len(texts))
    return np.argsort(ranks, kind="stable")


def _common_with_previous(keys: npt.NDArray[np.uint32], ranking: Int64Array) -> Int32Array:
    """Tokens of the block in which each row equals the one ranked before it, int32 [len(keys)]; 0 for the first."""
    common = np.zeros(len(keys), np.int32)
    for batch in _batches(len(keys) - 1):
        same = keys[ranking[batch], 1:] == keys[ranking[batch.start + 1 : batch.stop + 1], 1:]
        common[batch.start + 1 : batch.stop + 1] = np.where(same.all(axis=1), BLOCK_TOKENS, same.argmin(axis=1))
    return common


def _batches(count: int) -> Iterator[slice]:
    for first in range(0, count, BATCH_ROWS):
        yield slice(first, min(first + BATCH_ROWS, count))


class _Nodes(NamedTuple):
    """Node columns while the tree is built, in the order in which the nodes were met."""

    parent: list[int]
    end: list[int]
    row_lo: list[int]
    row_hi: list[int]


def _build_nodes(sorted_rows: Int64Array, lcp: Int32Array, length: Int32Array) -> Trie:
    nodes, place_node = _walk(lcp.tolist(), length[sorted_rows].tolist())
    parent, end = np.array(nodes.parent, np.int32), np.array(nodes.end, np.int32)
    row_lo, row_hi = np.array(nodes.row_lo, np.int64), np.array(nodes.row_hi, np.int64)
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
    return Trie(parent, start, end, row_lo[preorder], row_hi[preorder], sorted_rows, row_node)


def _walk(lcp: list[int], length: list[int]) -> tuple[_Nodes, list[int]]:
    """Nodes from neighbours' common prefixes and lengths in sorted order; per place, the node where its row ends.

    The stack holds the path of the row before: a cheap step per row, since each node is pushed and popped once.
    """
    nodes = _Nodes([-1], [0], [0], [len(length)])
    parent, end, row_lo, row_hi = nodes
    place_node: list[int] = []
    stack = [0]
    for place, (common, num_tokens) in enumerate(zip(lcp, length, strict=True)):
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
