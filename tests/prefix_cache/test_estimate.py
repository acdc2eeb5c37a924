"""Savings, pages and the roofline, each against arithmetic done by hand or by brute force."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchrun.prefix_cache.estimate import (
    ModelDims,
    estimate_time,
    largest_path,
    pages_for_path,
    prefill_flop,
    prefill_summary,
    shared_nodes,
)
from batchrun.prefix_cache.trie import build_trie

DIMS = ModelDims(num_layers=2, num_heads=3, head_dim=4, linear_parameters=1000, weight_bytes=2000, kv_bytes_per_token=10)


def trie_of(rows, shared=True):
    length = np.array([len(row) for row in rows], np.int32)
    tokens = np.array([token for row in rows for token in row], np.int32)
    return build_trie(tokens, np.cumsum(length, dtype=np.int64) - length, length, shared)


def test_prefill_summary_counts_distinct_tokens():
    trie = trie_of([[1, 2, 3], [1, 2, 4], [1, 2, 3]])
    assert prefill_summary(trie, np.array([3, 3, 3], np.int32)) == (9, 4, pytest.approx(5 / 9))
    assert prefill_summary(trie_of([]), np.empty(0, np.int32)) == (0, 0, 0.0)


def test_shared_nodes_by_tokens_saved_and_by_depth():
    rows = [[1] * 10 + [2, 3], [1] * 10 + [2, 4], [1] * 10 + [5], [6], [6]]
    trie = trie_of(rows)
    biggest = shared_nodes(trie, 5)
    assert [(node.depth, node.tokens, node.num_rows, node.tokens_saved) for node in biggest] == [
        (10, 10, 3, 20),
        (11, 1, 2, 1),
        (1, 1, 2, 1),
    ]
    assert [rows[node.sample_row][: node.depth] for node in biggest] == [[1] * 10, [1] * 10 + [2], [6]]
    assert [trie.path(node.sample_row).count(node.node) for node in biggest] == [1, 1, 1]
    assert [node.depth for node in shared_nodes(trie, 2, by="depth")] == [11, 10]
    assert shared_nodes(trie_of([[1], [2]]), 5) == []


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=12), st.integers(1, 4))
def test_pages_round_each_node_of_the_path_up(rows, page_size):
    trie = trie_of(rows)
    pages = [sum(int(np.ceil((trie.end[n] - trie.start[n]) / page_size)) for n in trie.path(row)) for row in range(len(rows))]
    assert pages_for_path(trie, page_size).tolist() == pages
    assert largest_path(trie, page_size) == (pages.index(max(pages)), max(pages))


def test_prefill_flop_grows_with_the_tokens_before():
    # 2 P n + 4 layers heads head_dim n (c + n / 2)
    trie = trie_of([[1, 2, 3, 4], [1, 2]])
    assert prefill_flop(DIMS, trie).tolist() == [0, 2000 * 2 + 96 * 2 * 1, 2000 * 2 + 96 * 2 * (2 + 1)]


def estimate(rows, outputs, shared=True, **options):
    arguments = {"rows_at_once": 100, "flop_per_s": 1e3, "bytes_per_s": 1e2, **options}
    return estimate_time(DIMS, trie_of(rows, shared), np.array(outputs, np.float64), **arguments)


def test_one_row_reads_weights_and_keys_each_step():
    time = estimate([[1, 2, 3, 4]], [5])
    assert time.prefill_flop == 2000 * 4 + 96 * 4 * 2
    assert time.prefill_s == pytest.approx(8.768)
    assert time.ttft_s == pytest.approx(20)  # reading the weights takes longer
    assert time.decode_steps == 4
    step = 2000 / 1e2 + (4 + 2) * 10 / 1e2  # 4 prompt keys, 0 to 4 of its own
    assert time.tpot_s == pytest.approx(step)
    assert time.decode_s == pytest.approx(4 * step)
    assert time.total_s == pytest.approx(20 + 4 * step)


def test_rows_that_share_a_prompt_read_its_keys_once():
    shared, apart = estimate([[1, 2, 3, 4]] * 2, [5, 5]), estimate([[1, 2, 3, 4]] * 2, [5, 5], shared=False)
    assert apart.prefill_s == 2 * shared.prefill_s
    assert apart.decode_s - shared.decode_s == pytest.approx(4 * 4 * 10 / 1e2)


def test_compute_bounds_the_step_when_many_rows_decode():
    time = estimate([[1]] * 50, [2] * 50)
    assert time.decode_steps == 1
    assert time.decode_s == pytest.approx(50 * 2000 / 1e3 + (1 + 50 * 0.5) * 10 / 1e2)


def test_fewer_rows_at_once_take_more_steps_and_prefill_beside_them():
    rows = [[row, 9] for row in range(8)]
    time = estimate(rows, [11] * 8, rows_at_once=2)
    assert time.decode_steps == 40
    assert time.tpot_s == pytest.approx(time.decode_s / 40 + time.prefill_s * 0.75 / 40)


def test_samples_decode_apart_and_share_the_prompt():
    one, many = estimate([[1, 2]], [3]), estimate([[1, 2]], [3], samples=np.array([6], np.int64))
    assert many.prefill_flop == one.prefill_flop
    assert many.decode_steps == one.decode_steps == 2
    assert many.decode_s - one.decode_s == pytest.approx(2 * 5 * 10 / 1e2)  # 5 more own keys, 1 on average


def test_longest_output_bounds_the_steps():
    assert estimate([[1], [2]], [100, 2]).decode_steps == 99


def test_outputs_of_one_token_need_no_decode_step():
    time = estimate([[1, 2, 3, 4]], [1])
    assert (time.decode_steps, time.decode_s, time.tpot_s) == (0, 0.0, 0.0)
    assert time.total_s == time.ttft_s == pytest.approx(20)


def test_first_row_waits_for_its_own_path_only():
    rows = [[1] * 40, [1, 2]]
    assert estimate(rows, [2, 2], first_row=1).ttft_s == 20
    assert estimate(rows, [2, 2], first_row=0).ttft_s == pytest.approx((2000 * 40 + 96 * 40 * 20) / 1e3)
