"""Results of all parts in input order, with bounded memory.

The engine finishes rows in its own order, so one stretch of the input is spread over all parts. The keys are known and dense,
so a distribution sort does it in one pass: cut the row indices into stretches of about `bucket_bytes`, copy each result to its
stretch's file, then sort the stretches one by one in memory.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.disk import writing
from batchrun.ledger import WorkFolder

BUCKET_BYTES = 64 << 20
MAX_BUCKETS = 256
"""Each is an open file while results are dealt out."""


def sorted_results(work: WorkFolder, bucket_bytes: int = BUCKET_BYTES) -> Iterator[pa.Table]:
    """The parts' rows sorted by row_index, then sample; all samples of a row come in one table.

    Holds about two buckets at a time. Temporary files lie in the work folder.

    Raises:
        Stopped: the disk is full or lost.
    """
    total = sum(_plain_bytes(work.path / part.file) for part in work.parts)
    num_buckets = min(MAX_BUCKETS, -(-total // bucket_bytes))
    if num_buckets <= 1:
        if work.parts:
            yield _sort(pa.concat_tables(work.read_part(part) for part in work.parts))
        return
    folder = work.path / "buckets"
    with writing(folder):
        folder.mkdir(exist_ok=True)
        paths = _deal(work, folder, num_buckets, bucket_bytes)
    for path in paths:
        with writing(path):
            with pa.ipc.open_stream(str(path)) as reader:
                table = reader.read_all()
            path.unlink()
        if len(table):
            yield _sort(table)


def _plain_bytes(path: Path) -> int:
    """Size in memory, nearly: parts are written without dictionaries, so their pages are the values."""
    with pq.ParquetFile(path) as parquet:
        return sum(parquet.metadata.row_group(i).total_byte_size for i in range(parquet.metadata.num_row_groups))


def _deal(work: WorkFolder, folder: Path, num_buckets: int, bucket_bytes: int) -> list[Path]:
    """Copy all rows to the files of their buckets."""
    row_index = np.sort(work.done().row_index)
    bounds = row_index[np.arange(1, num_buckets) * len(row_index) // num_buckets]
    paths = [folder / f"{i:03d}.arrow" for i in range(num_buckets)]
    schema = work.read_part(work.parts[0]).schema
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    writers = [pa.ipc.new_stream(str(path), schema, options=options) for path in paths]
    try:
        for slab in _slabs(work, bucket_bytes):
            cuts = [0, *np.searchsorted(_row_index(slab), bounds), len(slab)]
            for i, writer in enumerate(writers):
                if cuts[i] < cuts[i + 1]:
                    writer.write_table(slab.slice(cuts[i], cuts[i + 1] - cuts[i]).combine_chunks())
    finally:
        for writer in writers:
            writer.close()
    return paths


def _slabs(work: WorkFolder, slab_bytes: int) -> Iterator[pa.Table]:
    """Parts joined to about `slab_bytes` and sorted, so that a bucket gets few large pieces."""
    tables: list[pa.Table] = []
    held = 0
    for part in work.parts:
        tables.append(work.read_part(part))
        held += tables[-1].nbytes
        if held >= slab_bytes:
            yield _sort(pa.concat_tables(tables))
            tables, held = [], 0
    if tables:
        yield _sort(pa.concat_tables(tables))


def _row_index(table: pa.Table) -> npt.NDArray[np.int64]:
    values: npt.NDArray[np.int64] = table.column(0).to_numpy()
    return values


def _sort(table: pa.Table) -> pa.Table:
    row_index, sample = table.schema.names[:2]
    return table.sort_by([(row_index, "ascending"), (sample, "ascending")])
