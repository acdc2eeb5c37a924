"""Part files as rows finish; at the end input order restored, input columns joined, one atomic rename."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.disk import sync_file, sync_folder, writing
from batchrun.errors import Refused, Stopped
from batchrun.ledger import REPLACED, WorkFolder
from batchrun.merge import sorted_results
from batchrun.results import ResultRow, kept_columns, output_schema, to_batch
from batchrun.resume import FOOTER_KEY
from batchrun.sources import Source
from batchrun.utf8 import repair_utf8

ROW_GROUP_ROWS = 1 << 16
ROW_GROUP_BYTES = 128 << 20
ERROR_COLUMN = 4
"""Place of `error` among the added columns."""


class PartWriter:
    """Collects results and writes them as parts of a work folder.

    Args:
        work: the open work folder.
        schema: result_schema(return_token_ids=...), without prefix.
        flush_seconds: longest time that a finished row waits for its part.
        max_rows: rows that make a part at once.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        work: WorkFolder,
        schema: pa.Schema,
        flush_seconds: float = 10.0,
        max_rows: int = 1000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._work = work
        self._schema = schema
        self._flush_seconds = flush_seconds
        self._max_rows = max_rows
        self._clock = clock
        self._rows: list[ResultRow] = []
        self._oldest = 0.0

    def add(self, row: ResultRow) -> None:
        """Take a finished row; writes a part when one is due.

        Raises:
            Stopped: the disk is full or lost.
        """
        if not self._rows:
            self._oldest = self._clock()
        self._rows.append(row)
        self.flush_if_due()

    def flush_if_due(self) -> None:
        """Write a part when the oldest waiting row has waited `flush_seconds`, or `max_rows` wait. Cheap: call it each step."""
        if self._rows and (len(self._rows) >= self._max_rows or self._clock() - self._oldest >= self._flush_seconds):
            self.flush()

    def flush(self) -> None:
        """Make the waiting rows durable now."""
        if not self._rows:
            return
        rows = sorted(self._rows, key=lambda row: (row.row_index, row.sample))
        buffer = pa.BufferOutputStream()
        with pq.ParquetWriter(buffer, self._schema, compression="zstd", use_dictionary=False) as writer:
            writer.write_batch(to_batch(rows, self._schema))
        self._work.add_part(memoryview(buffer.getvalue()), len(rows))
        self._rows = []

    def close(self) -> None:
        """Flush what waits."""
        self.flush()


@dataclass(frozen=True, slots=True)
class FinishReport:
    """What the final output is."""

    files: tuple[Path, ...]
    rows: int
    """Output rows: samples."""
    repaired_rows: int
    """Output rows in which input bytes that are not UTF-8 became U+FFFD; their `error` says so."""


def finish(
    source: Source,
    work: WorkFolder,
    *,
    keep: Iterable[str] | None = None,
    prefix: str = "",
    return_token_ids: bool = False,
    summary: dict[str, Any] | None = None,
    samples: npt.NDArray[np.integer[Any]] | None = None,
    rows_per_file: int = 1_000_000,
) -> FinishReport:
    """Write `work.output` from the parts and the input, rename it into place and remove the work folder.

    Rows are in input order, then sample order; an input row is repeated for each of its samples. The footer's metadata
    (key `batchrun`) holds fingerprint, inputs, job id and summary as JSON.

    Args:
        keep: input columns to carry over; None is all.
        samples: [source.num_rows] how many samples each row must have; None only wants 0, 1, ... without a gap.
        rows_per_file: of a folder output.

    Raises:
        AssertionError: a row or sample is missing or there twice.
        Stopped: the disk is full or lost, or the input changed; the work folder stays as it was.
    """
    schema = output_schema(source.schema, keep, prefix, return_token_ids)
    footer = {"fingerprint": work.fingerprint, "inputs": work.inputs, "job_id": work.job_id, "summary": summary or {}}
    schema = schema.with_metadata({FOOTER_KEY: json.dumps(footer).encode()})
    joined = _Joined(source, work, schema, kept_columns(source.schema, keep), samples)
    is_file = work.output.suffix == ".parquet"
    temporary = work.path / ("output.parquet" if is_file else "output")
    with writing(temporary):
        paths = _write(temporary, schema, joined.batches(), None if is_file else rows_per_file)
        _rename(temporary, work)
    work.remove()
    files = [work.output if is_file else work.output / path.name for path in paths]
    return FinishReport(tuple(files), joined.num_rows, joined.num_repaired)


def _rename(temporary: Path, work: WorkFolder) -> None:
    output = work.output
    if os.path.lexists(output) and not work.overwrite:
        raise Stopped(f"{output}: appeared during the run: move it away, then type the command again with --resume")
    if temporary.is_dir() and output.is_dir():
        # A folder cannot replace one that is not empty: the old one steps aside first.
        shutil.rmtree(work.path / REPLACED, ignore_errors=True)
        os.rename(output, work.path / REPLACED)
    os.replace(temporary, output)
    sync_folder(output.absolute().parent)


def _write(temporary: Path, schema: pa.Schema, batches: Iterator[pa.RecordBatch], rows_per_file: int | None) -> list[Path]:
    """One file (rows_per_file None) or a folder of part files; at least one file, be it of 0 rows."""
    if rows_per_file is None:
        with _FileWriter(temporary, schema) as writer:
            for batch in batches:
                writer.add(batch)
        return [temporary]
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    paths: list[Path] = []
    rest = next(batches, None)
    while rest is not None or not paths:
        paths.append(temporary / f"part-{len(paths):05d}.parquet")
        with _FileWriter(paths[-1], schema) as writer:
            while rest is not None and writer.num_rows < rows_per_file:
                head = rest.slice(0, rows_per_file - writer.num_rows)
                writer.add(head)
                rest = rest.slice(head.num_rows) if head.num_rows < rest.num_rows else next(batches, None)
    sync_folder(temporary)
    return paths


