"""Duplicates are rows of equal tokens and equal group, whatever their hashes say."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchrun.prefix_cache import dedupe
from batchrun.prefix_cache.dedupe import find_duplicates

ROWS = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=3), st.integers(0, 1), st.sampled_from([True, True, False])),
    max_size=20,
)


def duplicates_of(items):
    length = np.array([len(row) for row, _, _ in items], np.int32)
    return find_duplicates(
        np.array([token for row, _, _ in items for token in row], np.int32),
        np.cumsum(length, dtype=np.int64) - length,
        length,
        np.array([group for _, group, _ in items], np.int64),
        np.array([candidate for _, _, candidate in items], bool),
    )


def first_equal(items):
    firsts = {}
    return [
        firsts.setdefault((tuple(row), group), index) if candidate else index
        for index, (row, group, candidate) in enumerate(items)
    ]


@pytest.mark.parametrize("hashing", ["xxhash", "every hash collides"])
def test_each_row_is_represented_by_the_first_equal_candidate(hashing, monkeypatch):
    if hashing != "xxhash":
        monkeypatch.setattr(dedupe, "_hash", lambda ids: 1)

    @settings(max_examples=80, deadline=None)
    @given(ROWS)
    def check(items):
        representative = duplicates_of(items)
        assert representative.dtype == np.int64
        assert representative.tolist() == first_equal(items)

    check()


def test_hash_tells_rows_apart_so_that_tokens_are_seldom_compared():
    assert len({dedupe._hash(np.array(ids, np.int32)) for ids in ([1, 2], [2, 1], [1], [1, 2, 0])}) == 4


def test_strided_tokens_are_hashed_by_value():
    tokens = np.array([4, 0, 5, 0, 4, 0, 5, 0], np.int32)[::2]
    everyone = np.array([True, True])
    assert find_duplicates(tokens, np.array([0, 2]), np.array([2, 2], np.int32), np.zeros(2, np.int64), everyone).tolist() == [
        0,
        0,
    ]
