"""`batchrun run` around the pipeline: what it hands over, how it ends, what it prints. The pipeline itself is played here."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import batchrun
from batchrun.cli.main import main
from batchrun.engine.errors import ModelError
from batchrun.errors import Refused, Stopped
from batchrun.options import RunOptions

pytestmark = pytest.mark.usefixtures("signal_handlers_kept")

Pipeline = Callable[[RunOptions, Any, Callable[[], bool]], Any]


def result(output: Path, failed: int = 0) -> types.SimpleNamespace:
    summary = {"rows": 200, "ok": 200 - failed, "failed": failed, "model": "naïve"}
    failures = ["3 failed, such as row 7: column 'prompt'\nis null"] if failed else []
    warnings = ["tools\nare ignored"]
    return types.SimpleNamespace(summary=summary, exit_code=int(failed > 0), output=output, warnings=warnings, failures=failures)


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[[Pipeline], None]:
    """Put a function in the place of batchrun.pipeline.run."""

    def install(pipeline: Pipeline) -> None:
        module = types.ModuleType("batchrun.pipeline")
        module.run = pipeline  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "batchrun.pipeline", module)
        monkeypatch.setattr(batchrun, "pipeline", module, raising=False)

    return install


def test_options_reach_the_pipeline(play: Callable[[Pipeline], None], tmp_path: Path) -> None:
    seen: list[RunOptions] = []
    play(lambda options, progress, stop: seen.append(options) or result(options.output))
    arguments = ["a.parquet", "b/*.parquet", "-o", str(tmp_path / "out"), "--seed", "5", "--kv-tokens", "99", "--no-dedupe"]
    arguments += ["--resume", "--flush-seconds", "2.5", "--output-prefix", "x_", "--keep-columns", "id,t", "--return-token-ids"]
    arguments += ["--max-tokens", "3", "--system", "s", "--model", "m", "--threads", "2", "--kv-dtype", "int8"]
    assert main(["run", *arguments]) == 0
    (options,) = seen
    assert options.inputs == ("a.parquet", "b/*.parquet")
    assert options.output == tmp_path / "out"
    assert (options.seed, options.kv_tokens, options.dedupe, options.resume, options.overwrite) == (5, 99, False, True, False)
    assert (options.flush_seconds, options.output_prefix, options.keep_columns) == (2.5, "x_", ("id", "t"))
    assert (options.return_token_ids, options.model, options.threads, options.kv_dtype) == (True, "m", 2, "int8")
    assert (options.sampling.max_tokens, options.prompt.system) == (3, "s")


def test_every_field_of_the_options_can_be_set_from_the_command_line() -> None:
    from dataclasses import fields

    from batchrun.cli.run import run_command

    given = {parameter.name for parameter in run_command.params}
    flat = {field.name for field in fields(RunOptions)} - {"prompt", "sampling"}
    flat |= {field.name for field in fields(RunOptions.__dataclass_fields__["prompt"].type)}  # type: ignore[arg-type]
    flat |= {field.name for field in fields(RunOptions.__dataclass_fields__["sampling"].type)}  # type: ignore[arg-type]
    negated = {"dedupe": "no_dedupe", "prefix_cache": "no_prefix_cache"}
    assert given == {negated.get(name, name) for name in flat} | {"summary_json", "quiet"}


def test_the_last_line_counts_rows_and_the_summary_alone_is_on_stdout(
    play: Callable[[Pipeline], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    play(lambda options, progress, stop: result(options.output, failed=3))
    assert main(["run", "a", "-o", str(tmp_path / "out"), "--summary-json"]) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"rows": 200, "ok": 197, "failed": 3, "model": "naïve"}
    assert shown.out.count("\n") == 1
    assert shown.err.splitlines()[-3:] == [
        "batchrun: warning: tools are ignored",
        "batchrun: 3 failed, such as row 7: column 'prompt' is null",
        "197 ok, 3 failed",
    ]
    assert main(["run", "a", "-o", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().out == ""


def test_refusals_of_the_pipeline_exit_with_2(
    play: Callable[[Pipeline], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(error: Exception) -> Pipeline:
        def pipeline(options: RunOptions, progress: Any, stop: Callable[[], bool]) -> None:
            raise error

        return pipeline

    for error in (Refused("a has no column prompt"), ModelError("no such model")):
        play(refuse(error))
        assert main(["run", "a", "-o", str(tmp_path / "out")]) == 2
        assert capsys.readouterr().err == f"batchrun: error: {error}\n"
    play(refuse(Stopped("more than 5 rows failed")))
    assert main(["run", "a", "-o", str(tmp_path / "out")]) == 3


def test_a_crash_is_logged_in_the_work_folder(
    play: Callable[[Pipeline], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = tmp_path / "out.parquet.batchrun"

    def crash(options: RunOptions, progress: Any, stop: Callable[[], bool]) -> None:
        work.mkdir()
        raise OSError(28, "No space left on device")

    play(crash)
    assert main(["run", "a", "-o", str(tmp_path / "out.parquet")]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    log = work / "batchrun.log"
    assert line.startswith("batchrun: error: OSError: [Errno 28] No space left on device; the traceback is in ")
    assert str(log) in line
    assert "--resume" in line
    assert "in crash" in log.read_text()


PLAYED = """
import os, signal, sys, time, types, pathlib
import batchrun
from batchrun.errors import Stopped

