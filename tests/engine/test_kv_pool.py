"""The KV pool against a list of owner counts."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batchrun.engine.kv_pool import KVPool, PageRun

NUM_PAGES = 24


def pages_of(runs):
    return [page for start, count in runs for page in range(start, start + count)]


class PoolMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.pool = KVPool(NUM_PAGES, 4)
        self.held: list[list[PageRun]] = []
        self.peak = 0

    def owners(self):
        counts = [0] * NUM_PAGES
        for runs in self.held:
            for page in pages_of(runs):
                counts[page] += 1
        return counts

    def longest_free_run(self):
        text = "".join("." if count == 0 else "x" for count in self.owners())
        return max(len(run) for run in text.split("x"))

    @rule(count=st.integers(0, 10))
    def allocate(self, count):
        before, longest = self.owners(), self.longest_free_run()
        runs = self.pool.allocate(count)
        if count > before.count(0):
            assert runs is None
            return
        assert runs is not None
        pages = pages_of(runs)
        assert len(pages) == count == len(set(pages))
        assert all(before[page] == 0 for page in pages)
        assert len(runs) <= 1 or count > longest
        self.held.append(runs)
        self.peak = max(self.peak, NUM_PAGES - self.owners().count(0))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data):
        runs = data.draw(st.sampled_from(self.held))
        part = [PageRun(start, data.draw(st.integers(1, count))) for start, count in runs]
        self.pool.share(part)
        self.held.append(part)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def agrees(self):
        self.pool.check_integrity(self.held)
        assert self.pool.free_pages == self.owners().count(0)
        assert self.pool.used_pages == NUM_PAGES - self.pool.free_pages
        assert self.pool.peak_used_pages == self.peak


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def pool_with_holes():
    """Free runs: (2, 2), (6, 4), (12, 2); the rest of 14 pages is in use."""
    pool = KVPool(14, 4)
    parts = [pool.allocate(count) for count in (2, 2, 2, 4, 2, 2)]
    for part in (parts[1], parts[3], parts[5]):
        pool.release(part)
    return pool


def test_shortest_run_that_fits_is_taken_lowest_address_on_ties():
    pool = pool_with_holes()
    assert pool.allocate(2) == [PageRun(2, 2)]
    assert pool.allocate(1) == [PageRun(12, 1)]
    assert pool.allocate(3) == [PageRun(6, 3)]


def test_longest_runs_are_joined_when_none_is_long_enough():
    assert pool_with_holes().allocate(7) == [PageRun(6, 4), PageRun(2, 2), PageRun(12, 1)]


def test_too_few_free_pages_change_nothing():
    pool = pool_with_holes()
    assert pool.allocate(9) is None
    assert pool.free_pages == 8
    assert pool.allocate(8) is not None


def test_shared_page_is_free_only_after_its_last_owner():
    pool = KVPool(4, 4)
    runs = pool.allocate(3)
    pool.share([PageRun(1, 1)])
    pool.release(runs)
    assert pool.free_pages == 3
    assert pool.allocate(2) == [PageRun(2, 2)]
    pool.release([PageRun(1, 1)])
    assert pool.allocate(2) == [PageRun(0, 2)]


@pytest.mark.parametrize("act", ["share", "release"])
def test_free_page_cannot_be_shared_or_released(act):
    pool = KVPool(4, 4)
    pool.allocate(2)
    with pytest.raises(AssertionError, match="page 2 is free"):
        getattr(pool, act)([PageRun(1, 2)])


def test_integrity_check_notices_an_owner_too_many_and_a_page_lost():
    pool = KVPool(4, 4)
    runs = pool.allocate(2)
    with pytest.raises(AssertionError, match="page 0: counted 1 owners, there are 2"):
        pool.check_integrity([runs, [PageRun(0, 1)]])
    with pytest.raises(AssertionError, match="page 0: counted 1 owners, there are 0"):
        pool.check_integrity([])
    pool.free_pages -= 1
    with pytest.raises(AssertionError, match="1 pages said to be free, 2 have no owner"):
        pool.check_integrity([runs])


def test_empty_pool_is_refused():
    with pytest.raises(ValueError, match="at least one page"):
        KVPool(0, 16)
