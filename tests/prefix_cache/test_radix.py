"""The run-time tree against a dict of tuples: which prefixes are resident, how much of them is computed, who goes first."""

import math

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batchrun.engine.kv_pool import KVPool, PageRun
from batchrun.prefix_cache.order import order_rows
from batchrun.prefix_cache.radix import RadixTree
from batchrun.prefix_cache.trie import build_trie

PAGE_SIZE = 2
NUM_PAGES = 9


def trie_of(rows):
    length = np.array([len(row) for row in rows], np.int32)
    tokens = np.array([token for row in rows for token in row], np.int32)
    return build_trie(tokens, np.cumsum(length, dtype=np.int64) - length, length)


class TreeMachine(RuleBasedStateMachine):
    """`resident` is the model: prefix (a tuple of tokens) -> (start of its edge, tokens computed of the edge)."""

    @initialize(
        rows=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=10),
        outputs=st.lists(st.integers(1, 3), min_size=10, max_size=10),
        order=st.sampled_from(["plan", "given"]),
    )
    def build(self, rows, outputs, order):
        self.rows = [tuple(row) for row in rows]
        self.trie = trie_of(rows)
        self.order = order_rows(self.trie, np.array(outputs[: len(rows)], np.float64), order)
        self.pool = KVPool(NUM_PAGES, PAGE_SIZE)
        self.tree = RadixTree(self.trie, self.order, self.pool)
        self.waiting, self.running = set(range(len(rows))), {}
        self.resident, self.high_water, self.evictions = {}, {}, 0

    def prefix(self, node):
        return self.rows[self.trie.sorted_rows[self.trie.row_lo[node.node_id]]][: node.end]

    def beneath(self, prefix, rows):
        return [row for row in rows if self.rows[row][: len(prefix)] == prefix]

    def next_use(self, prefix):
        return min((int(self.order.position[row]) for row in self.beneath(prefix, self.waiting)), default=math.inf)

    def unlocked(self, also_locked=()):
        busy = [*self.running, *also_locked]
        return {prefix for prefix in self.resident if not self.beneath(prefix, busy)}

    def pages(self, prefixes):
        return sum(math.ceil((len(prefix) - self.resident[prefix][0]) / PAGE_SIZE) for prefix in prefixes)

    def make_room(self, num_pages, also_locked=()):
        """Call the tree, check what went against the model, and take it out of the model."""
        free, unlocked = self.pool.free_pages, self.unlocked(also_locked)
        assert free == NUM_PAGES - self.pages(self.resident)
        evicted = self.tree.make_room(num_pages)
        if free + self.pages(unlocked) < num_pages:
            assert evicted is None
            return None
        left = {self.prefix(node) for node in self.tree.resident_nodes()}
        gone = set(self.resident) - left
        assert gone <= unlocked
        assert evicted == len(gone)
        assert self.pool.free_pages >= num_pages
        for prefix in gone:
            for other in unlocked & left:
                assert self.next_use(prefix) >= self.next_use(other)
                assert other[: len(prefix)] != prefix, "an ancestor was evicted before what lies beneath it"
        if gone:  # no more than needed: without the one used soonest there was too little
            soonest = min(gone, key=lambda prefix: (self.next_use(prefix), len(prefix)))
            assert free + self.pages(gone - {soonest}) < num_pages
        self.evictions += len(gone)
        for prefix in gone:
            del self.resident[prefix]
        return evicted

    def forget_finished(self):
        needed = [*self.waiting, *self.running]
        self.resident = {prefix: kept for prefix, kept in self.resident.items() if self.beneath(prefix, needed)}

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def start(self, data):
        row = data.draw(st.sampled_from(sorted(self.waiting)))
        path = self.tree.path(row)
        assert [self.prefix(node) for node in path][-1] == self.rows[row]
        missing = [node for node in path if self.prefix(node) not in self.resident]
        self.tree.lock(path)
        needed = self.tree.missing_pages(path)
        assert needed == sum(math.ceil(node.length / PAGE_SIZE) for node in missing)
        if self.make_room(needed, [row]) is None:
            self.tree.release(path)
            return
        self.tree.allocate(path)
        self.tree.row_started(row)
        self.resident |= {self.prefix(node): (node.start, 0) for node in missing}
        self.waiting.remove(row)
        self.running[row] = path

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.integers(1, 4))
    def compute(self, data, num_tokens):
        for node in self.running[data.draw(st.sampled_from(sorted(self.running)))]:
            step = min(num_tokens, node.length - node.computed)
            node.computed += step
            node.high_water = max(node.high_water, node.computed)
            num_tokens -= step
            prefix = self.prefix(node)
            self.resident[prefix] = (node.start, self.resident[prefix][1] + step)
            self.high_water[prefix] = max(self.high_water.get(prefix, 0), self.resident[prefix][1])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data):
        row = data.draw(st.sampled_from(sorted(self.running)))
        self.tree.release(self.running.pop(row))
        self.tree.row_requeued(row)
        self.waiting.add(row)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), release_first=st.booleans())
    def finish(self, data, release_first):
        row = data.draw(st.sampled_from(sorted(self.running)))
        path = self.running.pop(row)
        if release_first:
            self.tree.release(path)
        self.tree.row_finished(row)
        if not release_first:
            self.tree.release(path)
        self.forget_finished()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def fail_without_starting(self, data):
        row = data.draw(st.sampled_from(sorted(self.waiting)))
        self.waiting.remove(row)
        self.tree.row_finished(row)
        self.forget_finished()

    @rule(num_pages=st.integers(0, NUM_PAGES + 1))
    def ask_for_room(self, num_pages):
        self.make_room(num_pages)

    @invariant()
    def agrees(self):
        self.tree.check_integrity()
        nodes = list(self.tree.resident_nodes())
        assert {self.prefix(node): (node.start, node.computed) for node in nodes} == self.resident
        for node in nodes:
            prefix = self.prefix(node)
            assert self.tree.next_use(node) == self.next_use(prefix)
            assert node.locks == len(self.beneath(prefix, self.running))
            assert node.rows_left == len(self.beneath(prefix, [*self.waiting, *self.running]))
            assert node.high_water == self.high_water.get(prefix, 0)
        assert self.tree.num_rows_left == len(self.waiting) + len(self.running)
        assert self.tree.evictions == self.evictions

    def teardown(self):
        for row, path in getattr(self, "running", {}).items():
            self.tree.row_finished(row)
            self.tree.release(path)
        for row in getattr(self, "waiting", ()):
            self.tree.row_finished(row)
        if hasattr(self, "tree"):
            self.tree.check_integrity()
            assert self.pool.free_pages == NUM_PAGES


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def started_tree(rows, num_pages, order="given"):
    """A tree in which every row ran, computed its path and was preempted: all resident, all waiting, nothing locked."""
    trie = trie_of(rows)
    tree = RadixTree(trie, order_rows(trie, np.ones(len(rows)), order), KVPool(num_pages, 1))
    for row in range(len(rows)):
        path = tree.path(row)
        tree.lock(path)
        tree.allocate(path)
        tree.row_started(row)
        for node in path:
            node.computed = node.high_water = node.length
        tree.release(path)
        tree.row_requeued(row)
    return tree


