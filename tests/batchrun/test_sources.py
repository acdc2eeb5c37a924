"""Parquet files, folders and globs as one stream."""

import os
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun.errors import Refused
from batchrun.sources import Source, SourceFile, common_type, open_source


def write(path: Path, table: pa.Table | dict, **options) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table if isinstance(table, pa.Table) else pa.table(table), path, **options)
    return str(path)


def read(source, columns=None) -> pa.Table:
    batches = list(source.batches(columns))
    return pa.Table.from_batches(batches, schema=batches[0].schema)


def test_a_folder_is_read_in_order_without_hidden_names(tmp_path):
    for name in (
        "b.parquet",
        "a/z.parquet",
        "a/y.parquet",
        "_tmp/n.parquet",
        ".x/n.parquet",
        "o.batchrun/n.parquet",
        "_m.parquet",
        ".h.parquet",
    ):
        write(tmp_path / "in" / name, {"prompt": [name]})
    (tmp_path / "in" / "README.md").write_text("no data")
    source = open_source((str(tmp_path / "in"),))
    assert read(source)["prompt"].to_pylist() == ["a/y.parquet", "a/z.parquet", "b.parquet"]
    assert source.num_rows == 3


def test_globs_match_and_names_with_brackets_are_taken_as_they_are(tmp_path):
    write(tmp_path / "run [v2]" / "x[1].parquet", {"prompt": ["literal"]})
    write(tmp_path / "x1.parquet", {"prompt": ["one"]})
    write(tmp_path / "x2.parquet", {"prompt": ["two"]})
    assert read(open_source((str(tmp_path / "run [v2]"),)))["prompt"].to_pylist() == ["literal"]
    assert read(open_source((str(tmp_path / "run [v2]" / "x[1].parquet"),)))["prompt"].to_pylist() == ["literal"]
    assert read(open_source((str(tmp_path / "x[12].parquet"),)))["prompt"].to_pylist() == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gone.parquet", "no such file"),
        ("empty", "holds no .parquet file"),
        ("none-*.parquet", "no file matches"),
        ("text.parquet", "not a Parquet file"),
        ("cut.parquet", "cut off or not a Parquet file"),
        ("nothing.parquet", "has no columns"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line_that_names_it(tmp_path, name, words):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.parquet").write_text("prompt\nhello, this is a CSV file\n")
    whole = Path(write(tmp_path / "whole.parquet", {"prompt": ["x" * 1000]}))
    (tmp_path / "cut.parquet").write_bytes(whole.read_bytes()[:-40])
    write(tmp_path / "nothing.parquet", pa.table({}))
    with pytest.raises(Refused, match=words) as caught:
        open_source((str(tmp_path / name),))
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pipe_is_refused_before_it_blocks(tmp_path):
    os.mkfifo(tmp_path / "pipe.parquet")
    with pytest.raises(Refused, match="not a regular file"):
        open_source((str(tmp_path / "pipe.parquet"),))


def test_a_file_cut_inside_its_data_is_refused_when_read(tmp_path):
    path = Path(write(tmp_path / "a.parquet", {"prompt": [str(i) * 50 for i in range(5000)]}, compression="none"))
    content = bytearray(path.read_bytes())
    content[4:3000] = bytes(2996)
    path.write_bytes(content)
    source = open_source((str(path),))
    with pytest.raises(Refused, match=r"a\.parquet"):
        list(source.batches())


def test_the_same_file_named_twice_is_refused(tmp_path):
    path = write(tmp_path / "a.parquet", {"prompt": ["x"]})
    with pytest.raises(Refused, match="named twice"):
        open_source((path, str(tmp_path / "*.parquet")))


def test_a_column_that_one_file_lacks_is_refused_with_file_and_column(tmp_path):
    first = write(tmp_path / "a.parquet", {"prompt": ["x"], "id": [1]})
    second = write(tmp_path / "b.parquet", {"prompt": ["y"]})
    for inputs in ((first, second), (second, first)):
        with pytest.raises(Refused, match="'id'") as caught:
            open_source(inputs)
        assert inputs[1] in str(caught.value)


def test_a_column_of_another_kind_in_one_file_is_refused(tmp_path):
    first = write(tmp_path / "a.parquet", {"prompt": ["x"]})
    second = write(tmp_path / "b.parquet", {"prompt": [b"y"]})
    with pytest.raises(Refused, match=r"b\.parquet: column 'prompt' is binary, before it was string"):
        open_source((first, second))


def test_columns_in_another_order_and_in_like_types_become_one(tmp_path):
    first = write(tmp_path / "a.parquet", {"prompt": ["x"], "id": pa.array([1], pa.int32())})
    second = write(tmp_path / "b.parquet", {"id": pa.array([2**40], pa.int64()), "prompt": pa.array(["y"], pa.large_string())})
    third = write(tmp_path / "c.parquet", {"id": pa.nulls(1), "prompt": pa.array(["z"]).dictionary_encode()})
    source = open_source((first, second, third))
    assert source.schema == pa.schema([("prompt", pa.large_string()), ("id", pa.int64())])
    assert read(source).to_pydict() == {"prompt": ["x", "y", "z"], "id": [1, 2**40, None]}


def test_structs_that_lack_a_member_in_one_file_get_it_as_null(tmp_path):
    first = write(tmp_path / "a.parquet", {"messages": [[{"role": "user", "content": "hi"}]]})
    second = write(tmp_path / "b.parquet", {"messages": [[{"content": "yo", "role": "user", "name": "n"}]]})
    rows = read(open_source((first, second)))["messages"].to_pylist()
    assert rows == [[{"role": "user", "content": "hi", "name": None}], [{"role": "user", "content": "yo", "name": "n"}]]


def test_text_and_bytes_never_meet_even_inside_structs():
    text, binary = pa.struct([("a", pa.string())]), pa.struct([("a", pa.binary())])
    assert common_type(pa.list_(text), pa.list_(binary)) is None
    assert common_type(pa.list_(text), pa.list_(text)) == pa.list_(text)
    assert common_type(pa.string(), pa.int64()) is None


def test_an_integer_that_its_shared_type_cannot_hold_is_refused_not_rounded(tmp_path):
    first = write(tmp_path / "a.parquet", {"x": [0.5]})
    second = write(tmp_path / "b.parquet", {"x": [2**53 + 1]})
    with pytest.raises(Refused, match=r"b\.parquet: column 'x'"):
        list(open_source((first, second)).batches())


def test_columns_come_in_the_order_asked_for_and_batches_are_small(tmp_path):
    path = write(tmp_path / "a.parquet", {"a": list(range(3000)), "b": list(range(3000)), "c.d": list(range(3000))})
    source = open_source((path,))
    batches = list(source.batches(["c.d", "a"], 1000))
    assert [batch.schema.names for batch in batches] == [["c.d", "a"]] * 3
    assert [batch.num_rows for batch in batches] == [1000] * 3
    assert [batch.num_rows for batch in source.batches([])] == [1024, 1024, 952]


def test_rows_of_a_megabyte_come_a_few_at_a_time(tmp_path):
    path = write(tmp_path / "a.parquet", {"a": [chr(97 + i % 26) * (1 << 20) for i in range(130)]}, use_dictionary=False)
    sizes = [batch.num_rows for batch in open_source((path,)).batches()]
    assert sum(sizes) == 130
    assert max(sizes) <= 64


def test_bytes_that_are_not_utf8_pass_through_the_reader(tmp_path):
    offsets = pa.py_buffer(np.array([0, 3], np.int32))
    bad = pa.Array.from_buffers(pa.string(), 1, [None, offsets, pa.py_buffer(b"a\xffb")])
    source = open_source((write(tmp_path / "a.parquet", {"prompt": bad}),))
    assert read(source)["prompt"].chunk(0).cast(pa.binary()).to_pylist() == [b"a\xffb"]


def test_every_type_comes_back_value_for_value_from_one_row_group_or_many(tmp_path):
    zoo = pa.table(
        {
            "view": pa.array(["a", None, "c"], pa.string_view()),
            "dict": pa.array(["a", "b", "a"]).dictionary_encode(),
            "decimal": pa.array([Decimal("1.50"), None, Decimal("2.25")], pa.decimal128(10, 2)),
            "map": pa.array([[("a", 1)], [], None], pa.map_(pa.string(), pa.int32())),
            "time": pa.array([1, 2, None], pa.timestamp("ns", "America/New_York")),
            "list": pa.array([[1], None, [2, 3]], pa.large_list(pa.int16())),
            "null": pa.nulls(3),
        }
    )
    for rows in (1, 100):
        source = open_source((write(tmp_path / f"{rows}.parquet", zoo, row_group_size=rows),))
        assert read(source).cast(zoo.schema).equals(zoo)


def test_a_file_of_no_rows_has_a_schema(tmp_path):
    source = open_source((write(tmp_path / "a.parquet", pa.table({"prompt": pa.array([], pa.string())})),))
    assert source.num_rows == 0
    assert source.schema.names == ["prompt"]
    assert list(source.batches()) == []


def test_the_hash_is_of_content_and_order_not_names(tmp_path):
    first, second = write(tmp_path / "a.parquet", {"prompt": ["x"]}), write(tmp_path / "b.parquet", {"prompt": ["y"]})
    moved = write(tmp_path / "c.parquet", {"prompt": ["x"]})
    assert open_source((first,)).content_hash() == open_source((moved,)).content_hash()
    assert len(open_source((first,)).content_hash()) == 32
    assert open_source((first, second)).content_hash() != open_source((second, first)).content_hash()


def test_the_hash_knows_where_a_file_ends(tmp_path):
    hashes = []
    for contents in (("ab", "c"), ("a", "bc")):
        files = []
        for i, content in enumerate(contents):
            path = tmp_path / f"{len(hashes)}{i}"
            path.write_text(content)
            files.append(SourceFile(str(path), 1, len(content), path.stat().st_mtime_ns))
        hashes.append(Source(tuple(files), pa.schema([])).content_hash())
    assert hashes[0] != hashes[1]


def test_a_file_with_fewer_rows_than_its_footer_says_is_refused(tmp_path):
    source = open_source((write(tmp_path / "a.parquet", {"prompt": ["x"]}),))
    source = Source((replace(source.files[0], num_rows=2),), source.schema)
    with pytest.raises(Refused, match="holds 1 rows, its footer says 2"):
        list(source.batches())


def test_a_file_that_changes_after_it_was_opened_is_refused(tmp_path):
    path = write(tmp_path / "a.parquet", {"prompt": ["x"]})
    source = open_source((path,))
    write(tmp_path / "a.parquet", {"prompt": ["x", "y"]})
    with pytest.raises(Refused, match="changed"):
        list(source.batches())
    with pytest.raises(Refused, match="changed"):
        source.content_hash()
