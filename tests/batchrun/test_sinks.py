"""Parts as rows finish; the final output in input order, whole or not at all."""

import errno
import json
import os
import random
from decimal import Decimal
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from batchrun import merge, sinks
from batchrun.errors import Stopped
from batchrun.ledger import WorkFolder, work_path
from batchrun.results import ResultRow, error_row, output_schema, result_schema
from batchrun.resume import prepare
from batchrun.sinks import PartWriter, finish
from batchrun.sources import Source, open_source
from batchrun.utf8 import repair_utf8


def make_source(tmp_path: Path, table: pa.Table | dict, **options) -> Source:
    path = tmp_path / "input" / "in.parquet"
    path.parent.mkdir(exist_ok=True)
    pq.write_table(table if isinstance(table, pa.Table) else pa.table(table), path, **options)
    return open_source((str(path),))


def make_work(output: Path) -> WorkFolder:
    work = prepare(output, {"model": "m"}).work
    assert work is not None
    return work


def answer(row: int, sample: int = 0) -> ResultRow:
    return ResultRow(row, sample, f"answer {row}/{sample}", "stop", None, 5, 1, 2, *[1.0] * 8)


def write_rows(work: WorkFolder, rows: list[ResultRow], max_rows: int = 1000, **options) -> None:
    writer = PartWriter(work, result_schema(**options), max_rows=max_rows)
    for row in rows:
        writer.add(row)
    writer.close()


def bad_text(*cells: bytes) -> pa.Array:
    offsets = np.cumsum([0, *map(len, cells)]).astype(np.int32)
    return pa.Array.from_buffers(pa.string(), len(cells), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(cells))])


# --- parts -----------------------------------------------------------------------------------------------------------------


def test_a_part_is_written_when_rows_or_seconds_are_full(tmp_path):
    now = 100.0
    work = make_work(tmp_path / "out.parquet")
    writer = PartWriter(work, result_schema(), flush_seconds=10, max_rows=3, clock=lambda: now)
    for row in range(4):
        writer.add(answer(row))
    assert [part.rows for part in work.parts] == [3]
    now += 9.9
    writer.flush_if_due()
    assert len(work.parts) == 1
    now += 0.2
    writer.flush_if_due()
    assert [part.rows for part in work.parts] == [3, 1]
    now += 50
    writer.flush_if_due()
    writer.add(answer(4))
    assert len(work.parts) == 2
    writer.close()
    writer.close()
    assert [part.rows for part in work.parts] == [3, 1, 1]
    work.close()


def test_parts_have_one_schema_whatever_their_rows(tmp_path):
    fine, failed = make_work(tmp_path / "a.parquet"), make_work(tmp_path / "b.parquet")
    write_rows(fine, [answer(0)])
    write_rows(failed, [error_row(0, "bad", 0)])
    schemas = [pq.read_schema(work.path / work.parts[0].file) for work in (fine, failed)]
    assert schemas[0] == schemas[1] == result_schema()
    fine.close()
    failed.close()


# --- the final output ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_bytes", [1 << 26, 10_000])
@pytest.mark.parametrize("name", ["out.parquet", "run [v2]"])
def test_rows_come_in_input_order_then_sample_order(tmp_path, monkeypatch, bucket_bytes, name):
    monkeypatch.setattr(sinks, "sorted_results", lambda work: merge.sorted_results(work, bucket_bytes))
    rng = random.Random(0)
    source = make_source(tmp_path, {"prompt": [f"p{i}" for i in range(1500)], "x": list(range(1500))})
    samples = np.array([rng.choice((1, 1, 1, 2, 5)) for _ in range(1500)])
    rows = [answer(row, sample) for row in range(1500) for sample in range(samples[row])]
    rng.shuffle(rows)
    for i, row in enumerate(rows):
        if row.sample == 0 and samples[row.row_index] == 1 and i % 10 == 0:
            rows[i] = error_row(row.row_index, "bad", 0)
    work = make_work(tmp_path / name)
    write_rows(work, rows, max_rows=100)
    report = finish(source, work, samples=samples)
    table = pa.concat_tables(pq.ParquetFile(file).read() for file in report.files)
    keys = list(zip(table["row_index"].to_pylist(), table["sample"].to_pylist(), strict=True))
    assert keys == [(row, sample) for row in range(1500) for sample in range(samples[row])]
    assert table["prompt"].to_pylist() == [f"p{row}" for row, _ in keys]
    assert table["x"].to_pylist() == [row for row, _ in keys]
    expected = {(row.row_index, row.sample): (row.output, row.error) for row in rows}
    assert list(zip(table["output"].to_pylist(), table["error"].to_pylist(), strict=True)) == [expected[key] for key in keys]
    assert report.rows == len(rows)
    assert sorted(os.listdir(tmp_path)) == sorted(["input", name])


