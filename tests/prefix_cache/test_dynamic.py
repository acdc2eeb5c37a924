"""Look-up, insertion and split against a dict of tuples, with a memory that knows which prefix each slot was written for."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batchrun.engine.kv_pool import KVPool, PageRun
from batchrun.prefix_cache.dynamic import DynamicTree

PAGE_SIZE = 4
NUM_PAGES = 16
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=11).map(tuple)


def ids(tokens):
    return np.array(tokens, np.int32)


def slots_of(runs, offset, count):
    slots = [page * PAGE_SIZE + slot for start, size in runs for page in range(start, start + size) for slot in range(PAGE_SIZE)]
    return slots[offset : offset + count]


class DynamicMachine(RuleBasedStateMachine):
    """`held` is the model: the prefixes in the tree; `memory` maps a slot to the prefix whose last token is in it."""

    def __init__(self):
        super().__init__()
        self.pool = KVPool(NUM_PAGES, PAGE_SIZE)
        self.tree = DynamicTree(self.pool)
        self.held, self.memory = set(), {}
        self.sequences, self.locked = [], []

    def longest(self, tokens):
        return max((end for end in range(len(tokens) + 1) if tokens[:end] in self.held), default=0)

    def edges(self):
        """Node -> the prefixes that end in its edge."""
        edges = {}
        for node in self.tree.nodes():
            above = () if node.parent not in edges else edges[node.parent][-1]
            whole = above + tuple(node.tokens.tolist())
            edges[node] = [whole[:end] for end in range(len(above) + 1, len(whole) + 1)]
        return edges

    @rule(tokens=TOKENS, keep=st.booleans())
    def insert(self, tokens, keep):
        runs = self.pool.allocate(-(-len(tokens) // PAGE_SIZE))
        if runs is None:
            return
        for end, slot in enumerate(slots_of(runs, 0, len(tokens)), start=1):
            self.memory[slot] = tokens[:end]
        before = self.longest(tokens)
        assert self.tree.insert(ids(tokens), runs) == len(tokens) - before
        self.held |= {tokens[:end] for end in range(1, len(tokens) + 1)}
        if keep:
            self.sequences.append(runs)
        else:
            self.pool.release(runs)

    @precondition(lambda self: self.sequences)
    @rule()
    def drop_sequence(self):
        self.pool.release(self.sequences.pop(0))

    @rule(tokens=TOKENS)
    def look_up(self, tokens):
        free, edges = self.pool.free_pages, self.edges()
        assert self.tree.match(ids(tokens)).num_tokens == self.longest(tokens)
        assert (self.pool.free_pages, self.edges()) == (free, edges)

    @rule(tokens=TOKENS)
    def lock(self, tokens):
        handle = self.tree.match(ids(tokens))
        self.tree.lock(handle)
        self.locked.append((tokens[: handle.num_tokens], handle))

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def release(self, data):
        self.tree.release(self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1)))[1])

    @rule(num_pages=st.integers(0, NUM_PAGES))
    def make_room(self, num_pages):
        before, stamps = self.edges(), {node: node.last_use for node in self.tree.nodes()}
        evicted = self.tree.make_room(num_pages)
        after = set(self.tree.nodes())
        gone = set(before) - after
        assert evicted == len(gone)
        assert all(node.locks == 0 for node in gone)
        free_leaves = [node for node in after if not node.children and node.locks == 0]
        assert all(stamps[node] <= stamps[other] for node in gone for other in free_leaves)
        assert self.pool.free_pages >= num_pages or not free_leaves
        self.held -= {prefix for node in gone for prefix in before[node]}

    @invariant()
    def agrees(self):
        self.tree.check_integrity(self.sequences)
        assert {prefix for prefixes in self.edges().values() for prefix in prefixes} == self.held
        for tokens, handle in self.locked:
            segments = self.tree.segments(handle)
            slots = [slot for segment in segments for slot in slots_of(segment.runs, segment.offset, segment.num_tokens)]
            assert [self.memory[slot] for slot in slots] == [tokens[:end] for end in range(1, len(tokens) + 1)]


TestDynamicMachine = DynamicMachine.TestCase
TestDynamicMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def tree_with(*sequences):
    pool = KVPool(NUM_PAGES, PAGE_SIZE)
    tree = DynamicTree(pool)
    for tokens in sequences:
        runs = pool.allocate(-(-len(tokens) // PAGE_SIZE))
        tree.insert(ids(tokens), runs)
        pool.release(runs)
    return tree, pool


def test_split_within_a_page_shares_the_page_and_keeps_the_slots():
    tree, pool = tree_with((1, 2, 3, 4, 5, 6), (1, 2, 9))
    upper, lower, leaf = tree.nodes()
    assert (upper.tokens.tolist(), upper.runs, upper.offset) == ([1, 2], [PageRun(0, 1)], 0)
    assert (lower.tokens.tolist(), lower.runs, lower.offset) == ([3, 4, 5, 6], [PageRun(0, 2)], 2)
    assert (leaf.tokens.tolist(), leaf.runs, leaf.offset) == ([9], [PageRun(2, 1)], 2)
    assert pool.used_pages == 3
    tree.check_integrity()


def test_split_on_a_page_boundary_shares_nothing():
    tree, pool = tree_with((1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 9))
    assert [(node.runs, node.offset) for node in tree.nodes()] == [
        ([PageRun(0, 1)], 0),
        ([PageRun(1, 1)], 0),
        ([PageRun(3, 1)], 0),
    ]
    assert pool.used_pages == 3


def test_locked_handle_survives_a_split_of_its_node():
    tree, _ = tree_with((1, 2, 3, 4, 5, 6))
    handle = tree.match(ids((1, 2, 3, 4, 5, 6)))
    tree.lock(handle)
    runs = tree._pool.allocate(1)
    tree.insert(ids((1, 2, 9)), runs)
    assert [segment.num_tokens for segment in tree.segments(handle)] == [2, 4]
    tree._pool.release(runs)
    assert tree.make_room(NUM_PAGES) == 1  # only the new leaf
    tree.release(handle)
    assert tree.make_room(NUM_PAGES) == 2
    assert tree._pool.free_pages == NUM_PAGES


def test_least_recently_used_leaf_goes_first():
    tree, _ = tree_with((1, 1), (2, 2), (3, 3))
    tree.match(ids((1, 1)))
    assert tree.make_room(NUM_PAGES - 2) == 1
    assert sorted(int(node.tokens[0]) for node in tree.nodes()) == [1, 3]


def test_slots_of_an_unlocked_or_evicted_handle_are_refused():
    tree, _ = tree_with((1, 2))
    handle = tree.match(ids((1, 2)))
    with pytest.raises(AssertionError, match="must be locked before its slots"):
        tree.segments(handle)
    tree.make_room(NUM_PAGES)
    with pytest.raises(AssertionError, match="before anything is evicted"):
        tree.lock(handle)


def test_sequence_with_too_few_pages_is_refused():
    tree, pool = tree_with()
    with pytest.raises(AssertionError, match="5 tokens do not fit in 1 pages of 4"):
        tree.insert(ids((1, 2, 3, 4, 5)), pool.allocate(1))
