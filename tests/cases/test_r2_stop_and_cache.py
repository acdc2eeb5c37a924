"""A stop string leaves nothing in the cache that a later row could trip over (case R2).

The second wave's prompts go on from the first wave's untrimmed answers, so their beginnings were computed before.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.engine.loader import load_tokenizer, resolve_model

QUESTIONS = ("What is the capital of France?", "How many legs has a cat?", "Who wrote Hamlet?")
QUESTIONS += ("What do bees make?", "What is 2 + 2?", "What colour is the sky?")
SHOTS = "Q: What is the capital of Spain?\nA: Madrid.\n\nQ: How many days has a week?\nA: Seven.\n\n"


def table(prompts: list[str], num_stopped: int) -> pa.Table:
    """Rows of which the first ones stop at the next question."""
    stops = [["\nQ:"]] * num_stopped + [[]] * (len(prompts) - num_stopped)
    return pa.table({"prompt": prompts, "stop": pa.array(stops, pa.list_(pa.string()))})


def test_rows_behind_stopped_ones_are_as_without_a_cache(
    run_job: Callable[..., Any], embedded_model: Path, tmp_path: Path
) -> None:
    _, tokenizer = load_tokenizer(resolve_model(str(embedded_model)))

    def run(prompts: list[str], num_stopped: int, **options: Any) -> Any:
        return run_job(table(prompts, num_stopped), model=embedded_model, max_tokens=40, **options)

    first = [f"{SHOTS}Q: {question}\nA:" for question in QUESTIONS]
    answers = run(first, 6)
    assert "stop" in answers.column("finish_reason")
    untrimmed = [tokenizer.decode(ids) for ids in answers.ids]
    assert any("\nQ:" in text for text in untrimmed)
    second = [f"{prompt}{text}\nQ: next\nA:" for prompt, text in zip(first, untrimmed, strict=True)]

    reference = run(second, 0, prefix_cache=False).ids
    both = [*first, *second]
    # 6 at a time in the given order: the second wave starts behind the stopped rows.
    for outcome in (run(both, 6), run(both, 6, order="given", max_running=6, dedupe=False)):
        assert outcome.ids[:6] == answers.ids
        assert outcome.ids[6:] == reference
        assert max(outcome.column("cached_tokens")[6:]) > 0
    pq.write_table(table(second, 0), tmp_path / "second.parquet")
    command = [sys.executable, "-m", "batchrun", "run", "second.parquet", "-o", "fresh.parquet", "--raw", "--dtype", "float32"]
    command += ["--threads", "1", "--max-tokens", "40", "--return-token-ids", "--quiet"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"})
    fresh = pq.read_table(tmp_path / "fresh.parquet")
    assert fresh["output_ids"].to_pylist() == reference
