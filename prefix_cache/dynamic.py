"""Prefixes that no plan knew: a radix tree over finished sequences, split where the next one parts from it.

Tokens are put in slots in the order of the path, whole pages at a time, so a split may fall within a page. The page is
then owned by both halves, and the lower one begins at a slot offset (pages of 4 slots):

    one node     A B C D E F            page 7: A B C D   page 3: E F . .
    split at 2   A B | C D E F          upper: page 7, offset 0      lower: pages 7 and 3, offset 2
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchrun.prefix_cache.pages import PagePool, PageRun, pages_for

TokenArray = npt.NDArray[np.int32]


class Segment(NamedTuple):
    """Where `num_tokens` tokens of a prefix lie: from slot `offset` of the first page of `runs` on."""

    runs: list[PageRun]
    offset: int
    num_tokens: int


class DynamicNode:
    """One edge. Its pages are shared with whoever computed them and with the other half of a split."""

    __slots__ = ("children", "evicted", "last_use", "locks", "offset", "parent", "runs", "tokens")

    def __init__(self, parent: DynamicNode | None, tokens: TokenArray, runs: list[PageRun], offset: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.runs = runs
        self.offset = offset
        """Slot of the first token within the first page."""
        self.children: dict[int, DynamicNode] = {}
        """By first token."""
        self.locks = 0
        self.last_use = 0
        """Number of the last look-up or insertion that passed here."""
        self.evicted = False

    @property
    def is_free_leaf(self) -> bool:
        return not self.children and self.locks == 0


class Handle:
    """A prefix found by `match`: lock it before its slots are used, and before anything else changes the tree.

    num_tokens: how many tokens of the sequence are held. Splits keep a locked handle valid.
    """

    __slots__ = ("last", "num_tokens")

    def __init__(self, last: DynamicNode, num_tokens: int) -> None:
        self.last = last
        """The node in which the prefix ends, maybe within its edge."""
        self.num_tokens = num_tokens


class DynamicTree:
    """Holds shares of pages for the prefixes inserted, until they are evicted: the least recently used leaf first.

    Equality of tokens decides what matches; children are found by their first token.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._root = DynamicNode(None, np.empty(0, np.int32), [], 0)
        self._clock = 0  # counts uses: the same calls evict the same nodes, whatever the time of day

    def match(self, tokens: TokenArray) -> Handle:
        """The longest prefix of `tokens` (int32 [n]) that is held. Mutates only the last-use stamps of its nodes."""
        self._clock += 1
        node, held = self._root, 0
        while held < len(tokens):
            child = node.children.get(int(tokens[held]))
            if child is None:
                break
            child.last_use = self._clock
            node = child
            common = _common(child.tokens, tokens[held:])
            held += common
            if common < len(child.tokens):
                break
        return Handle(node, held)

    def lock(self, handle: Handle) -> None:
        """Keep the handle's nodes from eviction. Locks add up."""
        for node in _ancestry(handle.last):
            assert not node.evicted, "a handle must be locked before anything is evicted"
            node.locks += 1

    def release(self, handle: Handle) -> None:
        """Take back one lock."""
        for node in _ancestry(handle.last):
            assert node.locks > 0, "a handle was released more often than locked"
            node.locks -= 1

    def segments(self, handle: Handle) -> list[Segment]:
        """Where the tokens of a locked handle lie, in order. A later split cuts them differently, in the same slots."""
        assert handle.last.locks > 0 or handle.num_tokens == 0, "a handle must be locked before its slots are used"
        segments: list[Segment] = []
        left = handle.num_tokens
        for node in reversed(list(_ancestry(handle.last))):
            taken = min(left, len(node.tokens))
            if taken:
                pages = pages_for(node.offset + taken, self._pool.page_size)
                segments.append(Segment(_cut(node.runs, 0, pages), node.offset, taken))
            left -= taken
        assert left == 0, f"{left} of {handle.num_tokens} tokens are held by no node"
        return segments

    def insert(self, tokens: TokenArray, runs: Sequence[PageRun]) -> int:
        """Hold the prefix `tokens` (int32 [n]), whose KV lies in `runs` from slot 0 of the first page on.

        Only what was not held yet is taken from `runs`, as a share of those pages: the caller keeps its own and may
        release it. Splits the node in which the sequence parts from what is held. Returns the tokens newly held.
        """
        page_size = self._pool.page_size
        pages = sum(run.count for run in runs)
        assert pages >= pages_for(len(tokens), page_size), f"{len(tokens)} tokens do not fit in {pages} pages of {page_size}"
        handle = self.match(tokens)
        node, held = handle.last, handle.num_tokens
        if held == len(tokens):
            return 0
        inside = held - (_depth(node) - len(node.tokens))  # tokens of the last node's edge that match
        if inside < len(node.tokens):
            node = self._split(node, inside)
        rest = np.array(tokens[held:], np.int32)
        first_page = held // page_size
        taken = _cut(runs, first_page, pages_for(len(tokens), page_size) - first_page)
        self._pool.share(taken)
        leaf = DynamicNode(node, rest, taken, held % page_size)
        leaf.last_use = self._clock
        node.children[int(rest[0])] = leaf
        return len(rest)

    def make_room(self, num_pages: int) -> int:
        """Evict unlocked leaves, least recently used first, until the pool has `num_pages` free or none is left.

        Returns how many nodes were evicted. A page is free only when its other owners have let go of it too.
        """
        if self._pool.free_pages >= num_pages:
            return 0
        leaves = [(node.last_use, place, node) for place, node in enumerate(self.nodes()) if node.is_free_leaf]
        heapify(leaves)  # the place in the walk of the tree decides ties
        evicted = 0
        while leaves and self._pool.free_pages < num_pages:
            _, place, leaf = heappop(leaves)
            parent = leaf.parent
            assert parent is not None, "the root was evicted"
            del parent.children[int(leaf.tokens[0])]
            leaf.evicted = True
            self._pool.release(leaf.runs)
            evicted += 1
            if parent is not self._root and parent.is_free_leaf:
                heappush(leaves, (parent.last_use, place, parent))
        return evicted

    def nodes(self) -> Iterator[DynamicNode]:
        """All nodes but the root, parents first."""
        stack = list(reversed(self._root.children.values()))
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children.values()))

    def check_integrity(self, extra_owners: Iterable[Sequence[PageRun]] = ()) -> None:
        """Raise AssertionError, with values, unless pages, locks and edges agree. extra_owners: who else holds pages."""
        page_size = self._pool.page_size
        self._pool.check_integrity([*(node.runs for node in self.nodes()), *extra_owners])
        for node in self.nodes():
            parent = node.parent
            assert parent is not None, "a node without a parent"
            assert len(node.tokens) > 0, "an empty edge"
            assert parent.children.get(int(node.tokens[0])) is node, f"not its parent's child for {node.tokens[0]}"
            assert parent is self._root or parent.locks >= node.locks, f"{node.locks} locks beneath {parent.locks}"
            assert not node.evicted, "an evicted node is still held"
            offset = (_depth(node) - len(node.tokens)) % page_size
            assert node.offset == offset, f"offset {node.offset}, should be {offset}"
            pages, needed = sum(run.count for run in node.runs), pages_for(offset + len(node.tokens), page_size)
            assert pages == needed, f"{pages} pages for {len(node.tokens)} tokens from slot {offset}, should be {needed}"

    def _split(self, node: DynamicNode, at: int) -> DynamicNode:
        """Cut the edge after `at` tokens; the new upper node. The old node keeps the lower part, so handles that end in
        it still reach every page, and the upper one gets as many locks.
        """
        page_size = self._pool.page_size
        assert node.parent is not None
        assert 0 < at < len(node.tokens), f"split of {len(node.tokens)} tokens at {at}"
        boundary = node.offset + at
        upper_runs = _cut(node.runs, 0, pages_for(boundary, page_size))
        total = sum(run.count for run in node.runs)
        lower_runs = _cut(node.runs, boundary // page_size, total - boundary // page_size)
        if boundary % page_size:
            self._pool.share(_cut(lower_runs, 0, 1))
        upper = DynamicNode(node.parent, node.tokens[:at].copy(), upper_runs, node.offset)
        upper.locks, upper.last_use = node.locks, node.last_use
        node.parent.children[int(upper.tokens[0])] = upper
        node.parent, node.tokens, node.runs, node.offset = upper, node.tokens[at:].copy(), lower_runs, boundary % page_size
        upper.children[int(node.tokens[0])] = node
        return upper


def _ancestry(node: DynamicNode) -> Iterator[DynamicNode]:
    """The node and those above it, the root included."""
    current: DynamicNode | None = node
    while current is not None:
        yield current
        current = current.parent


def _depth(node: DynamicNode) -> int:
    """Tokens from the first of the sequence to the end of the node's edge."""
    return sum(len(above.tokens) for above in _ancestry(node))


def _common(left: TokenArray, right: TokenArray) -> int:
    """Tokens that two sequences have in common at their beginning."""
    shorter = min(len(left), len(right))
    different = left[:shorter] != right[:shorter]
    return int(different.argmax()) if different.any() else shorter


def _cut(runs: Sequence[PageRun], first: int, count: int) -> list[PageRun]:
    """The runs of `count` pages from the page `first` (counted along the runs) on."""
    cut: list[PageRun] = []
    for start, size in runs:
        low, high = max(first, 0), min(first + count, size)
        if low < high:
            cut.append(PageRun(start + low, high - low))
        first -= size
    assert sum(run.count for run in cut) == count, f"no {count} pages in {runs}"
    return cut
