"""A seeded row draws the same tokens in any company, order and process (case R10)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

PROMPT = "Once upon a time there was"
TOKENS = 32
Run = Callable[..., Any]


def table(rows: list[tuple[str, dict[str, Any]]]) -> pa.Table:
    """Prompts with settings of their own."""
    types = {"temperature": pa.float64(), "seed": pa.int64(), "n": pa.int64(), "max_tokens": pa.int64()}
    types["repetition_penalty"] = pa.float64()
    columns = {name: pa.array([settings.get(name) for _, settings in rows], kind) for name, kind in types.items()}
    return pa.table({"prompt": [prompt for prompt, _ in rows], **columns})


@pytest.fixture
def run(run_job: Callable[..., Any], embedded_model: Path) -> Run:
    def run_rows(rows: list[tuple[str, dict[str, Any]]], **options: Any) -> Any:
        return run_job(table(rows), model=embedded_model, ignore_eos=True, **{"max_tokens": TOKENS, **options})

    return run_rows


SEEDED = (PROMPT, {"temperature": 0.8, "seed": 42})
UNSEEDED = [(f"Number {i} is", {"temperature": 0.8}) for i in range(14)] + [(PROMPT, {"temperature": 0.8})]
OTHER_SEEDS = [(f"Number {i} is", {"temperature": 0.8, "seed": i}) for i in range(14)]
OTHER_SEEDS += [(PROMPT, {"temperature": 0.8, "seed": 43})]


@pytest.fixture(scope="module")
def computed_once() -> dict[str, list[int]]:
    return {}


@pytest.fixture
def alone(run: Run, computed_once: dict[str, list[int]]) -> list[int]:
    """The seeded row's ids in a run of its own."""
    if "alone" not in computed_once:
        (computed_once["alone"],) = run([SEEDED]).ids
    assert len(computed_once["alone"]) == TOKENS
    return computed_once["alone"]


def test_seeded_row_in_company_and_in_any_order(run: Run, alone: list[int]) -> None:
    among_unseeded = run([*UNSEEDED[:7], SEEDED, *UNSEEDED[7:]])
    assert among_unseeded.ids[7] == alone
    assert run([*OTHER_SEEDS[:7], SEEDED, *OTHER_SEEDS[7:]]).ids[7] == alone
    backwards = run([*OTHER_SEEDS[:7], SEEDED, *OTHER_SEEDS[7:]][::-1], order="given", dedupe=False)
    assert backwards.ids[8] == alone
    # The same prompt without this seed goes elsewhere, so the comparisons above can fail.
    assert alone not in (among_unseeded.ids[-1], backwards.ids[0])


def test_seeded_row_after_a_preemption(run: Run, alone: list[int]) -> None:
    rows = [*UNSEEDED[:7], SEEDED]
    outcome = run(rows, order="given", kv_tokens=272, engine={"reserve_output": False, "check_integrity": True})
    assert outcome.summary["preemptions"] > 0
    assert outcome.summary["recomputed_output_tokens"] > 0
    assert outcome.ids[7] == alone


def test_seeded_row_after_resume(run: Run, alone: list[int], tmp_path: Path) -> None:
    from batchrun.errors import Stopped

    rows = [*((prompt, {**settings, "max_tokens": 2}) for prompt, settings in UNSEEDED[:3]), SEEDED]
    output = tmp_path / "resumed.parquet"
    options = {"output": output, "flush_seconds": 1e-6, "order": "given", "max_running": 3}

    def first_rows_are_done() -> bool:
        return any((tmp_path / "resumed.parquet.batchrun").glob("part-*.parquet"))

    with pytest.raises(Stopped):
        run(rows, stop=first_rows_are_done, **options)
    outcome = run(rows, resume=True, **options)
    assert outcome.column("run_id") == [0, 0, 0, 1]
    assert outcome.ids[3] == alone


def test_samples_of_one_row_differ_and_can_be_repeated(run: Run, alone: list[int]) -> None:
    four = (PROMPT, {"temperature": 0.8, "seed": 42, "n": 4})
    first, again = run([four]), run([*UNSEEDED[:3], four])
    assert first.column("sample") == [0, 1, 2, 3]
    assert len({row["output"] for row in first.rows}) == 4
    assert again.ids[3:] == first.ids
    assert first.ids[0] == alone


def test_unseeded_identical_rows_differ_and_can_be_repeated(run: Run) -> None:
    rows = [UNSEEDED[-1]] * 2
    first = run(rows, max_tokens=16)
    assert first.ids[0] != first.ids[1]
    assert run(rows, max_tokens=16).ids == first.ids
    assert run(rows, max_tokens=16, seed=1).ids[0] not in first.ids


def test_penalties_of_a_neighbour_change_nothing(run: Run) -> None:
    greedy, penalised = (PROMPT, {}), (PROMPT, {"repetition_penalty": 2.0})
    (expected,) = run([greedy]).ids
    for rows, place in (([greedy, penalised], 0), ([penalised, greedy], 1)):
        outcome = run(rows)
        assert outcome.ids[place] == expected
        assert outcome.ids[1 - place] != expected
