"""Token ids of all rows on disk, so that a million prompts fit in memory."""

from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from batchrun.disk import writing

TOKENS_FILE = "tokens.bin"
LENGTHS_FILE = "lengths.bin"


class SpooledTokens(NamedTuple):
    """Row i is tokens[begin[i]:begin[i] + length[i]]; a row in error has length 0."""

    tokens: npt.NDArray[np.int32]
    """[total tokens], a read-only memory map."""
    begin: npt.NDArray[np.int64]
    """[rows]"""
    length: npt.NDArray[np.int32]
    """[rows]"""


def open_spool(folder: Path) -> SpooledTokens:
    """What a closed TokenSpool left in `folder`, mapped."""
    length = np.fromfile(folder / LENGTHS_FILE, dtype="<i4").astype(np.int32, copy=False)
    begin = np.zeros(len(length), dtype=np.int64)
    np.cumsum(length[:-1], dtype=np.int64, out=begin[1:])
    total = int(length.sum(dtype=np.int64))
    # An empty file cannot be mapped.
    tokens = np.memmap(folder / TOKENS_FILE, dtype="<i4", mode="r", shape=(total,)) if total else np.empty(0, dtype=np.int32)
    return SpooledTokens(tokens, begin, length)


class TokenSpool:
    """Appends rows to `tokens.bin` and their lengths to `lengths.bin` in `folder`; starts empty, whatever lies there.

    Raises:
        Stopped: the disk is full or lost.
    """

    def __init__(self, folder: Path) -> None:
        self._tokens_path = folder / TOKENS_FILE
        self._lengths_path = folder / LENGTHS_FILE
        with writing(self._tokens_path):
            self._tokens: BinaryIO = open(self._tokens_path, "wb", buffering=1 << 20)  # noqa: SIM115 - close() closes it
            self._lengths: BinaryIO = open(self._lengths_path, "wb", buffering=1 << 16)  # noqa: SIM115 - close() closes it

    def append(self, ids: npt.NDArray[np.int32]) -> None:
        """Add the next row, int32 [length]; an empty array for a row in error."""
        assert ids.dtype == np.int32, f"token ids are {ids.dtype}"
        assert ids.ndim == 1, f"token ids have {ids.ndim} dimensions"
        with writing(self._tokens_path):
            self._tokens.write(np.ascontiguousarray(ids).data)
            self._lengths.write(len(ids).to_bytes(4, "little"))

    def close(self) -> SpooledTokens:
        """End writing and map the file."""
        with writing(self._tokens_path):
            self._tokens.close()
            self._lengths.close()
        return open_spool(self._tokens_path.parent)