def resident_ids(tree):
    return sorted(node.node_id for node in tree.resident_nodes())


def test_farthest_next_use_goes_first_and_leaves_before_ancestors():
    tree = started_tree([[1, 2], [1, 3], [4]], 4)
    assert resident_ids(tree) == [1, 2, 3, 4]
    assert tree.make_room(1) == 1
    assert resident_ids(tree) == [1, 2, 3]  # row 2's
    assert tree.make_room(3) == 2
    assert resident_ids(tree) == [1]  # the prefix of the rows after their leaves
    assert tree.evictions == 3
    tree.check_integrity()


def test_started_row_no_longer_keeps_its_prefix_and_a_requeued_one_does():
    tree = started_tree([[1], [2], [3]], 3)
    tree.row_started(0)
    assert [tree.next_use(node) for node in tree.resident_nodes()] == [math.inf, 1, 2]
    tree.row_requeued(0)
    assert [tree.next_use(node) for node in tree.resident_nodes()] == [0, 1, 2]
    tree.row_started(0)
    tree.make_room(1)
    assert resident_ids(tree) == [2, 3]


def test_locked_path_stays_whole_and_too_little_evicts_nothing():
    tree = started_tree([[1, 2], [1, 3], [4]], 4)
    path = tree.path(1)
    tree.lock(path)
    assert tree.make_room(3) is None
    assert resident_ids(tree) == [1, 2, 3, 4]
    assert tree.make_room(2) == 2
    assert resident_ids(tree) == sorted(node.node_id for node in path)


