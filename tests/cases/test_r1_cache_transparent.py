"""Sharing, batching and chunking change no token: rows of "the the the ..." at page and chunk boundaries (case R1).

The runs of few rows at a time take long, so by default they stop after a few tokens: a greedy output's beginning does not
depend on where it ends. The `slow` test has the full length.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

LENGTHS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
MAX_TOKENS = 24
SHARED = {"dedupe": False, "order": "given"}
DISTINCT_TOKENS = max(LENGTHS) + 2 * len(LENGTHS)


def repeated(n: int) -> str:
    """A text of exactly n tokens for the embedded model: [1195, 260, 260, ...]."""
    return "the" + " the" * (n - 1)


def shuffled_rows() -> list[tuple[int, str]]:
    """(tokens, text) of the 65 rows."""
    rows = []
    for n in LENGTHS:
        rows += [(n, repeated(n))] * 3 + [(n + 1, f"{repeated(n)} cat"), (n + 1, f"{repeated(n)} dog")]
    random.Random(0).shuffle(rows)
    return rows


ROWS = shuffled_rows()
Run = Callable[..., Any]


@pytest.fixture
def run(run_job: Callable[..., Any], embedded_model: Path) -> Run:
    def run_rows(**options: Any) -> Any:
        table = pa.table({"prompt": [text for _, text in ROWS]})
        outcome = run_job(table, model=embedded_model, **{"max_tokens": MAX_TOKENS, "chunk_tokens": 64, **options})
        assert len(outcome.rows) == 65
        assert outcome.column("prompt_tokens") == [n for n, _ in ROWS]
        return outcome

    return run_rows


def check_cached_tokens(outcome: Any) -> None:
    """Every distinct prompt token was computed once, and counts as computed for one row."""
    assert outcome.summary["computed_prompt_tokens"] == DISTINCT_TOKENS
    cached = outcome.column("cached_tokens")
    assert sum(n - count for (n, _), count in zip(ROWS, cached, strict=True)) == DISTINCT_TOKENS


def test_ids_are_those_without_a_cache(run: Run) -> None:
    alone = run(prefix_cache=False, max_running=65)
    assert alone.column("cached_tokens") == [0] * 65
    assert alone.summary["computed_prompt_tokens"] == sum(n for n, _ in ROWS)
    assert {len(ids) for ids in alone.ids} == {MAX_TOKENS}
    # In each of these a fault of the cache shows: rows are many or one at a time, chunks cut the prompts or do not.
    for running, chunk, max_tokens in ((65, 64, MAX_TOKENS), (65, 16, 6), (4, 16, 4), (1, 64, 2), (1, 16, 1)):
        shared = run(**SHARED, max_running=running, chunk_tokens=chunk, max_tokens=max_tokens)
        assert shared.ids == [ids[:max_tokens] for ids in alone.ids], f"{running} running, chunks of {chunk}"
        check_cached_tokens(shared)
    planned = run(chunk_tokens=None)
    assert planned.ids == alone.ids
    assert planned.summary["computed_prompt_tokens"] == planned.summary["trie_tokens"] == DISTINCT_TOKENS
    first = {text: row for row, (_, text) in reversed(list(enumerate(ROWS)))}
    for row, (n, text) in enumerate(ROWS):
        if first[text] != row:
            assert planned.rows[row]["cached_tokens"] == n
        else:
            # Its last token is the row's own, unless a longer row was first to need it or did so in the same step.
            assert planned.rows[row]["cached_tokens"] <= (n if text.endswith("the") else n - 1)


@pytest.mark.slow
def test_ids_are_those_without_a_cache_at_full_length_with_few_rows_at_a_time(run: Run) -> None:
    alone = run(prefix_cache=False, max_running=65)
    for running in (1, 4, 65):
        for chunk in (16, 64):
            shared = run(**SHARED, max_running=running, chunk_tokens=chunk)
            assert shared.ids == alone.ids, f"{running} running, chunks of {chunk}"