def test_the_sort_in_buckets_uses_files_and_removes_them(tmp_path):
    work = make_work(tmp_path / "out.parquet")
    write_rows(work, [answer(row) for row in reversed(range(2000))], max_rows=100)
    tables = merge.sorted_results(work, 8000)
    first = next(tables)
    assert len(first) < 500
    assert len(os.listdir(work.path / "buckets")) > 3
    rest = pa.concat_tables([first, *tables])
    assert rest["row_index"].to_pylist() == list(range(2000))
    assert os.listdir(work.path / "buckets") == []
    work.close()


def test_every_input_type_comes_through_value_for_value(tmp_path):
    zoo = pa.table(
        {
            "string": ["a", None, "c"],
            "large": pa.array(["a", None, "c"], pa.large_string()),
            "view": pa.array(["a", None, "c"], pa.string_view()),
            "dict": pa.array(["a", "b", "a"]).dictionary_encode(),
            "decimal": pa.array([Decimal("1.50"), None, Decimal("2.25")], pa.decimal128(10, 2)),
            "map": pa.array([[("a", 1)], [], None], pa.map_(pa.string(), pa.int32())),
            "time": pa.array([1, 2, None], pa.timestamp("ns", "America/New_York")),
            "list": pa.array([[1], None, [2, 3]], pa.list_(pa.int16())),
            "list_view": pa.array([[1], None, [2, 3]], pa.list_view(pa.int16())),
            "struct": pa.array([{"a": 1, "b": None}, None, {"a": None, "b": "x"}], pa.struct({"a": pa.int8(), "b": pa.string()})),
            "uuid": pa.array([b"0123456789abcdef", None, b"0" * 16], pa.uuid()),
            "id": pa.array([1, None, 2**64 - 1], pa.uint64()),
            "bytes": [b"\xff", None, b""],
            "null": pa.nulls(3),
            "nan": [float("nan"), None, float("inf")],
        }
    )
    source = make_source(tmp_path, zoo, row_group_size=2)
    for name, samples in (("one.parquet", 1), ("two.parquet", 2)):
        work = make_work(tmp_path / name)
        write_rows(work, [answer(row, sample) for row in range(3) for sample in range(samples)])
        finish(source, work)
        output = pq.ParquetFile(tmp_path / name).read().select(zoo.schema.names)
        assert output.schema == source.schema
        expected = pa.concat_tables([zoo.slice(i // samples, 1) for i in range(3 * samples)])
        assert output["time"].cast(pa.int64()).equals(expected["time"].cast(pa.int64()))
        for column in zoo.drop_columns("time").schema.names:
            # As Python values: Arrow's own comparison minds NaN, and pieces of dictionaries that hold the same.
            assert repr(output[column].to_pylist()) == repr(expected[column].to_pylist()), column


def test_the_schema_is_the_same_for_fine_failed_and_no_rows(tmp_path):
    outputs = []
    for name, rows in (("fine", [answer(0)]), ("failed", [error_row(0, "bad", 0)]), ("none", [])):
        source = make_source(tmp_path, pa.table({"prompt": pa.array(["p"] * len(rows), pa.string())}))
        output = tmp_path / f"{name}.parquet"
        work = make_work(output)
        write_rows(work, rows)
        assert finish(source, work).rows == len(rows)
        outputs.append(output)
    assert all(pq.read_schema(output).equals(output_schema(source.schema)) for output in outputs)
    assert pa.dataset.dataset([str(output) for output in outputs]).count_rows() == 2
    with duckdb.connect() as connection:
        names = [str(output) for output in outputs]
        rows = connection.execute("select error, started_at, output_tokens from read_parquet(?) order by 1", [names]).fetchall()
        assert rows == [("bad", None, 0), (None, None, 2)]
        kind = connection.execute("select typeof(output_tokens), typeof(started_at) from read_parquet(?)", [names]).fetchone()
        assert kind == ("BIGINT", "TIMESTAMP WITH TIME ZONE")


def test_a_folder_output_has_numbered_parts_of_the_size_asked_for(tmp_path):
    source = make_source(tmp_path, {"prompt": [f"p{i}" for i in range(2500)]})
    work = make_work(tmp_path / "out")
    write_rows(work, [answer(row) for row in range(2500)])
    report = finish(source, work, rows_per_file=1000)
    assert [file.name for file in report.files] == [f"part-0000{i}.parquet" for i in range(3)]
    assert sorted(os.listdir(tmp_path / "out")) == [file.name for file in report.files]
    tables = [pq.ParquetFile(file).read() for file in report.files]
    assert [len(table) for table in tables] == [1000, 1000, 500]
    assert pa.concat_tables(tables)["row_index"].to_pylist() == list(range(2500))


def test_a_folder_output_of_no_rows_has_one_part_with_the_schema(tmp_path):
    source = make_source(tmp_path, pa.table({"prompt": pa.array([], pa.string())}))
    report = finish(source, make_work(tmp_path / "out"))
    assert [file.name for file in report.files] == ["part-00000.parquet"]
    assert pq.read_schema(report.files[0]).equals(output_schema(source.schema))


def test_a_hundred_thousand_rows_end_in_few_row_groups(tmp_path):
    num_rows = 100_000
    source = make_source(tmp_path, {"prompt": pa.array(np.arange(num_rows)).cast(pa.string())})
    work = make_work(tmp_path / "out.parquet")
    rows = np.random.default_rng(0).permutation(num_rows)
    for begin in range(0, num_rows, 1000):
        # As PartWriter makes them, without the time that 100,000 Python rows take.
        indices = np.sort(rows[begin : begin + 1000])
        columns = [pa.array(indices), pa.array(np.zeros(1000, np.int32))]
        columns += [pa.nulls(1000, item.type) for item in list(result_schema())[2:]]
        buffer = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_arrays(columns, schema=result_schema()), buffer, use_dictionary=False)
        work.add_part(memoryview(buffer.getvalue()), 1000)
    finish(source, work)
    output = pq.ParquetFile(tmp_path / "out.parquet")
    assert output.num_row_groups < 50
    table = output.read(["prompt", "row_index"])
    assert table["row_index"].equals(pa.chunked_array([pa.array(np.arange(num_rows))]))
    assert table["prompt"].equals(table["row_index"].cast(pa.string()))


def test_prefix_kept_columns_and_token_ids_shape_the_output(tmp_path):
    source = make_source(tmp_path, {"prompt": ["a", "b"], "error": ["old", "old"], "id": [1, 2]})
    work = make_work(tmp_path / "out.parquet")
    rows = [answer(0), answer(1)]
    rows[1].output_ids = [3, 4]
    write_rows(work, rows, return_token_ids=True)
    finish(source, work, keep=("id", "error"), prefix="r_", return_token_ids=True)
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.schema.equals(output_schema(source.schema, ("error", "id"), "r_", True))
    assert table["error"].to_pylist() == ["old", "old"]
    assert table["r_output_ids"].to_pylist() == [None, [3, 4]]


def test_no_kept_column_leaves_ours_alone(tmp_path):
    source = make_source(tmp_path, {"prompt": ["a"] * 1500})
    work = make_work(tmp_path / "out.parquet")
    write_rows(work, [answer(row) for row in range(1500)])
    finish(source, work, keep=())
    assert pq.read_table(tmp_path / "out.parquet").schema.equals(result_schema())


def test_the_footer_holds_fingerprint_and_summary(tmp_path):
    source = make_source(tmp_path, {"prompt": ["a"]})
    work = make_work(tmp_path / "out.parquet")
    write_rows(work, [answer(0)])
    finish(source, work, summary={"ok": 1})
    footer = json.loads(pq.read_schema(tmp_path / "out.parquet").metadata[b"batchrun"])
    assert footer == {"fingerprint": {"model": "m"}, "inputs": [], "job_id": work.job_id, "summary": {"ok": 1}}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([(0, 0), (2, 0)], "row 1 has no result"),
        ([(0, 0), (1, 0)], "row 2 has no result"),
        ([], "row 0 has no result"),
        ([(0, 0), (0, 0), (1, 0), (2, 0)], "row 0 has sample 0 twice"),
        ([(0, 0), (1, 1), (2, 0)], "row 1 has sample 1"),
        ([(0, 0), (1, 0), (2, 0), (3, 0)], "past the input's end: 3"),
        ([(0, 0), (1, 0), (2, 0)], "row 1 has 1 samples"),
    ],
)
def test_a_missing_or_double_result_is_never_written(tmp_path, rows, words):
    source = make_source(tmp_path, {"prompt": ["a", "b", "c"]})
    work = make_work(tmp_path / "out.parquet")
    write_rows(work, [answer(*key) for key in rows])
    with pytest.raises(AssertionError, match=words):
        finish(source, work, samples=np.array([1, 2 if words.endswith("1 samples") else 1, 1]))
    assert not (tmp_path / "out.parquet").exists()
    work.close()