def run(options, progress, stop):
    work = pathlib.Path(str(options.output) + ".batchrun")
    print("loading", flush=True)
    {loading}
    work.mkdir()
    stop()
    print("running", flush=True)
    end = time.monotonic() + 30
    while not stop() and time.monotonic() < end:
        time.sleep(0.01)
    print("flushing", flush=True)
    {flushing}
    raise Stopped("stopped on request")

module = types.ModuleType("batchrun.pipeline")
module.run = run
sys.modules["batchrun.pipeline"] = batchrun.pipeline = module
from batchrun.cli.main import main
sys.exit(main(["run", "a", "-o", sys.argv[1]]))
"""


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the played job in a process of its own, which does not outlive the test."""
    processes = []

    def start_process(loading: str = "pass", flushing: str = "pass") -> "subprocess.Popen[str]":
        code = textwrap.dedent(PLAYED).format(loading=loading, flushing=flushing)
        command = [sys.executable, "-c", code, str(tmp_path / "out")]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return processes[-1]

    yield start_process
    for process in processes:
        process.kill()
        process.communicate()


def wait_for(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    while (got := process.stdout.readline()) != f"{line}\n":
        assert got, f"the process ended before it printed {line!r}: {process.stderr.read() if process.stderr else ''}"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_running_flushes_and_names_resume(number: signal.Signals, code: int, start: Start) -> None:
    process = start()
    wait_for(process, "running")
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert out == "flushing\n"
    assert err.splitlines()[-1] == f"batchrun: stopped by {number.name}; the same command with --resume goes on from here"
    assert "Traceback" not in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_loading_ends_the_process_at_once(number: signal.Signals, code: int, start: Start) -> None:
    process = start(loading="time.sleep(30)")
    wait_for(process, "loading")
    begin = time.monotonic()
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert time.monotonic() - begin < 10
    assert process.returncode == code
    assert err == f"batchrun: stopped by {number.name}\n"


def test_a_second_signal_leaves_at_once(start: Start) -> None:
    process = start(flushing="time.sleep(30)")
    wait_for(process, "running")
    process.send_signal(signal.SIGINT)
    wait_for(process, "flushing")
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert time.monotonic() - begin < 10
    assert process.returncode == 143


def test_a_job_that_finishes_in_spite_of_a_signal_has_its_own_exit_code(play: Callable[[Pipeline], None], tmp_path: Path) -> None:
    def finish(options: RunOptions, progress: Any, stop: Callable[[], bool]) -> Any:
        assert not stop()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop()
        return result(options.output, failed=1)

    play(finish)
    assert main(["run", "a", "-o", str(tmp_path / "out")]) == 1
