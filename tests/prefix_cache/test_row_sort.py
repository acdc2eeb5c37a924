"""Sorting rows against Python's sort of lists, and the work that it takes, counted."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchrun.prefix_cache import row_sort
from batchrun.prefix_cache.row_sort import sort_rows


def columns(rows):
    length = np.array([len(row) for row in rows], np.int32)
    tokens = np.array([token for row in rows for token in row], np.int32)
    return tokens, np.cumsum(length, dtype=np.int64) - length, length


def common(left, right):
    return next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def assert_sorted(rows):
    order, lcp = sort_rows(*columns(rows))
    assert (order.dtype, lcp.dtype) == (np.int64, np.int32)
    assert order.tolist() == sorted(range(len(rows)), key=lambda row: (rows[row], row))
    ordered = [rows[row] for row in order.tolist()]
    assert lcp.tolist() == [0, *map(common, ordered, ordered[1:])][: len(rows)]


@pytest.mark.parametrize(("block_tokens", "batch_rows"), [(1, 1), (2, 3), (3, 4), (64, 5)])
def test_rows_are_in_the_order_of_lists_and_know_what_neighbours_share(block_tokens, batch_rows, monkeypatch):
    monkeypatch.setattr(row_sort, "BLOCK_TOKENS", block_tokens)
    monkeypatch.setattr(row_sort, "BATCH_ROWS", batch_rows)

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=30))
    def check(rows):
        assert_sorted(rows)

    check()


def test_rows_that_share_several_blocks_up_to_the_end_of_the_file():
    trunk = list(range(500))
    rows = [trunk[:cut] + tail for cut in (0, 63, 64, 65, 128, 300, 500) for tail in ([], [9], [7, 7], [2**31 - 1])]
    assert_sorted(rows)
    assert_sorted(rows[::-1])


def counting(monkeypatch, function, count):
    """What each call of a function of the module counts for, by its arguments."""
    calls = []
    inner = getattr(row_sort, function)

    def counted(*args):
        calls.append(count(*args))
        return inner(*args)

    monkeypatch.setattr(row_sort, function, counted)
    return calls


@pytest.fixture
def compared_tokens(monkeypatch):
    return counting(monkeypatch, "_block", lambda _tokens, at: len(at) * row_sort.BLOCK_TOKENS)


@pytest.mark.parametrize("tail", [[], [7]])
@pytest.mark.parametrize("order", [1, -1])
def test_a_staircase_takes_a_logarithm_of_rounds(order, tail, monkeypatch, compared_tokens):
    # Each row parts from all longer ones: with the shortest as the pivot it would be a round per row.
    rows = [[5] * count + tail for count in range(1, 1025)][::order]
    rounds = counting(monkeypatch, "_draw", lambda *_: 1)
    assert_sorted(rows)
    assert len(rounds) < 40, "about 2 ln(1024)"
    assert sum(compared_tokens) < 30 * sum(map(len, rows)), "two rows a comparison, in each round"


def test_a_token_is_compared_once_however_many_rows_share_it(compared_tokens):
    rng = np.random.default_rng(0)
    rows = [[*([3] * 640), *rng.integers(0, 9, 6).tolist()] for _ in range(300)]
    assert_sorted(rows)
    tokens = sum(map(len, rows))
    # Two rows a comparison; then the rounds that tell the tails apart, of a block each.
    assert sum(compared_tokens) < 2 * tokens + 2 * 12 * 300 * row_sort.BLOCK_TOKENS


def test_memory_is_bytes_per_row_whatever_their_length(monkeypatch):
    monkeypatch.setattr(row_sort, "BATCH_ROWS", 256)
    peaks = []
    for length in (64, 512):
        tokens = np.zeros((4000, length), np.int32)
        tokens[:, -1] = np.random.default_rng(0).permutation(4000)
        begin = np.arange(4000, dtype=np.int64) * length
        tracemalloc.start()
        sort_rows(tokens.ravel(), begin, np.full(4000, length, np.int32))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(peaks) < 4000 * 150 + (1 << 20)
    assert peaks[1] < peaks[0] * 1.1


def test_a_negative_id_at_which_rows_part_is_refused():
    with pytest.raises(ValueError, match="negative: -7"):
        sort_rows(*columns([[1, -7], [1, 2]]))
