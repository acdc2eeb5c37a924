"""Memory and processor time of process trees, and how much of the machine other programs took meanwhile. Linux's /proc only."""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def process_tree(pid: int) -> Iterator[int]:
    """The process and all that it started, as far as they still run."""
    yield pid
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in _read(listing).split():
            yield from process_tree(int(child))


def _read(path: Path) -> str:
    """The file's text; "" when the process has just ended."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def reset_peaks(pid: int) -> None:
    """Begin to count the largest resident sets of a process tree anew."""
    for each in process_tree(pid):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            Path(f"/proc/{each}/clear_refs").write_text("5")


def sum_of_peaks(pid: int) -> int:
    """Bytes: the largest resident set of each process of the tree, added up; what two of them share counts twice."""
    total = 0
    for each in process_tree(pid):
        lines = _read(Path(f"/proc/{each}/status")).splitlines()
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    return total


def cpu_s(pid: int) -> float:
    """Processor seconds that a process tree has taken so far, its ended and awaited children included."""
    ticks = 0
    for each in process_tree(pid):
        # The name, which may hold anything, ends at the last parenthesis; then come state, 10 more, and four times.
        fields = _read(Path(f"/proc/{each}/stat")).rpartition(")")[2].split()
        ticks += sum(map(int, fields[11:15]))
    return ticks / _TICKS


class Disturbance:
    """How much of the machine's processors others took since this was made: other programs, and the host of a virtual machine."""

    def __init__(self, own_cpu_s: float) -> None:
        """own_cpu_s: processor seconds that the measured processes have taken so far."""
        self._own, self._busy, self._began = own_cpu_s, _busy_s(), time.monotonic()

    def share(self, own_cpu_s: float) -> float:
        """Of all cores' time, 0 to 1, by the same clock of the measured processes as at the beginning."""
        others = _busy_s() - self._busy - (own_cpu_s - self._own)
        return min(1.0, max(0.0, others / (time.monotonic() - self._began) / (os.cpu_count() or 1)))


def _busy_s() -> float:
    line = _read(Path("/proc/stat")).partition("\n")[0]
    user, nice, system, _idle, _iowait, *interrupts_and_steal = map(int, line.split()[1:9])
    return (user + nice + system + sum(interrupts_and_steal)) / _TICKS
