"""kill -9 at any moment, then --resume: every row once, finished rows not computed again (case R11).

A driver process imports the program once and forks a child for each run. The child replaces a function by one that sends
SIGKILL to itself at the chosen moment; the program itself knows nothing of it. The driver computes nothing before it forks.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun.engine.tokenizer import Tokenizer

DRIVER = """
import json, os, signal, sys, threading
import torch
from batchrun import disk, ledger, pipeline
from batchrun.cli.main import main
from batchrun.engine import engine
from batchrun.engine.models import decoder

assert threading.active_count() == 1
add_part, append, replace, remove = ledger.WorkFolder.add_part, ledger._append_durably, os.replace, ledger.WorkFolder.remove
armed = False


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def arm(point, rows, output):
    def add_and_arm(work, content, count):
        global armed
        armed = sum(part.rows for part in work.parts) >= rows
        if armed and point == "part":
            die()
        add_part(work, content, count)

    def append_half(path, line):
        if armed and point == "ledger":
            with open(path, "ab") as stream:
                stream.write(line[: len(line) // 2])
            die()
        append(path, line)

    def replace_never(source, target):
        if armed and point == "part file" and os.path.basename(target).startswith("part-"):
            die()
        if point == "rename" and str(target) == output:
            die()
        replace(source, target)
        if point == "renamed" and str(target) == output:
            die()

    def remove_half(work):
        if point == "removal":
            ledger._clear(work.path, keep={ledger.LOCK_FILE, ledger.RUN_FILE})
            die()
        remove(work)

    ledger.WorkFolder.add_part, ledger._append_durably = add_and_arm, append_half
    os.replace, ledger.WorkFolder.remove = replace_never, remove_half


for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1), os.dup2(log, 2)
        arm(job["point"], job["rows"], job["output"])
        code = 99
        try:
            code = main(job["arguments"])
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""
SAME_IN_ANY_RUN = ["id", "prompt", "row_index", "sample", "output", "finish_reason", "error", "prompt_tokens", "output_tokens"]
SAME_IN_ANY_RUN += ["output_ids"]
NUM_ROWS = 500
ENDING = """\
batchrun: 2 failed, such as row 17: column 'prompt' is null: every row needs a prompt
batchrun: 2 failed, such as row 111: column 'prompt' is empty: every row needs a prompt
batchrun: row 222 failed: the prompt has 600 tokens, more than the model's context of 512: shorten it
495 ok, 5 failed
"""


class Ended(NamedTuple):
    code: int
    """Negative: the signal."""
    log: str


def input_table() -> pa.Table:
    """500 rows: 20 of one prompt, 5 bad ones, the rest with shared beginnings."""
    prompts: list[str | None] = [f"the cat and the dog {i % 7} of {i}" for i in range(NUM_ROWS)]
    for i in range(3, NUM_ROWS, 25):
        prompts[i] = "the same prompt again"
    for i, bad in zip((17, 111, 222, 333, 499), (None, "", " the" * 600, None, ""), strict=True):
        prompts[i] = bad
    columns = {"id": list(range(NUM_ROWS)), "prompt": prompts, "max_tokens": [1 + i * 7 % 6 for i in range(NUM_ROWS)]}
    table = pa.table(columns)
    same = [i for i, prompt in enumerate(prompts) if prompt == "the same prompt again"]
    assert len(same) == 20
    lengths = [4 if i in same else length for i, length in enumerate(columns["max_tokens"])]
    return table.set_column(2, "max_tokens", pa.array(lengths))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kill")
    pq.write_table(input_table(), path / "in.parquet")
    return path


Run = Callable[..., Ended]


@pytest.fixture(scope="module")
def run(folder: Path, tiny_model_folder: Path) -> Iterator[Run]:
    """run(output, *options, point="part", rows=50): one run in a child of the driver, killed at the point if it comes by."""
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    assert driver.stdin is not None
    assert driver.stdout is not None
    stdin, stdout = driver.stdin, driver.stdout

    def start(
        output: str, *options: str, point: str = "", rows: int = 0, source: str = "in.parquet", model: Path | None = None
    ) -> Ended:
        arguments = ["run", source, "-o", output, "--model", str(model or tiny_model_folder), "--raw", "--dtype", "float32"]
        arguments += ["--threads", "1", "--max-running", "24", "--flush-seconds", "1e-9", "--return-token-ids", "--quiet"]
        log = folder / "log"
        job = {"arguments": [*arguments, *options], "log": str(log), "point": point, "rows": rows, "output": output}
        stdin.write(json.dumps(job) + "\n")
        answer = stdout.readline()
        assert answer, "the driver ended"
        return Ended(int(answer), log.read_text())

    yield start
    stdin.close()
    driver.wait(timeout=60)
    stdout.close()


@pytest.fixture(scope="module")
def unbroken(run: Run, folder: Path) -> list[dict[str, Any]]:
    assert run("unbroken.parquet") == (1, ENDING)
    table = pq.read_table(folder / "unbroken.parquet")
    assert table["row_index"].to_pylist() == list(range(NUM_ROWS))
    assert len({tuple(ids) for ids in table["output_ids"].to_pylist() if ids}) > 100
    return table.select(SAME_IN_ANY_RUN).to_pylist()


def durable_rows(work: Path) -> set[int]:
    """The rows of the parts that the ledger names."""
    rows: list[int] = []
    if (work / "parts.jsonl").exists():
        for line in (work / "parts.jsonl").read_text().split("\n")[:-1]:
            rows += pq.read_table(work / json.loads(line)["file"])["row_index"].to_pylist()
    assert len(rows) == len(set(rows))
    return set(rows)


def check_finished(output: Path, unbroken: list[dict[str, Any]], durable: set[int]) -> None:
    """The output is the unbroken run's, and what was durable when the first process died is the first process's."""
    table = pq.read_table(output)
    assert table.select(SAME_IN_ANY_RUN).to_pylist() == unbroken
    run_ids = table["run_id"].to_pylist()
    assert {row for row in range(NUM_ROWS) if run_ids[row] == 0} == durable
    assert not output.with_name(output.name + ".batchrun").exists()


def computed_prompt_tokens(output: Path) -> int:
    """Of the process that finished the output, from its footer."""
    summary = json.loads(pq.read_schema(output).metadata[b"batchrun"])["summary"]
    return int(summary["computed_prompt_tokens"])


@pytest.mark.parametrize(
    ("point", "rows"), [("part", 50), ("part", 250), ("part", 480), ("part file", 250), ("ledger", 250), ("rename", 0)]
)
def test_a_killed_run_goes_on_where_it_was(
    run: Run, folder: Path, tiny_model_folder: Path, unbroken: list[dict[str, Any]], point: str, rows: int
) -> None:
    name = f"{point}-{rows}.parquet".replace(" ", "-")
    work = folder / f"{name}.batchrun"
    assert run(name, point=point, rows=rows).code == -signal.SIGKILL
    assert not (folder / name).exists()
    durable = durable_rows(work)
    if point == "rename":
        assert len(durable) == NUM_ROWS
    else:
        # No more is lost than what finished since the last flush, here a step's rows and their duplicates.
        assert rows <= len(durable) <= rows + 24 + 20
    temporary = [path.name for path in work.glob("part-*.tmp")]
    assert bool(temporary) == (point == "part file")
    resumed = run(name, "--resume")
    assert resumed == (1, ENDING)
    check_finished(folder / name, unbroken, durable)
    left = [row["prompt"] for row in unbroken if row["row_index"] not in durable and row["error"] is None]
    ids = Tokenizer.from_folder(tiny_model_folder).encode_raw(left)
    assert computed_prompt_tokens(folder / name) == len({tuple(row[:end]) for row in ids for end in range(1, len(row) + 1)})


@pytest.mark.parametrize("point", ["renamed", "removal"])
def test_a_run_killed_after_the_rename_is_finished(run: Run, folder: Path, unbroken: list[dict[str, Any]], point: str) -> None:
    name = f"{point}.parquet"
    assert run(name, point=point).code == -signal.SIGKILL
    before = (folder / name).read_bytes()
    assert (folder / f"{name}.batchrun").exists()
    assert run(name, "--resume").code == 0
    assert (folder / name).read_bytes() == before
    check_finished(folder / name, unbroken, set(range(NUM_ROWS)))


def test_killed_again_and_again(run: Run, folder: Path, unbroken: list[dict[str, Any]]) -> None:
    durable: list[set[int]] = []
    for rows in (50, 250, 480):
        options = ["--resume"] if durable else []
        assert run("again.parquet", *options, point="part", rows=rows).code == -signal.SIGKILL
        durable.append(durable_rows(folder / "again.parquet.batchrun"))
    assert run("again.parquet", "--resume", point="rename").code == -signal.SIGKILL
    assert run("again.parquet", "--resume").code == 1
    table = pq.read_table(folder / "again.parquet")
    assert table.select(SAME_IN_ANY_RUN).to_pylist() == unbroken
    run_ids = table["run_id"].to_pylist()
    for number, rows_then in enumerate(durable):
        assert {row for row in range(NUM_ROWS) if run_ids[row] <= number} == rows_then


def test_a_cut_part_is_done_again_with_a_note_and_stale_files_do_no_harm(
    run: Run, folder: Path, unbroken: list[dict[str, Any]]
) -> None:
    work = folder / "cut.parquet.batchrun"
    assert run("cut.parquet", point="part", rows=250).code == -signal.SIGKILL
    durable = durable_rows(work)
    cut = sorted(work.glob("part-*.parquet"))[2]
    lost = set(pq.read_table(cut)["row_index"].to_pylist())
    os.truncate(cut, cut.stat().st_size // 2)
    for stale in ("part-0000-000999.parquet", "part-0000-000998.parquet.tmp", "output.parquet"):
        shutil.copyfile(cut, work / stale)
    resumed = run("cut.parquet", "--resume")
    assert resumed.code == 1
    assert f"{cut.name}: has" in resumed.log
    assert f"its {len(lost)} rows are done again" in resumed.log
    check_finished(folder / "cut.parquet", unbroken, durable - lost)


def test_a_resume_that_would_mix_two_jobs_is_refused(
    run: Run, folder: Path, tiny_model_folder: Path, unbroken: list[dict[str, Any]]
) -> None:
    assert run("mixed.parquet", point="part", rows=50).code == -signal.SIGKILL
    work = folder / "mixed.parquet.batchrun"
    before = {path.name: path.read_bytes() for path in work.iterdir() if path.name != "lock"}
    (folder / "t.jinja").write_text("{{ prompt }}!")
    table = input_table()
    pq.write_table(pa.concat_tables([table.slice(0, 9), table.slice(0, 1), table.slice(9)]), folder / "inserted.parquet")
    other = folder / "other-model"
    shutil.copytree(tiny_model_folder, other)
    (other / "generation_config.json").write_text('{"bos_token_id": 1, "eos_token_id": [2, 0]}')
    changes: list[tuple[str, list[str], dict[str, Any]]] = [
        ("max-tokens", ["--max-tokens", "7"], {}),
        ("template", ["--template", "t.jinja"], {}),
        ("model", [], {"model": other}),
        ("input", [], {"source": "inserted.parquet"}),
    ]
    for named, options, place in changes:
        refused = run("mixed.parquet", "--resume", *options, **place)
        assert refused.code == 2, named
        (line,) = refused.log.splitlines()
        assert line.startswith("batchrun: error: --resume:")
        assert f"settings: {named} (" in line
    assert run("mixed.parquet").code == 2
    assert {path.name: path.read_bytes() for path in work.iterdir() if path.name != "lock"} == before
    durable = durable_rows(work)
    assert run("mixed.parquet", "--resume").code == 1
    check_finished(folder / "mixed.parquet", unbroken, durable)


def test_an_output_that_is_there_or_is_the_input_is_refused(run: Run, folder: Path, unbroken: list[dict[str, Any]]) -> None:
    for name in ("unbroken.parquet", "in.parquet"):
        before = (folder / name).read_bytes()
        refused = run(name)
        assert refused.code == 2
        assert name in refused.log
        assert (folder / name).read_bytes() == before
        assert not (folder / f"{name}.batchrun").exists()
    assert run("in.parquet", "--overwrite").code == 2
