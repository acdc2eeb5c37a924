"""A job in the night: no terminal, a bare environment, logs in files, signals (case R15)."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun import pipeline

BARE = {"LC_ALL": "C"}
"""`env -i LC_ALL=C`: no PATH, no HOME, no locale."""
PATH = "/usr/bin:/bin"
NOT_ASCII = "données/réponses 日本.parquet"


def command(source: Path, output: Path, model: Path, *options: str) -> list[str]:
    arguments = ["run", str(source), "-o", str(output), "--model", str(model), "--raw", "--dtype", "float32"]
    return [sys.executable, "-m", "batchrun", *arguments, *options]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """200 rows, 3 of them bad."""
    prompts: list[str | None] = [f"the naïve cat {i} 日本" for i in range(200)]
    prompts[10] = prompts[190] = None
    prompts[100] = ""
    path = tmp_path / "entrée.parquet"
    pq.write_table(pa.table({"prompt": prompts, "note": [f"café {i} 😀" for i in range(200)]}), path)
    return path


ON_TWO_CPUS = """
import os, sys
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
from batchrun.cli.main import main
code = main(sys.argv[1:])
import torch
with open("threads", "w") as file:
    file.write(str(torch.get_num_threads()))
sys.exit(code)
"""
"""The command as under `taskset -c 0-1`, but on the first two processors that this process may use; notes the compute threads
(the tiny model's matrices are too small to set them to work, so their times would tell nothing)."""


def test_a_job_without_terminal_locale_and_home(source: Path, tiny_model_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / NOT_ASCII
    output.parent.mkdir()
    _, _, _, *given = command(source, output, tiny_model_folder, "--max-tokens", "24", "--ignore-eos", "--summary-json")
    began = time.monotonic()
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        arguments = [sys.executable, "-c", ON_TWO_CPUS, *given]
        process = subprocess.Popen(arguments, env=BARE, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=tmp_path)
        process.wait(timeout=200)
    took = time.monotonic() - began
    assert process.returncode == 1
    lines = (tmp_path / "err").read_text(encoding="utf-8").splitlines()
    assert lines[-1] == "197 ok, 3 failed"
    assert b"\r" not in (tmp_path / "err").read_bytes()
    assert [line.partition(":")[2].partition(":")[0] for line in lines[-3:-1]] == [
        " 2 failed, such as row 10",
        " row 100 failed",
    ]
    progress = [line for line in lines[:-3] if "warning" not in line]
    assert 1 <= len(progress) <= 1 + took / 5.0
    assert int((tmp_path / "threads").read_text()) <= 2

    (line,) = (tmp_path / "out").read_text(encoding="utf-8").splitlines()
    summary = json.loads(line)
    table = pq.read_table(output)
    rows = table.to_pylist()
    assert (summary["rows"], summary["ok"], summary["failed"]) == (200, 197, 3)
    assert summary["output_tokens"] == sum(row["output_tokens"] for row in rows) == 197 * 24
    for row in rows:
        if row["error"] is None:
            assert 0 <= row["queue_ms"] <= row["ttft_ms"] <= row["latency_ms"] <= took * 1e3
            assert row["ttft_ms"] == pytest.approx(row["queue_ms"] + row["prefill_ms"])
        else:
            assert row["queue_ms"] is row["latency_ms"] is None
    assert table.select(["prompt", "note"]).equals(pq.read_table(source))

    question = "select note, output, prompt from rows order by row_index limit 2"
    shown = subprocess.run(
        [sys.executable, "-m", "batchrun", "sql", str(output), question, "--format", "json"],
        env=BARE, capture_output=True, check=True, timeout=120,
    )  # fmt: skip
    expected = [{key: row[key] for key in ("note", "output", "prompt")} for row in rows[:2]]
    assert json.loads(shown.stdout.decode("utf-8")) == expected


def test_quiet_stdout_is_empty_and_sigint_leaves_a_job_that_resumes(
    source: Path, tiny_model_folder: Path, tmp_path: Path, run_job: Callable[..., Any]
) -> None:
    output, work = tmp_path / "stopped.parquet", tmp_path / "stopped.parquet.batchrun"
    options = ["--max-tokens", "200", "--ignore-eos", "--max-running", "2", "--flush-seconds", "1e-9", "--return-token-ids"]
    process = subprocess.Popen(
        command(source, output, tiny_model_folder, *options, "--threads", "1"),
        env=BARE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    end = time.monotonic() + 120
    # The first parts hold the bad rows; more say that rows are being computed.
    while not (work / "parts.jsonl").exists() or (work / "parts.jsonl").read_text().count("\n") < 6:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == b""
    assert err.decode().splitlines()[-1] == "batchrun: stopped by SIGINT; the same command with --resume goes on from here"
    assert b"Traceback" not in err
    durable = {row for path in work.glob("part-*.parquet") for row in pq.read_table(path)["row_index"].to_pylist()}
    assert 3 < len(durable) < 200
    assert not output.exists()
    resumed = run_job(
        source, model=tiny_model_folder, output=output, max_tokens=200, ignore_eos=True, resume=True, max_running=64
    )
    assert {row["row_index"] for row in resumed.rows if row["run_id"] == 0} == durable
    assert (resumed.summary["ok"], resumed.summary["failed"]) == (197, 3)


def test_a_reader_that_leaves_gets_no_traceback(source: Path, tmp_path: Path) -> None:
    # 200 x 200 lines are more than a pipe holds, so that the writer notices.
    question = "select a.note from rows a, rows b"
    script = f'"{sys.executable}" -m batchrun sql "{source}" "{question}" --format csv | head -1'
    shown = subprocess.run(["/bin/sh", "-c", script], env={**BARE, "PATH": PATH}, capture_output=True, timeout=120, check=False)
    assert shown.stdout == b"note\n"
    (note,) = shown.stderr.splitlines()
    assert note.endswith(b"is not an output of `batchrun run`; it is queried all the same")
    assert shutil.which("head", path=PATH)


def test_a_wall_clock_that_is_set_back_changes_no_times(
    run_job: Callable[..., Any], source: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = datetime.now(UTC)
    steps = iter([began])

    class SetBack(datetime):
        """The second and every later look at the clock tells an hour less."""

        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            if tz is None:  # the templates' time, before the job
                return datetime.now()
            return next(steps, began - timedelta(hours=1))

    real = time.time
    monkeypatch.setattr(pipeline, "datetime", SetBack)
    monkeypatch.setattr(time, "time", lambda: real() - 3600)
    rows = [row for row in run_job(source, model=tiny_model_folder, max_tokens=4, max_running=16).rows if row["error"] is None]
    assert len(rows) == 197
    for row in rows:
        assert 0 <= row["queue_ms"] <= row["ttft_ms"] <= row["latency_ms"]
        assert row["started_at"] >= began
        assert (row["started_at"] - began).total_seconds() * 1e3 == pytest.approx(row["queue_ms"], abs=0.01)
    assert max(row["queue_ms"] for row in rows) > min(row["queue_ms"] for row in rows)
