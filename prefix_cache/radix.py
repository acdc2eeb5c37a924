"""The trie at run time: where each planned prefix's KV lies, who needs it now, and who will need it next.

Life of a node:

    not resident --allocate--> resident, computed 0 --(scheduler)--> computed = length
          ^                        |
          +------ make_room -------+            rows_left 0 and locks 0: pages free, node forgotten

Pages of a resident node belong to it alone, and it starts on a page boundary: token `start + i` of the path lies in slot
`i % page_size` of its page `i // page_size`. Who uses them holds a lock on the node, not a share of its pages.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence

import numpy as np

from batchrun.prefix_cache.order import RowOrder
from batchrun.prefix_cache.pages import PagePool, PageRun, pages_for
from batchrun.prefix_cache.trie import Int64Array, Trie


class Node:
    """One edge of the trie. Invariants: 0 <= computed <= high_water <= length; computed is 0 unless resident."""

    __slots__ = ("computed", "end", "high_water", "locks", "next_uses", "node_id", "parent", "rank", "rows_left", "runs", "start")

    def __init__(self, node_id: int, parent: Node | None, interval: tuple[int, int], rank: int, rows_left: int) -> None:
        self.node_id = node_id
        self.parent = parent
        """The node before it on the path; None below the root."""
        self.start, self.end = interval
        """Token positions [start, end)."""
        self.rank = rank
        """Preorder rank in the planned walk: work sorted by it has the rows beneath a node side by side."""
        self.computed = 0
        """Tokens of the edge whose KV is in the pages. The scheduler sets it."""
        self.high_water = 0
        """Most tokens ever computed, so that computing one again can be told from the first time. The scheduler sets it."""
        self.runs: list[PageRun] = []
        """Pages of the edge, in token order; empty while not resident."""
        self.locks = 0
        """Paths in use that contain the node."""
        self.rows_left = rows_left
        """Rows beneath that have not finished."""
        self.next_uses: _NextUses | None = None

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def resident(self) -> bool:
        return bool(self.runs)

    def __repr__(self) -> str:
        return (
            f"Node({self.node_id}, [{self.start}, {self.end}), computed {self.computed}, "
            f"locks {self.locks}, rows_left {self.rows_left}, {self.runs})"
        )


class _NextUses:
    """The order positions beneath a node, and a pointer to the first that may not have started.

    Each query moves the pointer over positions that have started, each requeued row moves it back: so all queries
    together cost about one pass over the positions.
    """

    __slots__ = ("_high", "_listed", "_next")

    def __init__(self, positions: Int64Array) -> None:
        low, high = int(positions.min()), int(positions.max()) + 1
        # In planned order the rows beneath a node are an interval of positions, and need no list.
        self._listed = None if high - low == len(positions) else np.sort(positions)
        self._next = low if self._listed is None else 0
        self._high = high if self._listed is None else len(self._listed)

    def first_unstarted(self, started: bytearray) -> float:
        """The smallest position that has not started, infinity when there is none. Moves the pointer."""
        if self._listed is None:
            found = started.find(0, self._next, self._high)
            self._next = self._high if found < 0 else found
            return math.inf if found < 0 else found
        while self._next < self._high:
            position = int(self._listed[self._next])
            if not started[position]:
                return position
            self._next += 1
        return math.inf

    def requeued(self, position: int) -> None:
        place = position if self._listed is None else bisect_left(self._listed, position)
        self._next = min(self._next, place)


class RadixTree:
    """The nodes in use of a trie whose rows are run in an order, their pages taken from a pool.

    A Node exists from the first touch of its path until its last row has finished, so a million rows that wait cost a
    byte each. Attributes: num_rows_left; evictions, the nodes evicted while rows beneath them were left.
    """

    def __init__(self, trie: Trie, order: RowOrder, pool: PagePool) -> None:
        self.evictions = 0
        self.num_rows_left = trie.num_rows
        self._trie = trie
        self._order = order
        self._pool = pool
        self._nodes: dict[int, Node] = {}
        self._evictable: dict[int, Node] = {}  # resident without locks
        self._evictable_pages = 0
        self._started = bytearray(trie.num_rows)  # per order position: 1 started or finished
        self._finished = bytearray(trie.num_rows)  # per row

    def path(self, row: int) -> tuple[Node, ...]:
        """The nodes of a row that has not finished, first to last, the root left out. Creates those not touched before."""
        assert not self._finished[row], f"row {row} has finished, its nodes may be gone"
        node: Node | None = None
        path = []
        for node_id in self._trie.path(row):
            node = self._nodes.get(node_id) or self._create(node_id, node)
            path.append(node)
        return tuple(path)

    def lock(self, path: Sequence[Node]) -> None:
        """Keep every node of a whole path from eviction, resident or not."""
        for node in path:
            if node.locks == 0 and node.runs:
                self._not_evictable(node)
            node.locks += 1

    def release(self, path: Sequence[Node]) -> None:
        """Take back one lock of every node of a path. Frees and forgets those without locks and without rows left."""
        for node in reversed(path):
            assert node.locks > 0, f"released more often than locked: {node}"
            node.locks -= 1
            if node.locks == 0:
                if node.rows_left == 0:
                    self._forget(node)
                elif node.runs:
                    self._now_evictable(node)

    def missing_pages(self, path: Iterable[Node]) -> int:
        """Pages that `allocate` would take for the path."""
        return sum(self._pages_of(node) for node in path if not node.runs)

    def allocate(self, path: Sequence[Node]) -> None:
        """Give pages to the nodes of a locked path that have none; nothing of them is computed yet.

        The pool must have `missing_pages(path)` free: call `make_room` first, after locking the path.
        """
        for node in path:
            assert node.locks > 0, f"pages for a node that is not locked: {node}"
            if not node.runs:
                runs = self._pool.allocate(self._pages_of(node))
                assert runs is not None, f"{self._pool.free_pages} pages free, {self._pages_of(node)} needed: {node}"
                node.runs = runs
                node.computed = 0

    def make_room(self, num_pages: int) -> int | None:
        """Evict nodes without locks until the pool has `num_pages` free, and return how many were evicted.

        The farthest next use goes first, a node before its ancestors. None, and nothing evicted, when evicting all of
        them would not do.
        """
        if self._pool.free_pages >= num_pages:
            return 0
        if self._pool.free_pages + self._evictable_pages < num_pages:
            return None
        # What is beneath a node is used no sooner than the node itself, so only ties need the depth.
        farthest_first = sorted(self._evictable.values(), key=lambda node: (-self.next_use(node), -node.start, node.rank))
        evicted = 0
        for node in farthest_first:
            if self._pool.free_pages >= num_pages:
                break
            self._evict(node)
            evicted += 1
        assert self._pool.free_pages >= num_pages, f"{self._pool.free_pages} of {num_pages} pages after {evicted} evictions"
        return evicted

    def next_use(self, node: Node) -> float:
        """Smallest order position of a row beneath the node that waits to start; infinity when none does."""
        if node.next_uses is None:
            rows = self._trie.sorted_rows[self._trie.row_lo[node.node_id] : self._trie.row_hi[node.node_id]]
            node.next_uses = _NextUses(self._order.position[rows])
        return node.next_uses.first_unstarted(self._started)

    def row_started(self, row: int) -> None:
        """The row runs, so it counts for no next use any more."""
        self._started[self._order.position[row]] = 1

    def row_requeued(self, row: int) -> None:
        """The row, preempted, waits again at its place in the order."""
        assert not self._finished[row], f"row {row} has finished"
        position = int(self._order.position[row])
        self._started[position] = 0
        for node in self.path(row):
            if node.next_uses is not None:
                node.next_uses.requeued(position)

    def row_finished(self, row: int) -> None:
        """The row needs its path no more. It may never have been locked (a row that failed before it ran)."""
        path = self.path(row)
        self._started[self._order.position[row]] = 1
        self._finished[row] = 1
        self.num_rows_left -= 1
        for node in reversed(path):
            node.rows_left -= 1
            if node.rows_left == 0 and node.locks == 0:
                self._forget(node)

    def resident_nodes(self) -> Iterable[Node]:
        """Nodes that have pages, in order of creation."""
        return (node for node in self._nodes.values() if node.runs)

    def check_integrity(self, extra_owners: Iterable[Sequence[PageRun]] = ()) -> None:
        """Raise AssertionError, with values, unless pages, locks and counts agree.

        extra_owners: the runs of everyone else who holds pages of the pool.
        """
        self._pool.check_integrity([*(node.runs for node in self.resident_nodes()), *extra_owners])
        for node in self._nodes.values():
            pages = sum(run.count for run in node.runs)
            assert not node.runs or pages == self._pages_of(node), f"{pages} pages, {self._pages_of(node)} needed: {node}"
            assert 0 <= node.computed <= node.high_water <= node.length, f"high water {node.high_water}: {node}"
            assert node.runs or node.computed == 0, f"computed without pages: {node}"
            assert node.locks >= 0, node
            assert 0 <= node.rows_left <= int(self._trie.row_hi[node.node_id] - self._trie.row_lo[node.node_id]), node
            assert node.rows_left or node.locks, f"should be forgotten: {node}"
            evictable = bool(node.runs) and node.locks == 0
            assert (node.node_id in self._evictable) == evictable, f"evictable should be {evictable}: {node}"
            parent = node.parent
            if parent is not None:
                assert self._nodes.get(parent.node_id) is parent, f"parent {parent} is gone: {node}"
                assert parent.locks >= node.locks, f"parent {parent} has fewer locks: {node}"
                assert parent.rows_left >= node.rows_left, f"parent {parent} has fewer rows left: {node}"
                assert parent.runs or not node.runs, f"resident beneath {parent}, which is not: {node}"
        evictable_pages = sum(self._pages_of(node) for node in self._evictable.values())
        assert evictable_pages == self._evictable_pages, f"{self._evictable_pages} pages counted, {evictable_pages} there"
        assert self._evictable.keys() <= self._nodes.keys(), "a forgotten node can be evicted"
        left = len(self._finished) - sum(self._finished)
        assert left == self.num_rows_left, f"{self.num_rows_left} rows counted, {left} left"

    def _pages_of(self, node: Node) -> int:
        return pages_for(node.end - node.start, self._pool.page_size)

    def _create(self, node_id: int, parent: Node | None) -> Node:
        trie = self._trie
        interval = (int(trie.start[node_id]), int(trie.end[node_id]))
        rows_left = int(trie.row_hi[node_id] - trie.row_lo[node_id])
        node = Node(node_id, parent, interval, int(self._order.node_rank[node_id]), rows_left)
        self._nodes[node_id] = node
        return node

    def _evict(self, node: Node) -> None:
        self._not_evictable(node)
        self._drop_pages(node)
        self.evictions += 1

    def _forget(self, node: Node) -> None:
        if node.node_id in self._evictable:
            self._not_evictable(node)
        if node.runs:
            self._drop_pages(node)
        del self._nodes[node.node_id]

    def _drop_pages(self, node: Node) -> None:
        self._pool.release(node.runs)
        node.runs = []
        node.computed = 0

    def _now_evictable(self, node: Node) -> None:
        self._evictable[node.node_id] = node
        self._evictable_pages += self._pages_of(node)

    def _not_evictable(self, node: Node) -> None:
        del self._evictable[node.node_id]
        self._evictable_pages -= self._pages_of(node)
