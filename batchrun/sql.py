"""SQL over an output: the view `rows`, and the result as a table, CSV, JSON or Parquet."""

import csv
import io
import json
import math
import os
import re
from collections.abc import Iterator
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc

from batchrun.errors import Refused
from batchrun.resume import FOOTER_KEY

FORMATS = ("table", "csv", "json", "parquet")
_TABLE_ROWS = 100  # a table is for reading; more belongs into another format
_CELL_WIDTH = 60  # characters of a value where there is no terminal to fit
_NARROWEST = 8
_BATCH_ROWS = 1024
_CHANGES = ("CREATE", "INSERT", "UPDATE", "DELETE", "DROP", "ALTER")  # statements without an effect on what is on disk
_HUGEINT = pa.decimal128(38, 0)  # what DuckDB's 128-bit integers become in Arrow
_SETTINGS: dict[str, str | bool | int | float | list[str]] = {
    # A query must not reach for the network, nor for a Python variable that has a table's name.
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "python_enable_replacements": False,
}


def query(output: Path, sql: str) -> pa.Table:
    """Run SQL (DuckDB's) over an output.

    The view `rows` holds the Parquet file, or the folder's `.parquet` files in the order of their names. Times with a
    zone are in UTC whatever the machine's zone is; sums of integers are int64 where they fit.

    Raises:
        Refused: there is no such output, it is not Parquet, or the SQL is wrong, more than one statement, or would change data.
    """
    import duckdb
    import pyarrow.dataset as ds

    files = _files(output)
    for file in files:
        _footer(file)
    rows = ds.dataset([str(file) for file in files], format="parquet")
    with duckdb.connect(config=_SETTINGS) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("rows", rows)
        try:
            statements = connection.extract_statements(sql)
            if len(statements) > 1:
                raise Refused(f"SQL: there are {len(statements)} statements and only one can be shown: ask them one by one")
            if any(statement.type.name in _CHANGES for statement in statements):
                raise Refused("SQL: the statement changes data, which lasts nowhere here: ask with SELECT ... FROM rows")
            result = connection.sql(sql)
            table = None if result is None else result.to_arrow_table()
        except duckdb.Error as error:
            unknown = re.search(r"Table with name (.+?) does not exist", str(error))
            said = f"there is no table {unknown[1]}: the view over the output is called rows" if unknown else _one_line(error)
            raise Refused(f"SQL: {said}") from error
    if table is None:
        raise Refused("SQL: the statement gives no rows: ask with SELECT ... FROM rows")
    return _narrow_integers(table)


def is_output(output: Path) -> bool:
    """Whether a Parquet file, or the first one of a folder, was written by `batchrun run`.

    Raises:
        Refused: there is no such file, or it is not Parquet.
    """
    return FOOTER_KEY in (_footer(_files(output)[0]).metadata or {})


def _footer(path: Path) -> pa.Schema:
    import pyarrow.parquet as pq

    try:
        return pq.read_schema(path)
    except pa.ArrowException as error:
        raise Refused(f"{path} cannot be read as Parquet: it is cut off, or something else") from error
    except OSError as error:
        raise Refused(f"{path} cannot be read as Parquet: {error.strerror or 'damaged'}") from error


def write(table: pa.Table, file_format: str, stream: BinaryIO, width: int | None = None) -> None:
    """Write a result as UTF-8 text, or as a Parquet file.

    - `table`: the first 100 rows, each value on one line and cut to fit.
    - `csv`: with a header; null and the empty string are both empty, lists and structs are JSON.
    - `json`: one array with an object per row, a row per line; NaN and infinities are null, bytes hexadecimal.
    - `parquet`: the whole file.

    Args:
        file_format: one of FORMATS.
        stream: where to; needs no seeking.
        width: columns of the terminal; None cuts each value of a `table` to 60 characters instead.

    Raises:
        Refused: an unknown format, or a type that Parquet does not have.
    """
    if file_format not in FORMATS:
        raise Refused(f"--format is {file_format!r}: it must be one of {', '.join(FORMATS)}")
    if file_format == "parquet":
        stream.write(_parquet_bytes(table))
        return
    if file_format == "table":
        texts = _table_text(table, width)
    else:
        texts = _csv_text(table) if file_format == "csv" else _json_text(table)
    for text in texts:
        stream.write(text.encode("utf-8", errors="replace"))


def save(table: pa.Table, file_format: str, path: Path) -> None:
    """Write a result to a new file, which appears when it is complete.

    Raises:
        Refused: the file exists, its folder does not, or as for `write`.
    """
    if path.exists():
        raise Refused(f"--output: {path} exists: give another name, or delete it first")
    if not path.parent.is_dir():
        raise Refused(f"--output: there is no folder {path.parent}")
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with part.open("xb") as stream:
            write(table, file_format, stream)
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)


def _files(output: Path) -> list[Path]:
    if output.is_dir():
        # Listed here, since a `[` in the folder's name would be a pattern to DuckDB.
        files = sorted(file for file in output.iterdir() if file.suffix == ".parquet" and not file.name.startswith("."))
        if not files:
            raise Refused(f"{output} holds no .parquet file")
        return files
    if output.is_file():
        return [output]
    if output.with_name(output.name + ".batchrun").is_dir():
        raise Refused(f"{output} is not finished: run the same `batchrun run` command with --resume first")
    raise Refused(f"there is no {output}: give the output of `batchrun run`, a .parquet file or a folder of them")


