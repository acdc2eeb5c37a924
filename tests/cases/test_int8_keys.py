"""Keys and values in int8, in each way to share and cut the work: 60 rows of a tiny model whose logits lie far apart.

bfloat16 promises no equal tokens: sums round differently where keys are cut differently, and a row that tips once goes on
elsewhere. So most first tokens are those of float32, and two ways agree over most of each answer, as in bfloat16 without int8;
where a key, a value or a scale is another token's, neither holds.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

WAYS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no prefix cache": {"prefix_cache": False},
    "given order": {"order": "given", "dedupe": False},
    "chunks of 1": {"chunk_tokens": 1},
    "chunks of 16": {"chunk_tokens": 16},
    "1 running": {"max_running": 1},
    "2 threads": {"threads": 2},
    "small pool": {"kv_tokens": 256},
    "preempted": {
        **{"order": "given", "kv_tokens": 256, "max_running": 12},
        "engine": {"reserve_output": False, "check_integrity": True},
    },
}


def prompts() -> list[str]:
    """Interleaved groups, prefixes of two levels, duplicates."""
    texts = []
    for i in range(60):
        group, half = i % 5, i % 2
        texts.append(f"user{' the cat' * (12 + 5 * group)} of group {group}{' and the dog' * 3 * half} is {i % 53}")
    return texts


def agreement(ids: list[list[int]], others: list[list[int]]) -> float:
    """The share of tokens before the first that differs."""
    same = 0
    for row, other in zip(ids, others, strict=True):
        length = min(len(row), len(other))
        same += next((i for i in range(length) if row[i] != other[i]), length)
    return same / sum(map(len, ids))


@pytest.fixture
def run(run_job: Callable[..., Any], tiny_model_folder: Path, compiled_kernel: object) -> Callable[..., Any]:
    def run_prompts(**options: Any) -> Any:
        given = {"max_tokens": 24, "dtype": "bfloat16", "kv_dtype": "int8", **options}
        return run_job(pa.table({"prompt": prompts()}), model=tiny_model_folder, **given)

    return run_prompts


def test_every_way_to_compute_gives_about_the_same_answers(run: Callable[..., Any]) -> None:
    exact = run(dtype="float32", kv_dtype="auto")
    usual = run()
    for name, options in WAYS.items():
        found = run(**options)
        assert sum(row[:1] == other[:1] for row, other in zip(found.ids, exact.ids, strict=True)) >= 52, name
        assert agreement(found.ids, usual.ids) >= 0.6, name
        assert (found.summary["preemptions"] > 0) == (name == "preempted"), name
    assert run(**WAYS["given order"]).ids == run(**WAYS["given order"]).ids
    assert run(kv_dtype="auto").ids != usual.ids
