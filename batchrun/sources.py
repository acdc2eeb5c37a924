"""Parquet files, folders and globs as one stream of Arrow batches; the whole table is never in memory."""

import glob
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from batchrun.errors import Refused

READ_BUFFER_BYTES = 1 << 20
"""Reading column chunks through a buffer keeps a row group of any size within bounds: unbuffered, a chunk is read whole."""
BATCH_BYTES = 64 << 20
"""Plain size of a batch, about."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One input file and what it was when it was opened."""

    path: str
    num_rows: int
    size: int
    """Bytes."""
    mtime_ns: int


@dataclass(frozen=True)
class Source:
    """Input files in their order, read as one table; rows are numbered from 0 across all of them."""

    files: tuple[SourceFile, ...]
    schema: pa.Schema
    """Unified over the files, columns in the first file's order, without schema metadata."""
    _hash: list[str] = field(default_factory=list, repr=False, compare=False)

    @property
    def num_rows(self) -> int:
        return sum(file.num_rows for file in self.files)

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(file.path for file in self.files)

    def batches(self, columns: list[str] | None = None, batch_rows: int = 1024) -> Iterator[pa.RecordBatch]:
        """Stream the rows in order, at most `batch_rows` at a time.

        Columns come in the order asked for (None: all, in the schema's order) and in the unified types. Strings are not
        checked to be UTF-8.

        Raises:
            Refused: a file cannot be read to its end, has changed since it was opened, or holds a value that does not fit
                the type that the files share.
        """
        names = self.schema.names if columns is None else columns
        wanted = pa.schema([self.schema.field(name) for name in names])
        for file in self.files:
            num_rows = 0
            for batch in _read_file(file, names, batch_rows):
                num_rows += batch.num_rows
                yield _conform(batch, wanted, file.path)
            if num_rows != file.num_rows:
                raise Refused(f"{file.path}: holds {num_rows} rows, its footer says {file.num_rows}: write the file again")

    def content_hash(self) -> str:
        """xxh3_128 over the files' bytes and sizes in order, not their names; read in chunks, computed once."""
        if not self._hash:
            digest = xxhash.xxh3_128()
            for file in self.files:
                _check_unchanged(file)
                digest.update(file.size.to_bytes(8, "little"))
                with open(file.path, "rb") as stream:
                    while chunk := stream.read(READ_BUFFER_BYTES):
                        digest.update(chunk)
            self._hash.append(digest.hexdigest())
        return self._hash[0]


def open_source(inputs: tuple[str, ...]) -> Source:
    """Find the input files and read their footers.

    Each input is a Parquet file, a folder (every *.parquet below it, sorted by relative path; names that begin with `.` or
    `_` are skipped) or a glob; a name that exists is taken as it is, even when it holds `[` or `*`.

    Raises:
        Refused: nothing found, a file named twice, cut or not Parquet, no columns, or columns that differ between files.
    """
    if not inputs:
        raise Refused("no input: name a Parquet file, a folder or a glob")
    paths: dict[str, str] = {}
    for name in inputs:
        for path in _expand(name):
            real = os.path.realpath(path)
            if real in paths:
                raise Refused(f"{path}: named twice among the inputs: its rows would be run twice, name it once")
            paths[real] = path
    files: list[SourceFile] = []
    schemas: list[pa.Schema] = []
    for path in paths.values():
        file, schema = _read_footer(path)
        files.append(file)
        schemas.append(schema)
    return Source(tuple(files), _unify(schemas, [file.path for file in files]))


def _expand(name: str) -> list[str]:
    if not name:
        raise Refused("an input is empty text, perhaps an unset variable of the shell: name a file, a folder or a glob")
    path = Path(name)
    if path.is_dir():
        return _folder_files(path)
    if os.path.lexists(path):
        return [name]
    if not glob.has_magic(name):
        raise Refused(f"{name}: no such file or folder: check the path")
    matches = sorted(glob.glob(name, recursive=True))
    files: list[str] = []
    for match in matches:
        if Path(match).is_dir():
            if "**" not in name:
                files += _folder_files(Path(match))
        else:
            files.append(match)
    if not files:
        raise Refused(f"{name}: no file matches: check the pattern, and quote it so that the shell leaves it alone")
    return files


def _folder_files(folder: Path) -> list[str]:
    found: list[tuple[tuple[str, ...], str]] = []

    def fail(error: OSError) -> None:
        raise Refused(f"{error.filename}: cannot be read: {error.strerror}") from error

    for root, folders, names in os.walk(folder, onerror=fail):
        # The work folder of a run that did not finish holds part files, which are no input.
        folders[:] = [name for name in folders if not name.startswith((".", "_")) and not name.endswith(".batchrun")]
        for name in names:
            if name.endswith(".parquet") and not name.startswith((".", "_")):
                path = Path(root, name)
                found.append((path.relative_to(folder).parts, str(path)))
    if not found:
        raise Refused(f"{folder}: the folder holds no .parquet file: name a folder that does, or the files")
    return [path for _, path in sorted(found)]


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0].rstrip(". ")


