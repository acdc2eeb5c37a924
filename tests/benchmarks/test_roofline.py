"""FLOP and bytes of a workload, against counting each product and each read of a key one by one."""

from itertools import pairwise

import numpy as np
import pytest
import roofline
from hypothesis import given, settings
from hypothesis import strategies as st
from roofline import Rates, Work

from batchrun.engine.config import ModelConfig
from batchrun.prefix_cache.trie import Trie, build_trie

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    num_layers=2,
    hidden_size=6,
    intermediate_size=10,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    vocab_size=11,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    rope_scaling=None,
    max_context=64,
    tie_embeddings=True,
    eos_ids=(),
    bos_id=None,
)
PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=6)


def trie_of(prompts: list[list[int]]) -> Trie:
    length = np.array([len(prompt) for prompt in prompts], np.int32)
    begin = np.append(0, np.cumsum(length)[:-1]).astype(np.int64)
    return build_trie(np.array([token for prompt in prompts for token in prompt], np.int32), begin, length)


def linear_flop(*, head: bool) -> int:
    """One token through every matrix, each written out: a multiplication and an addition for each weight."""
    hidden, q, kv, mlp = 6, 4 * 4, 2 * 4, 10
    matrices = [(hidden, q), (hidden, kv), (hidden, kv), (q, hidden), (hidden, mlp), (hidden, mlp), (mlp, hidden)] * 2
    return 2 * sum(rows * columns for rows, columns in matrices) + 2 * hidden * 11 * head


def attention_flop(keys: int) -> int:
    """In each layer and query head a score and a weighted value of head_dim products for each key."""
    return sum(2 * 4 + 2 * 4 for _layer in range(2) for _head in range(4) for _key in range(keys))


@settings(deadline=None)
@given(PROMPTS)
def test_prefill_flop_is_that_of_every_distinct_prefix(prompts: list[list[int]]) -> None:
    distinct = {tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)}
    expected = sum(linear_flop(head=False) + attention_flop(len(prefix)) for prefix in distinct)
    expected += len({tuple(prompt) for prompt in prompts}) * 2 * 6 * 11
    assert roofline.prefill_work(CONFIG, trie_of(prompts)).flop == expected


@settings(deadline=None)
@given(PROMPTS, st.data())
def test_decode_flop_is_that_of_every_token_that_is_fed(prompts: list[list[int]], data: st.DataObject) -> None:
    lengths, samples = (data.draw(st.lists(st.integers(1, 4), min_size=len(prompts), max_size=len(prompts))) for _ in range(2))
    expected = 0
    for prompt, max_tokens, count in zip(prompts, lengths, samples, strict=True):
        for _ in range(count):
            for fed in range(1, max_tokens):  # the first output token comes out of prefill, the last is not fed
                expected += linear_flop(head=True) + attention_flop(len(prompt) + fed)
    found = roofline.decode_work(CONFIG, trie_of(prompts), np.array(lengths), np.array(samples), max_running=3)
    assert found.flop == expected


def simulated_bytes(prompts: list[list[int]], lengths: list[int], samples: list[int], max_running: int) -> int:
    """Bytes that a schedule reads: sequences in sorted order, up to max_running at once, each distinct prefix position of a
    step once, each sequence's own keys once for itself, the weights once per step."""
    weights = 2 * (linear_flop(head=True) // 2)
    waiting = [
        (tuple(prompt), max_tokens)
        for prompt, max_tokens, count in sorted(zip(prompts, lengths, samples, strict=True))
        for _ in range(count)
        if max_tokens > 1
    ]
    running: list[list] = []
    total = 0
    while waiting or running:
        while waiting and len(running) < max_running:
            running.append([*waiting.pop(0), 0])
        shared = {prompt[:end] for prompt, _, _ in running for end in range(1, len(prompt) + 1)}
        own = sum(done + 1 for _, _, done in running)
        total += weights + (len(shared) + own) * 2 * 2 * 2 * 4 * 2
        running = [[prompt, max_tokens, done + 1] for prompt, max_tokens, done in running if done + 2 < max_tokens]
    return total


@settings(deadline=None)
@given(PROMPTS, st.integers(1, 8), st.data())
def test_no_schedule_reads_fewer_bytes_than_the_floor(prompts: list[list[int]], max_running: int, data: st.DataObject) -> None:
    lengths, samples = (data.draw(st.lists(st.integers(1, 4), min_size=len(prompts), max_size=len(prompts))) for _ in range(2))
    work = roofline.decode_work(CONFIG, trie_of(prompts), np.array(lengths), np.array(samples), max_running)
    assert work.bytes <= simulated_bytes(prompts, lengths, samples, max_running)


def test_the_floor_is_reached_when_all_sequences_decode_side_by_side() -> None:
    prompts, lengths, samples = [[1, 2, 3], [1, 2, 4], [1, 5]], [4, 4, 4], [2, 1, 3]
    work = roofline.decode_work(CONFIG, trie_of(prompts), np.array(lengths), np.array(samples), max_running=6)
    assert work.bytes == simulated_bytes(prompts, lengths, samples, 6)


def test_rows_beneath_one_prefix_read_it_once_for_as_many_as_may_run() -> None:
    trie = trie_of([[1] * 10 + [row] for row in range(2, 10)])
    fed, one = np.full(8, 2), np.ones(8, np.int64)
    read = [roofline.decode_work(CONFIG, trie, fed, one, running).bytes for running in (8, 4, 2, 1)]
    weights, token = 2 * (linear_flop(head=True) // 2), 2 * 2 * 2 * 4 * 2
    assert [after - before for before, after in pairwise(read)] == [(10 * token + weights) * more for more in (1, 2, 4)]


def test_a_phase_takes_the_longer_of_computing_and_reading() -> None:
    rates = Rates(flop_per_s=100.0, bytes_per_s=10.0)
    found = roofline.floor(Work(500.0, 1.0), Work(100.0, 30.0), rates)
    assert (found.prefill_s, found.decode_s, found.floor_s) == pytest.approx((5.0, 3.0, 8.0))
    assert found.decode_bound == "memory"
    assert found.overlapped_s == pytest.approx(6.0)
    assert roofline.floor(Work(500.0, 1.0), Work(400.0, 30.0), rates).decode_bound == "compute"
