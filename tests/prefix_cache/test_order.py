"""The order of the rows: depth first, longest expected output first, each prefix computed once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchrun.engine.kv_pool import KVPool
from batchrun.prefix_cache.estimate import largest_path
from batchrun.prefix_cache.order import order_rows
from batchrun.prefix_cache.radix import RadixTree
from batchrun.prefix_cache.trie import build_trie

ROWS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.sampled_from([1.0, 2.0, 16.0])), min_size=1, max_size=25
)


def trie_of(rows):
    length = np.array([len(row) for row in rows], np.int32)
    tokens = np.array([token for row in rows for token in row], np.int32)
    return build_trie(tokens, np.cumsum(length, dtype=np.int64) - length, length)


def planned(items):
    trie = trie_of([row for row, _ in items])
    return trie, order_rows(trie, np.array([expected for _, expected in items]), "plan")


def computed_tokens(trie, order, num_pages):
    """Replay: one row at a time in order, with a pool of pages of two tokens."""
    tree = RadixTree(trie, order, KVPool(num_pages, 2))
    computed = 0
    for row in order.rows.tolist():
        path = tree.path(row)
        tree.lock(path)
        assert tree.make_room(tree.missing_pages(path)) is not None
        tree.allocate(path)
        tree.row_started(row)
        for node in path:
            computed += node.length - node.computed
            node.computed = node.high_water = node.length
        tree.row_finished(row)
        tree.release(path)
        tree.check_integrity()
    assert not list(tree.resident_nodes())
    return computed


@settings(max_examples=80, deadline=None)
@given(ROWS)
def test_rows_are_a_permutation_and_side_by_side_under_every_node(items):
    trie, order = planned(items)
    assert sorted(order.rows.tolist()) == list(range(len(items)))
    assert (order.position[order.rows] == np.arange(len(items))).all()
    for node in range(trie.num_nodes):
        positions = order.position[trie.sorted_rows[trie.row_lo[node] : trie.row_hi[node]]]
        assert positions.max() - positions.min() + 1 == len(positions)


@settings(max_examples=80, deadline=None)
@given(ROWS)
def test_rank_is_the_preorder_of_first_visits(items):
    trie, order = planned(items)
    first_visits = dict.fromkeys(node for row in order.rows.tolist() for node in [0, *trie.path(row)])
    assert sorted(range(trie.num_nodes), key=order.node_rank.__getitem__) == list(first_visits)
    assert sorted(order.node_rank.tolist()) == list(range(trie.num_nodes))


@settings(max_examples=80, deadline=None)
@given(ROWS)
def test_siblings_go_by_longest_output_and_own_rows_come_first(items):
    trie, order = planned(items)
    for node in range(trie.num_nodes):
        own = [row for row in order.rows.tolist() if trie.row_node[row] == node]
        assert own == sorted(own, key=lambda row: (-items[row][1], row))
        beneath = {
            child: order.rows[np.isin(order.rows, trie.sorted_rows[trie.row_lo[child] : trie.row_hi[child]])].tolist()
            for child in np.flatnonzero(trie.parent == node).tolist()
        }
        children = sorted(beneath, key=lambda child: order.position[beneath[child][0]])
        assert children == sorted(beneath, key=lambda child: (-max(items[row][1] for row in beneath[child]), min(beneath[child])))
        if own and children:
            assert order.position[own[-1]] < order.position[beneath[children[0]][0]]


@settings(max_examples=80, deadline=None)
@given(ROWS)
def test_planned_order_computes_each_prefix_once_with_a_pool_for_the_longest_row(items):
    trie, order = planned(items)
    assert computed_tokens(trie, order, largest_path(trie, 2).pages) == trie.trie_tokens


def test_given_order_computes_more_in_the_same_pool():
    rows = [[0, 0, 1, 1], [2, 2, 1, 1], [0, 0, 3, 3], [2, 2, 3, 3]]
    trie = trie_of(rows)
    expected = np.ones(4)
    assert computed_tokens(trie, order_rows(trie, expected, "plan"), 2) == trie.trie_tokens == 12
    assert computed_tokens(trie, order_rows(trie, expected, "given"), 2) == 16


def test_given_order_is_the_files_and_its_ranks_are_the_trees():
    trie = trie_of([[1, 2], [5], [1, 3]])
    expected = np.array([1.0, 9.0, 2.0])
    order = order_rows(trie, expected, "given")
    assert order.rows.tolist() == order.position.tolist() == [0, 1, 2]
    assert order.node_rank.tolist() == order_rows(trie, expected, "plan").node_rank.tolist() == [0, 2, 4, 3, 1]


def test_plan_of_equal_expectations_keeps_first_appearance():
    assert planned([(ids, 4.0) for ids in ([9], [1, 1], [5], [1, 0])])[1].rows.tolist() == [0, 1, 3, 2]


@pytest.mark.parametrize("order", ["plan", "given"])
def test_no_rows_have_an_order(order):
    assert order_rows(trie_of([]), np.empty(0), order).rows.tolist() == []