def test_eviction_forgets_what_was_computed_but_not_that_it_was():
    tree = started_tree([[1, 2], [3]], 3)
    (node,) = tree.path(0)
    tree.make_room(3)
    assert (node.runs, node.computed, node.high_water) == ([], 0, 2)


def test_node_without_rows_left_is_freed_at_its_last_release():
    tree = started_tree([[1, 2], [1, 3]], 3)
    pool = tree._pool
    path = tree.path(0)
    tree.lock(path)
    tree.row_finished(0)
    assert pool.free_pages == 0  # in use until released
    tree.release(path)
    assert pool.free_pages == 1  # the leaf; the prefix waits for row 1
    tree.row_finished(1)
    assert pool.free_pages == 3
    assert tree.evictions == 0


def test_paths_share_node_objects_until_the_rows_are_done():
    tree = started_tree([[1, 2], [1, 3]], 3)
    first, second = tree.path(0), tree.path(1)
    assert first[0] is second[0] is first[1].parent
    assert first[0].parent is None
    tree.row_finished(0)
    with pytest.raises(AssertionError, match="row 0 has finished"):
        tree.path(0)


def test_rows_that_wait_cost_no_node():
    trie = trie_of([[row, 1] for row in range(100)])
    tree = RadixTree(trie, order_rows(trie, np.ones(100), "plan"), KVPool(4, 1))
    for row in range(50):
        tree.row_finished(row)
    assert len(tree._nodes) == 0
    assert tree.num_rows_left == 50


def test_allocating_for_a_path_that_is_not_locked_is_a_bug():
    trie = trie_of([[1]])
    tree = RadixTree(trie, order_rows(trie, np.ones(1), "plan"), KVPool(4, 1))
    with pytest.raises(AssertionError, match="not locked"):
        tree.allocate(tree.path(0))


def corrupt_locks(tree):
    tree.path(0)[1].locks = 1


def corrupt_computed(tree):
    node = tree.path(0)[0]
    node.computed = node.high_water = node.length + 1


def corrupt_runs(tree):
    node = tree.path(0)[0]
    tree._pool.release(node.runs)
    node.runs = tree._pool.allocate(2)


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [(corrupt_locks, "evictable should be"), (corrupt_computed, "high water 2"), (corrupt_runs, "2 pages, 1 needed")],
)
def test_integrity_check_notices(corrupt, message):
    tree = started_tree([[1, 2], [1, 3]], 5)
    tree.check_integrity()
    corrupt(tree)
    with pytest.raises(AssertionError, match=message):
        tree.check_integrity()


def test_integrity_check_counts_other_owners():
    tree = started_tree([[1, 2]], 4)
    other = tree._pool.allocate(1)
    with pytest.raises(AssertionError, match="counted 1 owners, there are 0"):
        tree.check_integrity()
    tree.check_integrity([other])
    with pytest.raises(AssertionError, match="counted 0 owners, there are 1"):
        tree.check_integrity([other, [PageRun(3, 1)]])
