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
        Refused: another process holds it, or it cannot be made or locked.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        try:
            while not self._acquire():
                self.release()
        except BlockingIOError as error:
            owner = _owner(path)
            self.release()
            raise Refused(f"{path.parent}: another run ({owner}) is at work on it: wait for it or end it") from error
        except OSError as error:
            self.release()
            raise Refused(f"{path}: cannot be locked: {error.strerror}: mend that or choose another -o") from error

    def _acquire(self) -> bool:
        """Whether the locked file is the one at the path: it may have been removed between opening and locking."""
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            if not os.path.samestat(os.fstat(self._descriptor), os.stat(self._path)):
                return False
        except FileNotFoundError:
            return False
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        return True

    def release(self) -> None:
        """Let go; the file stays. Harmless when released before."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _owner(path: Path) -> str:
    try:
        owner = json.loads(path.read_bytes())
        return f"process {owner['pid']} on {owner['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "owner not recorded yet"