def _read_footer(path: str) -> tuple[SourceFile, pa.Schema]:
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise Refused(f"{path}: is not a regular file: write the rows to a Parquet file first")
        with pq.ParquetFile(path) as parquet:
            schema = parquet.schema_arrow
            num_rows = parquet.metadata.num_rows
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise Refused(f"{path}: cut off or not a Parquet file: write it again or name another ({_first_line(error)})") from error
    except OSError as error:
        reason = error.strerror or _first_line(error)
        raise Refused(f"{path}: cannot be read: {reason}: check the file and its permissions") from error
    if not schema.names:
        raise Refused(f"{path}: has no columns: name a file with a prompt or messages column")
    for name in schema.names:
        if schema.names.count(name) > 1:
            raise Refused(f"{path}: column {name!r} appears twice: give each column its own name")
    return SourceFile(path, num_rows, status.st_size, status.st_mtime_ns), schema.remove_metadata()


def _check_unchanged(file: SourceFile) -> None:
    try:
        status = os.stat(file.path)
    except OSError as error:
        raise Refused(f"{file.path}: cannot be read any more: {error.strerror}") from error
    if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
        raise Refused(f"{file.path}: changed while it was being read: run again on a file that stays as it is")


def _read_file(file: SourceFile, names: list[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
    _check_unchanged(file)
    try:
        with pq.ParquetFile(file.path, pre_buffer=False, buffer_size=READ_BUFFER_BYTES) as parquet:
            yield from parquet.iter_batches(_rows_that_fit(parquet.metadata, batch_rows), columns=names)
    except (pa.ArrowException, OSError) as error:
        raise Refused(f"{file.path}: cannot be read to its end: write the file again ({_first_line(error)})") from error


def _rows_that_fit(metadata: pq.FileMetaData, batch_rows: int) -> int:
    """Fewer rows a batch where rows are very large."""
    size: int = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    per_row: int = max(1, size // max(1, metadata.num_rows))
    return max(1, min(batch_rows, BATCH_BYTES // per_row))


def _conform(batch: pa.RecordBatch, wanted: pa.Schema, path: str) -> pa.RecordBatch:
    if not wanted.names:
        return batch
    arrays = []
    for target in wanted:
        column = batch.column(batch.schema.get_field_index(target.name))
        if column.type != target.type:
            try:
                column = column.cast(target.type)
            except pa.ArrowInvalid as error:
                raise Refused(
                    f"{path}: column {target.name!r} is {batch.schema.field(target.name).type}, and a value does not fit "
                    f"{target.type}, which the files share: write the column in one type ({_first_line(error)})"
                ) from error
        arrays.append(column)
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)


# --- one schema for all files ---------------------------------------------------------------------------------------------


def _unify(schemas: list[pa.Schema], paths: list[str]) -> pa.Schema:
    fields = {item.name: item for item in schemas[0]}
    for schema, path in zip(schemas[1:], paths[1:], strict=True):
        for name in fields:
            if name not in schema.names:
                raise Refused(f"{path}: column {name!r} is missing, which {paths[0]} has: give all files the same columns")
        for item in schema:
            if item.name not in fields:
                raise Refused(f"{path}: column {item.name!r} is not in {paths[0]}: give all files the same columns")
            known = fields[item.name]
            kind = common_type(known.type, item.type)
            if kind is None:
                raise Refused(
                    f"{path}: column {item.name!r} is {item.type}, before it was {known.type}: write it in one type in all files"
                )
            fields[item.name] = known.with_type(kind).with_nullable(known.nullable or item.nullable)
    return pa.schema(list(fields.values()))


def is_text(kind: pa.DataType) -> bool:
    """Whether values are strings: string, large_string or string_view."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def text_type(kind: pa.DataType) -> pa.DataType | None:
    """The string type of a text column or of a dictionary's values; None for every other kind."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return kind if is_text(kind) else None


def common_type(left: pa.DataType, right: pa.DataType) -> pa.DataType | None:
    """The type that holds both, or None. Text never becomes binary; dictionaries of text and text meet as text."""
    if left == right:
        return left
    left_text, right_text = text_type(left), text_type(right)
    if left_text is not None and right_text is not None:
        both_dictionaries = pa.types.is_dictionary(left) and pa.types.is_dictionary(right)
        if not (both_dictionaries and left_text == right_text):
            small = pa.types.is_string(left_text) and pa.types.is_string(right_text)
            return pa.string() if small else pa.large_string()
    elif (left_text is not None or right_text is not None) and not (pa.types.is_null(left) or pa.types.is_null(right)):
        return None
    if pa.types.is_nested(left) and pa.types.is_nested(right) and _mixes_text(left, right):
        return None
    try:
        unified = pa.unify_schemas([pa.schema([("x", left)]), pa.schema([("x", right)])], promote_options="permissive")
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        return None
    return unified.field(0).type


def _mixes_text(left: pa.DataType, right: pa.DataType) -> bool:
    """Whether somewhere inside, one is text where the other is bytes: Arrow would unify them to bytes."""

    def is_bytes(kind: pa.DataType) -> bool:
        return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))

    if (is_text(left) and is_bytes(right)) or (is_bytes(left) and is_text(right)):
        return True
    if pa.types.is_struct(left) and pa.types.is_struct(right):
        inner = {item.name: item.type for item in left}
        return any(item.name in inner and _mixes_text(inner[item.name], item.type) for item in right)
    if left.num_fields == right.num_fields:
        return any(_mixes_text(left.field(i).type, right.field(i).type) for i in range(left.num_fields))
    return False