def _one_line(error: Exception) -> str:
    """The first line of a message, with DuckDB's suggestion where it has one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    hints = [line for line in lines[1:] if line.startswith(("Candidate bindings", "Did you mean"))]
    return " ".join([*lines[:1], *hints]) or type(error).__name__


def _narrow_integers(table: pa.Table) -> pa.Table:
    """128-bit integers, such as any sum of integers is to DuckDB, as int64 where all of them fit."""
    for i, column in enumerate(table.columns):
        if column.type != _HUGEINT:
            continue
        bounds = pc.min_max(column).as_py()
        if all(value is None or -(2**63) <= value < 2**63 for value in bounds.values()):
            table = table.set_column(i, table.schema.names[i], column.cast(pa.int64()))
    return table


def _parquet_bytes(table: pa.Table) -> memoryview:
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    try:
        pq.write_table(table.rename_columns(_unique(table.column_names)), sink)
    except pa.ArrowNotImplementedError as error:
        raise Refused(f"--format parquet cannot hold a column of this result: {_one_line(error)}") from error
    return memoryview(sink.getvalue())


def _unique(names: list[str]) -> list[str]:
    """`a, a` as `a, a_1`: an object and a Parquet file need distinct names."""
    taken: set[str] = set()
    result = []
    for name in names:
        candidate, number = name, 0
        while candidate in taken or (number and candidate in names):
            number += 1
            candidate = f"{name}_{number}"
        taken.add(candidate)
        result.append(candidate)
    return result


def _rows(table: pa.Table) -> Iterator[list[tuple[Any, ...]]]:
    """The rows' Python values, a thousand rows at a time."""
    for i, column in enumerate(table.columns):
        if pa.types.is_timestamp(column.type) and column.type.unit == "ns":
            # Python's datetime has microseconds.
            table = table.set_column(i, table.schema.names[i], column.cast(pa.string()))
    for batch in table.to_batches(max_chunksize=_BATCH_ROWS):
        yield list(zip(*(column.to_pylist() for column in batch.columns), strict=True))


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return _plain_scalar(value)


def _plain_scalar(value: Any) -> str | int | float:
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    return value.hex() if isinstance(value, bytes) else str(value)


def _json_text(table: pa.Table) -> Iterator[str]:
    names, before = _unique(table.column_names), "[\n"
    for rows in _rows(table):
        for row in rows:
            yield before + json.dumps(dict(zip(names, map(_plain, row), strict=True)), ensure_ascii=False)
            before = ",\n"
    yield "[]\n" if before == "[\n" else "\n]\n"


def _cell(value: Any) -> str:
    """A value as text; nothing for null."""
    if value is None:
        return ""
    if isinstance(value, bool | dict | list | tuple | bytes):
        plain = _plain(value)
        return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)
    return str(value)


def _csv_text(table: pa.Table) -> Iterator[str]:
    def lines(rows: list[Any]) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        return text.getvalue()

    yield lines([table.column_names])
    for rows in _rows(table):
        yield lines([[_cell(value) for value in row] for row in rows])


def _table_text(table: pa.Table, width: int | None) -> Iterator[str]:
    from rich.cells import cell_len

    shown = [row for rows in _rows(table.slice(0, _TABLE_ROWS)) for row in rows]
    cells = [[_table_cell(value) for value in row] for row in shown]
    names = [_printable(name) for name in table.column_names]
    widths = [max(cell_len(text) for text in column) for column in zip(names, *cells, strict=True)]
    widths = [min(wide, _CELL_WIDTH) for wide in widths] if width is None else _fit(widths, width)
    numeric = [_is_number(kind) for kind in table.schema.types]
    for row in (names, ["-" * wide for wide in widths], *cells):
        fitted = (_fit_cell(text, wide, right) for text, wide, right in zip(row, widths, numeric, strict=True))
        yield "  ".join(fitted).rstrip() + "\n"
    count = f"{table.num_rows} row" + ("" if table.num_rows == 1 else "s")
    yield f"({count})\n" if len(cells) == table.num_rows else f"({count}, the first {len(cells)} shown: --format csv gives all)\n"


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _table_cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.7g}"
    return "NULL" if value is None else _printable(_cell(value))


def _printable(text: str) -> str:
    """On one line, and with nothing that a terminal would obey."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: 10 * _CELL_WIDTH])


def _fit(widths: list[int], total: int) -> list[int]:
    """Cut the widest columns until all fit, none below a least width."""
    widths = list(widths)
    while sum(widths) + 2 * (len(widths) - 1) > total and max(widths) > _NARROWEST:
        widest = max(range(len(widths)), key=lambda i: widths[i])
        widths[widest] -= 1
    return widths


def _fit_cell(text: str, width: int, right: bool) -> str:
    from rich.cells import cell_len, set_cell_size

    if cell_len(text) > width:
        text = set_cell_size(text, max(0, width - 3)) + "..."[:width]
    padding = " " * (width - cell_len(text))
    return padding + text if right else text + padding
