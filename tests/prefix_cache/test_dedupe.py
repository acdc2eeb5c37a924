"""Duplicates are rows of equal tokens and equal group."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchrun.prefix_cache.dedupe import find_duplicates
from batchrun.prefix_cache.trie import build_trie

ROWS = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=3), st.integers(0, 2), st.sampled_from([True, True, False])),
    max_size=20,
)


def trie_of(rows):
    length = np.array([len(row) for row in rows], np.int32)
    tokens = np.array([token for row in rows for token in row], np.int32)
    return build_trie(tokens, np.cumsum(length, dtype=np.int64) - length, length)


@settings(max_examples=200, deadline=None)
@given(ROWS)
def test_each_row_is_represented_by_the_first_equal_candidate(items):
    representative = find_duplicates(
        trie_of([row for row, _, _ in items]),
        np.array([group for _, group, _ in items], np.int64),
        np.array([candidate for _, _, candidate in items], bool),
    )
    firsts = {}
    assert representative.dtype == np.int64
    assert representative.tolist() == [
        firsts.setdefault((tuple(row), group), index) if candidate else index
        for index, (row, group, candidate) in enumerate(items)
    ]


@pytest.mark.parametrize("groups", [[0, 1], [2**40, 2**40 + 1]])
def test_equal_tokens_of_two_groups_are_two_rows(groups):
    assert find_duplicates(trie_of([[5], [5]]), np.array(groups), np.array([True, True])).tolist() == [0, 1]
