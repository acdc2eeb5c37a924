"""Rows of token ids in lexicographic order, and what neighbours have in common, without a copy of the tokens.

Quicksort on whole rows (in the manner of Bentley & Sedgewick 1997): of each group of rows that tie so far, a row drawn at
random is the pivot, and every row is compared with it up to the first difference. That position and the side tell the order:

    pivot    A B C D       B .          side -, position 0
                           A B C A      side -, position 3     the later a row parts downwards, the nearer to the pivot
                           A B C D      equal
                           A B C E      side +, position 3
                           A C          side +, position 1     the earlier a row parts upwards, the farther from it

Rows that part at one position on one side go by their token there, and those that have it in common are a group of the next
round, from behind it on. So a token is read once however many rows share it with others, and the rounds are about log2 of the
rows: a chain of branches is halved by each pivot.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

BLOCK_TOKENS = 64
"""Tokens compared at once."""
BATCH_ROWS = 1 << 14
"""Rows compared at once, which bounds the copies of their tokens to 8 MiB."""


class SortedRows(NamedTuple):
    """R rows in order; rows that are equal by number."""

    order: Int64Array
    """int64 [R], the rows."""
    lcp: Int32Array
    """int32 [R], tokens that each has in common with the one before it; 0 for the first."""


class _Ties(NamedTuple):
    """Rows whose place is not known yet, in groups that tie. All arrays have an entry per such row."""

    places: Int64Array
    """Where they are in the order; a group's places are side by side."""
    group: Int64Array
    """0, 1, ..., ascending."""
    depth: Int32Array
    """Tokens that the rows of the group have in common."""


def sort_rows(tokens: Int32Array, begin: Int64Array, length: Int32Array) -> SortedRows:
    """Sort the rows `tokens[begin[i] : begin[i] + length[i]]`; a row comes before its continuations.

    tokens int32, ids >= 0, may be a memory map; begin int64 [R]; length int32 [R]. Raises ValueError when rows part at a
    negative id.
    """
    num_rows = len(length)
    order = np.arange(num_rows, dtype=np.int64)
    lcp = np.zeros(num_rows, np.int32)
    ties = _Ties(order.copy(), np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int32))
    pivots = np.random.default_rng(0)  # any choice gives the same order, sooner or later
    span = np.int64(length.max(initial=0)) + 1
    while len(ties.places):
        rows = order[ties.places]
        pivot = _draw(rows, ties.group, pivots)
        common = _common(tokens, begin, length, (rows, pivot), ties.depth)
        own, other = (_next_token(tokens, begin, length, which, common) for which in (rows, pivot))
        side = np.where(own < other, common, np.where(own > other, 2 * span - common, span))
        key = ties.group * (2 * span + 1) + side
        ranking = np.lexsort((own, key))  # stable: equal rows stay by number
        order[ties.places] = rows[ranking]
        ties = _settle(ties, lcp, common[ranking], own[ranking], key[ranking])
    return SortedRows(order, lcp)


def _draw(rows: Int64Array, group: Int64Array, pivots: np.random.Generator) -> Int64Array:
    """For each row a row of its group, the same for the whole group."""
    first = np.flatnonzero(np.diff(group, prepend=-1))
    size = np.diff(first, append=len(group))
    pivot_of_group: Int64Array = rows[first + pivots.integers(0, size)]
    return pivot_of_group[group]


def _settle(ties: _Ties, lcp: Int32Array, common: Int32Array, token: Int32Array, key: Int64Array) -> _Ties:
    """Write the common prefixes that are now known into `lcp`; the rows that still tie with a neighbour.

    common, token and key are in the new order: tokens in common with the pivot, the token behind them (-1 at the end of the
    row), and what rows that still tie have in common but for that token.
    """
    same_group = np.diff(ties.group, prepend=-1) == 0
    tied = same_group & (np.diff(key, prepend=-1) == 0) & (np.diff(token, prepend=-2) == 0)
    previous = np.roll(common, 1)
    # Two rows that part from the pivot at different places part from each other at the earlier one.
    known = np.flatnonzero(same_group)
    lcp[ties.places[known]] = np.minimum(common, previous)[known]
    tied &= token >= 0  # rows that ended together are equal
    kept = tied | np.append(tied[1:], False)
    group = np.cumsum(~tied[kept], dtype=np.int64) - 1
    return _Ties(ties.places[kept], group, common[kept] + np.int32(1))


def _common(
    tokens: Int32Array, begin: Int64Array, length: Int32Array, pairs: tuple[Int64Array, Int64Array], depth: Int32Array
) -> Int32Array:
    """Tokens that the rows of each pair have in common, of which they are known to have `depth`: int32 [pairs]."""
    common = depth.copy()
    for low in range(0, len(depth), BATCH_ROWS):
        part = slice(low, low + BATCH_ROWS)
        left, right = pairs[0][part], pairs[1][part]
        shorter = np.minimum(length[left], length[right])
        reached = common[part]
        reached[left == right] = shorter[left == right]
        open_pairs = np.flatnonzero(reached < shorter)
        while len(open_pairs):
            at = reached[open_pairs]
            differ = _block(tokens, begin[left[open_pairs]] + at) != _block(tokens, begin[right[open_pairs]] + at)
            first = differ.argmax(axis=1)
            parted = differ[np.arange(len(first)), first]
            reached[open_pairs] = np.minimum(at + np.where(parted, first, BLOCK_TOKENS), shorter[open_pairs])
            open_pairs = open_pairs[~parted & (reached[open_pairs] < shorter[open_pairs])]
    return common


def _block(tokens: Int32Array, at: Int64Array) -> Int32Array:
    """The block of tokens from each place on, int32 [len(at), BLOCK_TOKENS]; behind the end of the file any tokens."""
    block: Int32Array
    if int(at.max()) + BLOCK_TOKENS <= len(tokens):
        block = np.lib.stride_tricks.sliding_window_view(tokens, BLOCK_TOKENS)[at]
    else:
        block = tokens[np.minimum(at[:, None] + np.arange(BLOCK_TOKENS), len(tokens) - 1)]
    return block


def _next_token(tokens: Int32Array, begin: Int64Array, length: Int32Array, rows: Int64Array, at: Int32Array) -> Int32Array:
    """The token of each row at position `at`, -1 where the row has ended; int32 [rows]."""
    token = np.full(len(rows), -1, np.int32)
    inside = np.flatnonzero(at < length[rows])
    token[inside] = tokens[begin[rows[inside]] + at[inside]]
    if len(inside) and int(token[inside].min()) < 0:
        raise ValueError(f"a token id is negative: {int(token[inside].min())}")
    return token