# --- bytes that are not UTF-8 ----------------------------------------------------------------------------------------------


def test_bad_bytes_become_replacement_characters_and_the_error_says_so(tmp_path):
    inner = bad_text(b"fine", b"\xfe", b"fine")
    nested = pa.ListArray.from_arrays([0, 1, 2, 3], pa.StructArray.from_arrays([inner], ["content"]))
    columns = {
        "prompt": bad_text(b"x", "ü".encode(), b"a\xffb"),
        "messages": nested,
        "raw": [b"\xff"] * 3,
        "dict": bad_text(b"y", b"y\xff", b"y").dictionary_encode(),
    }
    source = make_source(tmp_path, columns)
    work = make_work(tmp_path / "out.parquet")
    write_rows(work, [answer(0), answer(1), error_row(2, "not UTF-8", 0)])
    report = finish(source, work)
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.schema.equals(output_schema(source.schema))
    assert table["prompt"].to_pylist() == ["x", "ü", "a\ufffdb"]
    assert table["messages"].to_pylist() == [[{"content": "fine"}], [{"content": "\ufffd"}], [{"content": "fine"}]]
    assert table["raw"].to_pylist() == [b"\xff"] * 3
    assert table["dict"].to_pylist() == ["y", "y\ufffd", "y"]
    errors = table["error"].to_pylist()
    assert errors[0] is None
    assert errors[1].startswith("column 'messages' is not valid UTF-8")
    assert errors[2] == "not UTF-8"
    assert report.repaired_rows == 2
    with duckdb.connect() as connection:
        found = connection.execute("select prompt from read_parquet(?)", [str(tmp_path / "out.parquet")]).fetchall()
    assert found == [("x",), ("ü",), ("a\ufffdb",)]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
