"""The step table of `--profile`: one Parquet row per engine step."""

from collections.abc import Iterable
from dataclasses import astuple, fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.disk import writing
from batchrun.engine.outputs import StepRecord
from batchrun.errors import Refused

SCHEMA = pa.schema([(field.name, pa.int64() if field.type is int else pa.float64()) for field in fields(StepRecord)])
ROWS_PER_GROUP = 4096


def check_profile(path: Path, overwrite: bool, others: Iterable[Path]) -> None:
    """Whether a step table can be written at `path`.

    Args:
        others: files that it must not replace: the inputs and the output.

    Raises:
        Refused: it exists already, is one of the others, or its folder does not exist.
    """
    if path.suffix.lower() != ".parquet":
        raise Refused(f"--profile is {str(path)!r}: the step table is a Parquet file, so give a name that ends in .parquet")
    if not path.parent.is_dir():
        raise Refused(f"--profile is {str(path)!r}, but there is no folder {path.parent}: make it first")
    if any(path.resolve() == other.resolve() for other in others):
        raise Refused(f"--profile is {str(path)!r}, which is an input or the output: give it a name of its own")
    if path.exists() and not overwrite:
        raise Refused(f"{path} exists already: give --profile another name, or --overwrite to replace it")


class ProfileWriter:
    """Collects step records and writes them; whatever was measured is there when the file is closed.

    Raises:
        Stopped: from any method: the disk is full or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(path):
            self._writer = pq.ParquetWriter(path, SCHEMA, compression="zstd")
        self._records: list[StepRecord] = []

    def add(self, record: StepRecord) -> None:
        """Take the record of a step that is over."""
        self._records.append(record)
        if len(self._records) >= ROWS_PER_GROUP:
            self._flush()

    def close(self) -> None:
        """Write what waits and the footer."""
        self._flush()
        with writing(self._path):
            self._writer.close()

    def _flush(self) -> None:
        columns = list(zip(*map(astuple, self._records), strict=True)) or [()] * len(SCHEMA)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
        with writing(self._path):
            self._writer.write_batch(pa.record_batch(arrays, schema=SCHEMA))
        self._records = []
