"""`batchrun sql`: formats, where the result goes, refusals."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun import sql
from batchrun.cli.main import main
from batchrun.cli.sql import FORMATS

pytestmark = pytest.mark.usefixtures("signal_handlers_kept")


@pytest.fixture
def output(tmp_path: Path) -> Path:
    path = tmp_path / "antworten ü [v2].parquet"
    pq.write_table(pa.table({"id": [1, 2, 3], "output": ["naïve", "日本", None]}), path)
    return path


def test_the_formats_are_those_of_the_library() -> None:
    assert FORMATS == sql.FORMATS


def test_each_format_is_written_to_stdout(output: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    query = "select id, output from rows where id < 3 order by id desc"
    assert main(["sql", str(output), query, "--format", "csv"]) == 0
    assert capfdbinary.readouterr().out.decode() == "id,output\n2,日本\n1,naïve\n"
    assert main(["sql", str(output), query, "--format", "json"]) == 0
    assert json.loads(capfdbinary.readouterr().out) == [{"id": 2, "output": "日本"}, {"id": 1, "output": "naïve"}]
    assert main(["sql", str(output), query, "--format", "parquet"]) == 0
    assert pq.read_table(io.BytesIO(capfdbinary.readouterr().out)).to_pydict() == {"id": [2, 1], "output": ["日本", "naïve"]}
    assert main(["sql", str(output), query]) == 0
    assert "(2 rows)" in capfdbinary.readouterr().out.decode()


def test_without_a_query_all_rows_are_shown(output: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["sql", str(output)]) == 0
    shown = capfdbinary.readouterr().out.decode()
    assert "naïve" in shown
    assert "(3 rows)" in shown


def test_a_dash_reads_the_query_from_stdin(output: Path) -> None:
    command = [sys.executable, "-m", "batchrun", "sql", str(output), "-", "--format", "csv"]
    done = subprocess.run(command, input="select count(*) as n from rows", capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "n\n3\n"
    done = subprocess.run(command, input=" ", capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (2, "batchrun: error: the query is empty: ask with SELECT ... FROM rows\n")


def test_a_file_gets_the_format_of_its_ending_and_is_never_replaced(output: Path, tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    assert main(["sql", str(output), "select id from rows", "-o", str(target)]) == 0
    assert json.loads(target.read_text()) == [{"id": 1}, {"id": 2}, {"id": 3}]
    before = target.read_bytes()
    assert main(["sql", str(output), "select 5 as id", "-o", str(target)]) == 2
    assert target.read_bytes() == before


def test_refusals_are_one_line(output: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for arguments, part in (
        (["sql", str(output), "select nonsense from rows"], "nonsense"),
        (["sql", str(tmp_path / "none.parquet"), "select 1"], "there is no"),
        (["sql", str(output), "select 1", "--format", "xml"], "--format is 'xml': it must be one of table, csv, json, parquet"),
        (["sql"], "Missing argument 'OUTPUT'"),
    ):
        assert main(arguments) == 2
        shown = capfd.readouterr()
        assert shown.err.startswith("batchrun: error: ")
        assert part in shown.err
        assert shown.err.count("\n") == 1
        assert shown.out == ""


def test_an_input_is_queried_with_a_note_and_an_output_without(output: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["sql", str(output), "select id from rows"]) == 0
    note = f"batchrun: note: {output} is not an output of `batchrun run`; it is queried all the same\n"
    assert capfd.readouterr().err == note
    pq.write_table(pq.read_table(output).replace_schema_metadata({b"batchrun": b"{}"}), output)
    assert main(["sql", str(output), "select id from rows"]) == 0
    assert capfd.readouterr().err == ""


def test_a_file_whose_ending_says_no_format_is_not_written(
    output: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("q.weird", "q"):
        assert main(["sql", str(output), "select 1 as a", "-o", str(tmp_path / name)]) == 2
        assert "end it in .csv, .json, .parquet, .txt, or say what it is by --format" in capfd.readouterr().err
        assert not (tmp_path / name).exists()
    assert main(["sql", str(output), "select 1 as a", "-o", str(tmp_path / "q.weird"), "--format", "csv"]) == 0
    assert (tmp_path / "q.weird").read_text() == "a\n1\n"
    assert main(["sql", str(output), "select 1 as a", "-o", str(tmp_path / "q.txt")]) == 0
    assert "(1 row)" in (tmp_path / "q.txt").read_text()


def test_head_takes_one_line_and_nothing_complains(tmp_path: Path) -> None:
    path = tmp_path / "many.parquet"
    table = pa.table({"id": list(range(200_000))})
    pq.write_table(table.replace_schema_metadata({b"batchrun": b"{}"}), path)
    command = [sys.executable, "-m", "batchrun", "sql", str(path), "select id from rows", "--format", "csv"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"id\n"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
