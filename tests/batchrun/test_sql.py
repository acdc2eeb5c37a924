"""SQL over outputs: what is read, which types come out, the four formats, and what bad SQL gets."""

import csv
import io
import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun.errors import Refused
from batchrun.results import ResultRow, error_row, result_schema, to_batch
from batchrun.sql import is_output, query, save, write

NOON = datetime(2026, 1, 31, 12, 30, tzinfo=UTC)


def result_rows(first: int, count: int) -> pa.Table:
    """Results with an error in every third row."""
    rows = [
        error_row(i, "null prompt", 0)
        if i % 3 == 2
        else ResultRow(i, 0, f"answer {i}", "stop", None, 7, 3, 5, ttft_ms=1.5, started_at=NOON)
        for i in range(first, first + count)
    ]
    return pa.Table.from_batches([to_batch(rows, result_schema())])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three parts with a pattern's characters in the folder's name: one of errors alone, one empty; and two strays."""
    folder = tmp_path / "run [v2]*"
    folder.mkdir()
    pq.write_table(result_rows(0, 4), folder / "part-00000.parquet")
    pq.write_table(
        pa.Table.from_batches([to_batch([error_row(4, "too long", 0)], result_schema())]), folder / "part-00001.parquet"
    )
    pq.write_table(result_schema().empty_table(), folder / "part-00002.parquet")
    pq.write_table(result_rows(5, 4), folder / "part-00010.parquet")
    (folder / ".part-00011.parquet").write_bytes(b"half")
    (folder / "notes.txt").write_text("not data")
    return folder


@pytest.fixture
def new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def text(table: pa.Table, file_format: str, width: int | None = None) -> str:
    stream = io.BytesIO()
    write(table, file_format, stream, width)
    return stream.getvalue().decode()


def test_all_parts_are_read_in_the_order_of_their_names(folder: Path) -> None:
    assert query(folder, "select row_index from rows")["row_index"].to_pylist() == list(range(9))


def test_one_file_and_the_example_of_the_readme(folder: Path) -> None:
    sql = "select finish_reason, count(*) as rows, avg(ttft_ms) from rows group by 1 order by 1"
    table = query(folder / "part-00000.parquet", sql)
    assert table.to_pydict() == {"finish_reason": ["error", "stop"], "rows": [1, 3], "avg(ttft_ms)": [None, 1.5]}


def test_sums_of_integers_are_int64_where_they_fit(folder: Path) -> None:
    table = query(folder, "select sum(output_tokens) s, sum(row_index) filter (false) n, count(*) c from rows")
    assert [str(kind) for kind in table.schema.types] == ["int64"] * 3
    assert table.to_pylist() == [{"s": 25, "n": None, "c": 9}]
    big = query(folder, "select sum(9223372036854775807) s from rows")
    assert big.to_pylist() == [{"s": Decimal(9 * (2**63 - 1))}]
    assert json.loads(text(big, "json")) == [{"s": 9 * (2**63 - 1)}]


def test_times_are_utc_in_any_zone(folder: Path, new_york: None) -> None:
    table = query(folder, "select started_at, started_at::varchar s, hour(started_at) h from rows limit 1")
    assert table["started_at"].type == pa.timestamp("us", "UTC")
    assert table.to_pylist() == [{"started_at": NOON, "s": "2026-01-31 12:30:00+00", "h": 12}]
    assert text(table, "csv").splitlines()[1] == "2026-01-31 12:30:00+00:00,2026-01-31 12:30:00+00,12"
    assert json.loads(text(table, "json"))[0]["started_at"] == "2026-01-31T12:30:00+00:00"


def test_input_columns_of_any_type_can_be_queried_and_written(tmp_path: Path) -> None:
    values = pa.table(
        {
            "view": pa.array(["é", None], pa.string_view()),
            "large": pa.array(["a", "b"], pa.large_string()),
            "dictionary": pa.array(["x", "y"], pa.dictionary(pa.int8(), pa.large_string())),
            "decimal": pa.array([Decimal("1.50"), None], pa.decimal128(10, 2)),
            "list": pa.array([[1, 2], None], pa.list_(pa.int64())),
            "map": pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int64())),
            "struct": pa.array([{"role": "user"}, {"role": None}]),
            "ns": pa.array([1, 1_000_000_001], pa.timestamp("ns", "UTC")),
            "bytes": pa.array([b"\xff\x00", None]),
            "null": pa.nulls(2),
            "nan": pa.array([float("nan"), float("inf")]),
            "flag": pa.array([True, False]),
        }
    )
    pq.write_table(values, tmp_path / "out.parquet")
    table = query(tmp_path / "out.parquet", "select * from rows")
    assert table.num_rows == 2
    first = json.loads(text(table, "json"))[0]
    assert first["view"] == "é"
    assert first["decimal"] == 1.5
    assert first["list"] == [1, 2]
    assert first["struct"] == {"role": "user"}
    assert first["bytes"] == "ff00"
    assert first["nan"] is None
    row = next(csv.DictReader(io.StringIO(text(table, "csv"))))
    assert (row["list"], row["struct"], row["flag"], row["null"], row["view"]) == ("[1, 2]", '{"role": "user"}', "true", "", "é")
    assert pq.read_table(io.BytesIO(_bytes(table, "parquet"))).num_rows == 2
    assert "user" in text(table, "table")


def _bytes(table: pa.Table, file_format: str) -> bytes:
    stream = io.BytesIO()
    write(table, file_format, stream)
    return stream.getvalue()


def test_json_is_one_array_with_a_row_per_line() -> None:
    table = pa.Table.from_arrays([pa.array([1, 2]), pa.array(['"\n', None])], ["a", "a"])
    assert text(table, "json") == '[\n{"a": 1, "a_1": "\\"\\n"},\n{"a": 2, "a_1": null}\n]\n'
    assert json.loads(text(table.slice(0, 0), "json")) == []


def test_csv_survives_quotes_and_line_breaks() -> None:
    values = ['say "hi", twice', "two\nlines", "日本語😀"]
    read = list(csv.reader(io.StringIO(text(pa.table({"a": values}), "csv"))))
    assert read == [["a"], *([value] for value in values)]


def test_many_batches_lose_no_row() -> None:
    table = pa.table({"a": list(range(5000))})
    assert [row["a"] for row in json.loads(text(table, "json"))] == list(range(5000))
    assert text(table, "csv").splitlines()[1:] == [str(i) for i in range(5000)]


def test_table_aligns_cuts_and_keeps_each_row_on_a_line() -> None:
    table = pa.table({"n": [5, 12345], "text": ["one\ntwo\x1b[31m", "x" * 100], "m": [None, 0.123456789]})
    lines = text(table, "table").splitlines()
    cut, escaped = "x" * 57 + "...", r"one\ntwo\x1b[31m"
    assert lines == [
        f"    n  {'text':60}          m",
        f"-----  {'-' * 60}  ---------",
        f"    5  {escaped:60}       NULL",
        f"12345  {cut}  0.1234568",
        "(2 rows)",
    ]
    narrow = text(table, "table", width=40).splitlines()
    assert max(map(len, narrow)) == 40
    assert narrow[3] == "12345  " + "x" * 19 + "...  0.1234568"


def test_table_counts_wide_characters_as_the_terminal_does() -> None:
    table = pa.table({"text": ["日本語日本語", "abc"], "n": [1, 2]})
    assert text(table, "table").splitlines()[2:4] == ["日本語日本語  1", "abc           2"]
    assert text(table, "table", width=12).splitlines()[2] == "日本語...  1"
    assert text(table, "table", width=11).splitlines()[2] == "日本 ...  1"


def test_a_long_table_says_that_it_is_cut() -> None:
    lines = text(pa.table({"a": list(range(101))}), "table").splitlines()
    assert len(lines) == 103
    assert lines[-1] == "(101 rows, the first 100 shown: --format csv gives all)"
    assert text(pa.table({"a": [1]}), "table").splitlines()[-1] == "(1 row)"


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("select ttft from rows", r'^SQL: Binder Error: Referenced column "ttft" not found.*Candidate bindings: "ttft_ms"'),
        ("select * from answers", "^SQL: there is no table answers: the view over the output is called rows$"),
        ("selec 1", r"^SQL: Parser Error: syntax error at or near \"selec\"$"),
        ("select output::int from rows", "^SQL: Conversion Error"),
        ("", "gives no rows"),
        ("select * from 's3://bucket/file.parquet'", "^SQL: "),
    ],
)
def test_wrong_sql_is_refused_in_one_line(folder: Path, sql: str, message: str) -> None:
    with pytest.raises(Refused, match=message) as refusal:
        query(folder, sql)
    assert "\n" not in str(refusal.value)


def test_python_variables_are_not_tables(folder: Path) -> None:
    files = pa.table({"a": [1]})
    assert files.num_rows == 1
    with pytest.raises(Refused, match="there is no table files"):
        query(folder, "select * from files")


def test_a_missing_an_unfinished_and_a_foreign_output_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"there is no .*nothing\.parquet: give the output"):
        query(tmp_path / "nothing.parquet", "select 1")
    (tmp_path / "open.parquet.batchrun").mkdir()
    with pytest.raises(Refused, match=r"not finished.*--resume"):
        query(tmp_path / "open.parquet", "select 1")
    (tmp_path / "empty").mkdir()
    with pytest.raises(Refused, match=r"holds no \.parquet file"):
        query(tmp_path / "empty", "select 1")
    (tmp_path / "text.parquet").write_text("a,b\n1,2\n")
    with pytest.raises(Refused, match=r"text\.parquet cannot be read as Parquet") as refusal:
        query(tmp_path / "text.parquet", "select 1")
    assert str(refusal.value).endswith("text.parquet cannot be read as Parquet: it is cut off, or something else")
    whole = io.BytesIO()
    pq.write_table(result_rows(0, 4), whole)
    (tmp_path / "cut.parquet").write_bytes(whole.getvalue()[:1000])
    (tmp_path / "zero.parquet").write_bytes(b"")
    for name in ("cut.parquet", "zero.parquet"):
        with pytest.raises(Refused, match=rf"{name} cannot be read as Parquet: it is cut off, or something else$"):
            query(tmp_path / name, "select 1")


def test_several_statements_and_changes_are_refused(folder: Path) -> None:
    with pytest.raises(Refused, match="there are 2 statements"):
        query(folder, "select 1; select 2")
    for sql in ("create table x as select 1 as a", "create view v as select * from rows", "delete from rows"):
        with pytest.raises(Refused, match="changes data"):
            query(folder, sql)
    for sql in ("select ';' as a;", "-- one; two\nselect ';' as a; -- three"):
        assert query(folder, sql).to_pydict() == {"a": [";"]}


def test_an_output_is_known_by_its_footer(folder: Path, tmp_path: Path) -> None:
    assert not is_output(folder)
    marked = result_rows(0, 4).replace_schema_metadata({b"batchrun": b"{}"})
    pq.write_table(marked, folder / "part-00000.parquet")
    assert is_output(folder)
    assert is_output(folder / "part-00000.parquet")


def test_a_part_that_is_damaged_behind_the_first_is_refused(folder: Path) -> None:
    (folder / "part-00003.parquet").write_bytes(b"PAR1 cut short")
    with pytest.raises(Refused, match="part-00003") as refusal:
        query(folder, "select count(output) from rows")
    assert "\n" not in str(refusal.value)


def test_unknown_format_is_refused() -> None:
    with pytest.raises(Refused, match="--format is 'xml': it must be one of table, csv, json, parquet"):
        write(pa.table({"a": [1]}), "xml", io.BytesIO())


def test_a_result_is_saved_whole_and_never_over_another_file(tmp_path: Path) -> None:
    table = pa.table({"a": [1, 2]})
    save(table, "parquet", tmp_path / "é.parquet")
    assert pq.read_table(tmp_path / "é.parquet").equals(table)
    with pytest.raises(Refused, match="exists"):
        save(pa.table({"a": [3]}), "csv", tmp_path / "é.parquet")
    assert pq.read_table(tmp_path / "é.parquet").equals(table)
    with pytest.raises(Refused, match="there is no folder"):
        save(table, "csv", tmp_path / "no" / "a.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["é.parquet"]
