"""The output's schema is the same whatever the rows did, so that outputs can be read together (case R12)."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from batchrun.engine import engine as engine_module
from batchrun.errors import Refused

NOTHING = pa.table({"prompt": pa.array([], pa.string())})


def test_outputs_of_good_bad_and_no_rows_are_one_data_set(
    run_job: Callable[..., Any], tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run [v2]"
    folder.mkdir()
    good = pa.table({"prompt": ["the cat", "the dog", "the hat"]})
    bad = pa.table({"prompt": pa.array([None, ""], pa.string())})
    outcomes = {
        name: run_job(table, model=tiny_model_folder, max_tokens=3, output=folder / f"{name}.parquet")
        for name, table in (("good", good), ("bad", bad), ("none", NOTHING))
    }
    assert [(o.exit_code, len(o.rows)) for o in outcomes.values()] == [(0, 3), (1, 2), (0, 0)]

    # The only error comes with the last flush, when parts without one are long on the disk.
    sample = engine_module.Sampler.sample

    def fail_last(self: Any, logits: Any, rows: Any) -> list[int | None]:
        tokens = sample(self, logits, rows)
        return [None if row.row_index == 2 and row.position == 2 else token for row, token in zip(rows, tokens, strict=True)]

    monkeypatch.setattr(engine_module.Sampler, "sample", fail_last)
    late = run_job(
        good, model=tiny_model_folder, max_tokens=3, output=folder / "late.parquet", max_running=1, order="given",
        flush_seconds=1e-9, ignore_eos=True,
    )  # fmt: skip
    assert [row["error"] is None for row in late.rows] == [True, True, False]

    schemas = [pq.read_schema(path) for path in sorted(folder.glob("*.parquet"))]
    assert len(schemas) == 4
    for schema in schemas:
        assert schema.equals(schemas[0], check_metadata=False)
    kinds = {name: schemas[0].field(name).type for name in schemas[0].names}
    assert kinds["error"] == kinds["finish_reason"] == pa.string()
    assert kinds["output_tokens"] == kinds["prompt_tokens"] == kinds["cached_tokens"] == pa.int64()
    assert kinds["ttft_ms"] == pa.float64()
    assert kinds["started_at"] == pa.timestamp("us", "UTC")
    assert ds.dataset([str(path) for path in sorted(folder.glob("*.parquet"))]).to_table().num_rows == 8

    question = "select typeof(sum(output_tokens)) as kind, count(*) as num, count(error) as bad, min(started_at) as began, "
    question += "count(distinct date_trunc('day', started_at)) as num_days from rows"
    answers = []
    for zone in ("UTC", "America/New_York"):
        command = [sys.executable, "-m", "batchrun", "sql", str(folder), question, "--format", "csv"]
        shown = subprocess.run(command, check=True, capture_output=True, timeout=120, text=True, env={**os.environ, "TZ": zone})
        answers.append(shown.stdout)
    assert answers[0] == answers[1]
    header, line = answers[0].splitlines()
    assert header == "kind,num,bad,began,num_days"
    assert line.split(",")[1:3] == ["8", "3"]
    # DuckDB's sum of BIGINT is HUGEINT; what leaves the command is cast back.
    table = query_parquet(folder, "select sum(output_tokens) as total from rows", tmp_path / "sum.parquet")
    assert table.schema.field("total").type == pa.int64()


def query_parquet(output: Path, sql: str, target: Path) -> pa.Table:
    command = [sys.executable, "-m", "batchrun", "sql", str(output), sql, "-o", str(target)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return pq.read_table(target)


def test_an_input_column_of_an_added_name_is_refused(
    run_job: Callable[..., Any], tiny_model_folder: Path, tmp_path: Path
) -> None:
    table = pa.table({"prompt": ["a"], "error": ["b"]})
    with pytest.raises(Refused, match=r"'error'.*--output-prefix"):
        run_job(table, model=tiny_model_folder, output=tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()
    assert not (tmp_path / "out.parquet.batchrun").exists()


def test_a_hundred_thousand_rows_end_in_few_row_groups(run_job: Callable[..., Any], tiny_model_folder: Path) -> None:
    prompts = pa.array(["the cat", "the dog"] * 50_000)
    outcome = run_job(pa.table({"prompt": prompts}), model=tiny_model_folder, max_tokens=1)
    assert len(outcome.rows) == 100_000
    assert outcome.column("row_index") == list(range(100_000))
    assert pq.read_metadata(outcome.output).num_row_groups < 50
