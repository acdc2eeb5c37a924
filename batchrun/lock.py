"""One run per output: a lock that a dead process cannot hold."""

import fcntl
import json
import os
import socket
from pathlib import Path

from batchrun.errors import Refused


class RunLock:
    """An exclusive flock on `path`, with the owner's pid and host written in it. The kernel drops it when the process dies.

    Raises:
        Refused: another process holds it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        while True:
            self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The file may have been removed, or made anew, between opening and locking.
                if os.path.exists(path) and os.path.samestat(os.fstat(self._descriptor), os.stat(path)):
                    break
            except BlockingIOError as error:
                owner = _owner(self._descriptor)
                self.release()
                raise Refused(f"{path.parent}: another run ({owner}) is at work on it: wait for it or end it") from error
            except OSError as error:
                self.release()
                raise Refused(f"{path}: cannot be locked: {error.strerror}: write to a file system that has locks") from error
            self.release()
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)

    def release(self) -> None:
        """Let go; the file stays. Harmless when released before."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _owner(descriptor: int) -> str:
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {owner['pid']} on {owner['host']}"
    except (ValueError, KeyError, TypeError):
        return "owner not recorded yet"