class _FileWriter:
    """One Parquet file of row groups that are large and yet fit in memory; synced when closed."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.num_rows = 0
        self._path = path
        self._schema = schema
        self._writer = pq.ParquetWriter(path, schema, compression="zstd")
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = 0
        self._waiting_bytes = 0

    def add(self, batch: pa.RecordBatch) -> None:
        self._waiting.append(batch)
        self.num_rows += batch.num_rows
        self._waiting_rows += batch.num_rows
        self._waiting_bytes += batch.nbytes
        if self._waiting_rows >= ROW_GROUP_ROWS or self._waiting_bytes >= ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        table = pa.Table.from_batches(self._waiting, self._schema)
        self._writer.write_table(table, row_group_size=max(1, len(table)))
        self._waiting, self._waiting_rows, self._waiting_bytes = [], 0, 0

    def __enter__(self) -> "_FileWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and self._waiting:
                self._flush()
        finally:
            self._writer.close()
        if kind is None:
            sync_file(self._path)


class _Joined:
    """The output's batches: the input read once more, beside each row its results."""

    def __init__(
        self,
        source: Source,
        work: WorkFolder,
        schema: pa.Schema,
        keep: list[str],
        samples: npt.NDArray[np.integer[Any]] | None,
    ) -> None:
        self.num_rows = 0
        self.num_repaired = 0
        self._source = source
        self._tables = sorted_results(work)
        self._schema = schema
        self._keep = keep
        self._samples = samples
        self._rest: pa.Table | None = None

    def batches(self) -> Iterator[pa.RecordBatch]:
        first = 0
        try:
            for batch in self._source.batches(self._keep):
                if batch.num_rows:
                    yield self._join(batch, first)
                first += batch.num_rows
        except Refused as error:
            raise Stopped(f"{error} (what is finished is kept, --resume goes on)") from error
        assert first == self._source.num_rows, f"{first} input rows read, {self._source.num_rows} expected"
        left = self._next_results(np.iinfo(np.int64).max)
        assert left is None or len(left) == 0, f"results of rows past the input's end: {left.column(0)[0]}"

    def _join(self, batch: pa.RecordBatch, first: int) -> pa.RecordBatch:
        results = self._next_results(first + batch.num_rows)
        assert results is not None, f"row {first} has no result"
        indices = results.column(0).to_numpy() - first
        self._check(indices, results.column(1).to_numpy(), first, batch.num_rows)
        is_same = len(indices) == batch.num_rows
        columns = []
        bad = np.zeros(len(indices), dtype=bool)
        notes: list[str | None] = [None] * len(indices)
        for name in self._keep:
            repaired = repair_utf8(batch.column(name))
            columns.append(repaired.column if is_same else _repeat(repaired.column, indices))
            for i in np.flatnonzero(repaired.bad[indices]):
                bad[i] = True
                notes[i] = notes[i] or f"column {name!r} is not valid UTF-8: its bad bytes became U+FFFD"
        added = [column.combine_chunks() for column in results.columns]
        if bad.any():
            errors = added[ERROR_COLUMN].to_pylist()
            added[ERROR_COLUMN] = pa.array([error or note for error, note in zip(errors, notes, strict=True)], pa.string())
        self.num_rows += len(indices)
        self.num_repaired += int(bad.sum())
        return pa.RecordBatch.from_arrays([*columns, *added], schema=self._schema)

    def _check(self, indices: npt.NDArray[np.int64], sample: npt.NDArray[np.int32], first: int, num_rows: int) -> None:
        """Every row is there, with samples 0, 1, ... once each."""
        counts = np.bincount(indices, minlength=num_rows)
        missing = np.flatnonzero(counts == 0)
        assert not len(missing), f"row {first + missing[0]} has no result"
        begin = np.cumsum(counts) - counts
        wrong = np.flatnonzero(sample != np.arange(len(indices)) - begin[indices])
        assert not len(wrong), f"row {first + indices[wrong[0]]} has sample {sample[wrong[0]]} twice, or one before it is missing"
        if self._samples is not None:
            differ = np.flatnonzero(counts != self._samples[first : first + num_rows])
            assert not len(differ), f"row {first + differ[0]} has {counts[differ[0]]} samples"

    def _next_results(self, end: int) -> pa.Table | None:
        """All results of rows before `end` that have not been given yet; None when there are none."""
        found: list[pa.Table] = []
        while True:
            if self._rest is None:
                self._rest = next(self._tables, None)
                if self._rest is None:
                    break
            cut = int(np.searchsorted(self._rest.column(0).to_numpy(), end))
            found.append(self._rest.slice(0, cut))
            if cut < len(self._rest):
                self._rest = self._rest.slice(cut)
                break
            self._rest = None
        return pa.concat_tables(found) if any(len(table) for table in found) else None


def _repeat(column: pa.Array, indices: npt.NDArray[np.int64]) -> pa.Array:
    """column[indices], for types without a `take` too (string_view in pyarrow 26)."""
    try:
        return column.take(pa.array(indices))
    except pa.ArrowNotImplementedError:
        return pa.concat_arrays([column.slice(i, 1) for i in indices.tolist()])
