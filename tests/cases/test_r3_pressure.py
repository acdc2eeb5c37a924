"""Eviction and preemption change no token and end (case R3)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

WORDS = ("the", "of", "and", "to")


@pytest.fixture
def table() -> pa.Table:
    """4 prefixes of 200 tokens x 10 rows, interleaved 1-2-3-4-1-2-..."""
    return pa.table({"prompt": [f"{word}{f' {word}' * 199} {i}" for i in range(10) for word in WORDS]})


# In 20 tokens a row outgrows its first page, which is when rows are preempted; 64 tokens take a minute and a half.
@pytest.mark.parametrize("max_tokens", [20, pytest.param(64, marks=pytest.mark.slow)])
def test_small_pool_gives_the_outputs_of_a_large_one(
    run_job: Callable[..., Any], embedded_model: Path, table: pa.Table, max_tokens: int
) -> None:
    def run(kv_tokens: int, **options: Any) -> Any:
        engine = {"check_integrity": True, **options.pop("engine", {})}
        given = {"max_tokens": max_tokens, "ignore_eos": True, "kv_tokens": kv_tokens, "engine": engine}
        return run_job(table, model=embedded_model, **given, **options)

    given = {"order": "given", "dedupe": False, "max_running": 16, "engine": {"reserve_output": False}}
    small, large, planned = run(1024, **given), run(100_000, **given), run(1024)
    assert {len(ids) for ids in large.ids} == {max_tokens}
    assert small.ids == large.ids
    assert planned.ids == large.ids
    assert small.summary["evictions"] > 0
    assert small.summary["preemptions"] > 0
    assert small.summary["steps"] <= 20 * large.summary["steps"]
    for outcome in (large, planned):
        assert outcome.summary["evictions"] == outcome.summary["preemptions"] == 0
        assert outcome.summary["computed_prompt_tokens"] == outcome.summary["trie_tokens"] == planned.plan.trie.trie_tokens
    for outcome in (small, large, planned):
        pool = outcome.scheduler.pool
        assert pool.used_pages == 0
        assert pool.num_pages * pool.page_size == outcome.summary["kv_pool_tokens"]
        assert list(outcome.scheduler.tree.resident_nodes()) == []
        summary = outcome.summary
        assert summary["computed_prompt_tokens"] - summary["recomputed_tokens"] == summary["trie_tokens"]
    assert small.summary["peak_kv_tokens"] <= small.summary["kv_pool_tokens"] == 1024