def test_repair_keeps_type_and_nulls(kind):
    column = pa.concat_arrays([bad_text(b"\xc3"), pa.array([None, "é"], pa.string())]).cast(kind)
    repaired = repair_utf8(column)
    assert repaired.column.type == kind
    assert repaired.column.to_pylist() == ["\ufffd", None, "é"]
    assert repaired.bad.tolist() == [True, False, False]


def test_repair_reaches_maps_and_leaves_other_members_as_they_are():
    times = pa.array([1, 2], pa.timestamp("ns"))
    items = pa.StructArray.from_arrays([bad_text(b"\xff", b"ok"), times], ["text", "time"])
    column = pa.MapArray.from_arrays([0, 1, 2], pa.array(["k", "l"]), items)
    repaired, bad = repair_utf8(column)
    assert bad.tolist() == [True, False]
    repaired.validate(full=True)
    struct = repaired.items
    assert struct.field("text").to_pylist() == ["\ufffd", "ok"]
    assert struct.field("time").equals(times)


def test_valid_columns_are_the_very_same_array():
    column = pa.array(["a", "é", None])
    assert repair_utf8(column).column is column


# --- when the disk or the input goes away ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["out.parquet", "out"])
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_at_the_end_stops_and_can_be_resumed(tmp_path, monkeypatch, step, name):
    source = make_source(tmp_path, {"prompt": ["a", "b"]})
    work = make_work(tmp_path / name)
    write_rows(work, [answer(0), answer(1)])

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, step, full)
        with pytest.raises(Stopped, match=r"no space left on the disk.*--resume"):
            finish(source, work)
    work.close()
    assert not (tmp_path / name).exists()
    again = prepare(tmp_path / name, {"model": "m"}, resume=True).work
    assert len(again.done().row_index) == 2
    finish(source, again)
    assert pq.read_table(tmp_path / name)["output"].to_pylist() == ["answer 0/0", "answer 1/0"]


def test_parquet_on_a_full_device_stops_with_the_path(tmp_path):
    source = make_source(tmp_path, {"prompt": ["a"]})
    work = make_work(tmp_path / "out.parquet")
    write_rows(work, [answer(0)])
    (work.path / "output.parquet").symlink_to("/dev/full")
    with pytest.raises(Stopped, match=r"output\.parquet: no space left"):
        finish(source, work)
    work.close()


def test_an_input_that_changed_stops_and_keeps_the_work(tmp_path):
    source = make_source(tmp_path, {"prompt": ["a"]})
    work = make_work(tmp_path / "out.parquet")
    write_rows(work, [answer(0)])
    make_source(tmp_path, {"prompt": ["a", "inserted"]})
    with pytest.raises(Stopped, match="changed while it was being read"):
        finish(source, work)
    assert len(work.done().row_index) == 1
    work.close()


def test_an_output_that_appeared_during_the_run_is_not_overwritten(tmp_path):
    source = make_source(tmp_path, {"prompt": ["a"]})
    work = make_work(tmp_path / "out.parquet")
    write_rows(work, [answer(0)])
    (tmp_path / "out.parquet").write_text("precious")
    with pytest.raises(Stopped, match="appeared during the run"):
        finish(source, work)
    assert (tmp_path / "out.parquet").read_text() == "precious"
    assert work_path(tmp_path / "out.parquet").exists()
    work.close()
