"""How a command ends early: signals, crashes and closed pipes."""

import contextlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

LOG_NAME = "batchrun.log"


class Interrupted(KeyboardInterrupt):
    """The process was asked to stop by SIGINT or SIGTERM and nothing is left to finish."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number


class StopSignals:
    """SIGINT and SIGTERM as a request to stop, while a job runs.

    Before the job polls `requested` for the first time (it is still loading) the first signal raises `Interrupted`: there is
    nothing to flush. From then on the first signal only sets the request, so that a step is never cut in half, and the job
    flushes what is finished. A second signal leaves the process at once; what was flushed before can be resumed all the same.

    Use as a context manager, in the main thread; the former handlers come back at its end.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._polled = False
        self._former: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def requested(self) -> bool:
        """Whether the job has been asked to stop; cheap, to be polled once per step."""
        self._polled = True
        return self.signal_number is not None

    def __enter__(self) -> Self:
        for number in self.SIGNALS:
            self._former[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number is not None:
            # No clean-up on purpose: it is what the user asks for, and no worse than kill -9, after which jobs can resume.
            os._exit(128 + number)
        self.signal_number = number
        if not self._polled:
            raise Interrupted(number)
        # os.write, because a handler may run while the main program is inside a print to the same stream.
        with contextlib.suppress(OSError):
            os.write(2, b"batchrun: stopping after this step; a second signal leaves at once\n")


def say(text: str) -> None:
    """One line on standard error. Where nobody reads that any more the job goes on and its exit code stands."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def open_lost_streams() -> None:
    """Give a process that was started without standard output or error (`>&-`) something to write to."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - open as long as the process


def log_crash(error: BaseException, folder: Path | None) -> Path:
    """Append the error's traceback to a log file.

    Args:
        folder: the job's work folder; when it is None or does not exist the file goes to the system's temporary folder.

    Returns:
        The file's path.
    """
    text = "".join(traceback.format_exception(error))
    entry = f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {' '.join(sys.argv)}\n{text}\n"
    if folder is not None and folder.is_dir():
        path = folder / LOG_NAME
        # A full or lost disk is a likely reason to be here; then the temporary folder has to do.
        with contextlib.suppress(OSError):
            with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(entry)
            return path
    descriptor, name = tempfile.mkstemp(prefix="batchrun-", suffix=".log", text=True)
    with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(entry)
    return Path(name)


def one_line(message: object) -> str:
    """The message as one line; an exception is led by its type's name, since its text alone may say nothing."""
    text = f"{type(message).__name__}: {message}" if isinstance(message, BaseException) else str(message)
    return " ".join(text.split())


def silence_stdout() -> None:
    """Point standard output at nothing after its reader has gone, so that the last flush at exit does not complain."""
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, sys.stdout.fileno())
    finally:
        os.close(null)
