"""The whole-file trie against the set of all prefixes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchrun.prefix_cache import row_sort
from batchrun.prefix_cache.trie import build_trie

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=25)


def columns(rows):
    """tokens, begin, length of the rows, in reverse order in memory and with a gap, so that begin matters."""
    tokens, begin = [7], []
    for row in reversed(rows):
        begin.append(len(tokens))
        tokens += [*row, 7]
    begin.reverse()
    return np.array(tokens, np.int32), np.array(begin, np.int64), np.array([len(row) for row in rows], np.int32)


def assert_is_trie_of(trie, rows):
    """Every documented property of the arrays, from the rows alone."""
    assert trie.parent.dtype == trie.start.dtype == trie.end.dtype == trie.row_node.dtype == np.int32
    assert trie.row_lo.dtype == trie.row_hi.dtype == trie.sorted_rows.dtype == np.int64
    assert trie.sorted_rows.tolist() == sorted(range(len(rows)), key=lambda row: (rows[row], row))
    assert trie.trie_tokens == len({tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)})
    assert (trie.parent[0], trie.start[0], trie.end[0], trie.row_lo[0], trie.row_hi[0]) == (-1, 0, 0, 0, len(rows))
    assert (trie.end[1:] > trie.start[1:]).all()
    # A node is where a row ends or two rows part, and nothing else.
    branching = {
        tuple(row[:end])
        for row in rows
        for end in range(1, len(row) + 1)
        if row[:end] in rows or len({other[end] for other in rows if other[:end] == row[:end] and len(other) > end}) > 1
    }
    assert trie.num_nodes == len(branching) + 1
    stack = [0]
    for node in range(1, trie.num_nodes):  # preorder: the parent is on the path of the node before
        while stack[-1] != trie.parent[node]:
            stack.pop()
        stack.append(node)
        assert trie.start[node] == trie.end[trie.parent[node]]
    for index, row in enumerate(rows):
        path = trie.path(index)
        assert [trie.start[path[0]], trie.end[path[-1]], path[-1]] == [0, len(row), trie.row_node[index]]
        for node in path:
            beneath = [other for other, ids in enumerate(rows) if ids[: trie.end[node]] == row[: trie.end[node]]]
            assert sorted(trie.sorted_rows[trie.row_lo[node] : trie.row_hi[node]]) == beneath


@pytest.mark.parametrize("block_tokens", [1, 2, 3, 64])
def test_trie_holds_each_prefix_once_and_rows_as_intervals(block_tokens, monkeypatch):
    monkeypatch.setattr(row_sort, "BLOCK_TOKENS", block_tokens)
    monkeypatch.setattr(row_sort, "BATCH_ROWS", 4)

    @settings(max_examples=60, deadline=None)
    @given(ROWS)
    def check(rows):
        assert_is_trie_of(build_trie(*columns(rows)), rows)

    check()


def test_prompts_that_part_after_several_blocks_with_large_ids():
    rng = np.random.default_rng(5)
    common = rng.integers(0, 2**31 - 2, 200).tolist()
    rows = [[*common[:cut], 2**31 - 2 - row] for row, cut in enumerate([200, 200, 64, 63, 128, 130, 0])]
    rows += [common[:128], common[:64], common, common]
    assert_is_trie_of(build_trie(*columns(rows)), rows)


def test_ids_sort_as_numbers_not_as_little_endian_bytes():
    assert build_trie(*columns([[256], [1], [65536], [255]])).sorted_rows.tolist() == [1, 3, 0, 2]


def test_largest_id_is_told_from_the_end_of_a_row():
    rows = [[5, 2**31 - 1], [5], [5, 0]]
    assert_is_trie_of(build_trie(*columns(rows)), rows)


def test_equal_rows_end_at_the_same_node():
    trie = build_trie(*columns([[1, 2], [3], [1, 2]]))
    assert trie.row_node[0] == trie.row_node[2] != trie.row_node[1]


def test_unshared_trie_has_a_node_per_row():
    rows = [[1, 2], [1, 2], [1, 2, 3]]
    trie = build_trie(*columns(rows), shared=False)
    assert trie.trie_tokens == 7
    assert [trie.path(row) for row in range(3)] == [[1], [2], [3]]
    assert trie.parent.tolist() == [-1, 0, 0, 0]
    assert trie.sorted_rows.tolist() == [0, 1, 2]
    assert list(zip(trie.row_lo.tolist(), trie.row_hi.tolist(), strict=True)) == [(0, 3), (0, 1), (1, 2), (2, 3)]


@settings(max_examples=80, deadline=None)
@given(ROWS, st.randoms(use_true_random=False))
def test_rows_alone_share_no_node_and_the_others_have_their_own_trie(rows, draw):
    alone = np.array([draw.random() < 0.4 for _ in rows], bool)
    others = np.flatnonzero(~alone).tolist()
    trie, shared = build_trie(*columns(rows), alone=alone), build_trie(*columns([rows[row] for row in others]))
    assert trie.num_nodes == shared.num_nodes + alone.sum()
    for local, row in enumerate(others):
        path, expected = trie.path(row), shared.path(local)
        assert [(trie.start[node], trie.end[node]) for node in path] == [
            (shared.start[node], shared.end[node]) for node in expected
        ]
        beneath = [trie.sorted_rows[trie.row_lo[node] : trie.row_hi[node]].tolist() for node in path]
        assert beneath == [
            [others[at] for at in shared.sorted_rows[shared.row_lo[node] : shared.row_hi[node]]] for node in expected
        ]
    for row in np.flatnonzero(alone).tolist():
        (node,) = trie.path(row)
        assert (trie.start[node], trie.end[node]) == (0, len(rows[row]))
        assert trie.sorted_rows[trie.row_lo[node] : trie.row_hi[node]].tolist() == [row]
    assert sorted(trie.sorted_rows.tolist()) == list(range(len(rows)))


def test_file_without_rows_has_only_a_root():
    for shared in (True, False):
        trie = build_trie(*columns([]), shared=shared)
        assert (trie.num_nodes, trie.num_rows, trie.trie_tokens) == (1, 0, 0)


def test_empty_row_and_negative_id_are_refused():
    with pytest.raises(ValueError, match="row 1 has no tokens"):
        build_trie(np.array([1], np.int32), np.array([0, 1]), np.array([1, 0], np.int32))
    with pytest.raises(ValueError, match="negative: -1"):
        build_trie(*columns([[1, -1], [1, 2]]))


def test_path_sums_add_up_from_the_root():
    trie = build_trie(*columns([[1, 2, 3], [1, 2], [1, 4]]))
    assert trie.path_sums((trie.end - trie.start).astype(np.int64)).tolist() == trie.end.tolist()


@settings(max_examples=80, deadline=None)
@given(ROWS.filter(bool), st.randoms(use_true_random=False))
def test_per_node_figures_by_brute_force(rows, draw):
    trie = build_trie(*columns(rows))
    value = np.array([draw.randint(-9, 9) for _ in rows])
    of_node = np.array([draw.randint(-(2**40), 2**40) for _ in range(trie.num_nodes)], np.int64)
    paths = [[0, *trie.path(row)] for row in range(len(rows))]
    for node in range(trie.num_nodes):
        beneath = [row for row, path in enumerate(paths) if node in path]
        assert trie.over_rows(np.minimum, value)[node] == value[beneath].min()
        assert trie.over_rows(np.maximum, value)[node] == value[beneath].max()
        path = paths[beneath[0]]
        assert trie.path_sums(of_node)[node] == of_node[path[: path.index(node) + 1]].sum()
        below = {other for row in beneath for other in paths[row][paths[row].index(node) :]}
        assert set(range(node, trie.subtree_end[node])) == below


@settings(max_examples=80, deadline=None)
@given(ROWS, st.randoms(use_true_random=False))
def test_without_some_duplicates_it_is_the_trie_of_the_other_rows(rows, draw):
    kept = [rows.index(row) == place or draw.random() < 0.5 for place, row in enumerate(rows)]
    trie = build_trie(*columns(rows)).keep_rows(np.array(kept, bool))
    expected = build_trie(*columns([row for row, keep in zip(rows, kept, strict=True) if keep]))
    for name in ("parent", "start", "end", "row_lo", "row_hi", "sorted_rows", "row_node"):
        got, wanted = getattr(trie, name), getattr(expected, name)
        assert got.dtype == wanted.dtype
        assert got.tolist() == wanted.tolist()
