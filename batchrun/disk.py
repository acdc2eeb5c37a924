"""Writing that survives a power cut, and what a full or lost disk says."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from batchrun.errors import Stopped

FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into one line that names `path`.

    Raises:
        Stopped: the disk is full or cannot be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise Stopped(f"{path}: no space left on the disk: free some, then type the command again with --resume") from error
        reason = error.strerror or str(error).strip().split("\n", 1)[0]
        raise Stopped(f"{path}: cannot be written: {reason}: mend the disk, then type the command again with --resume") from error


def sync_file(path: Path) -> None:
    """Bring a written file's content to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Bring a folder's names (a rename, a new file) to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: bytes | memoryview) -> None:
    """Write `path` as one: a temporary name, synced, renamed, the folder synced. A crash leaves the old file or the new."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with open(temporary, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
