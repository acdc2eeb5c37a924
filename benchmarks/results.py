"""What the benchmarks share: the machine in words, batchrun in its own process, tables."""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """One run of `batchrun run` that ended well."""

    summary: dict[str, Any]
    wall_s: float
    """Of the whole process, start and imports included."""
    peak_rss_bytes: int
    """Largest resident set of the process, its threads included."""
    output_rows: int


class RunFailed(Exception):
    """The program ended with another exit code than 0."""


def run_batchrun(data: Path, options: Sequence[str], keep: Path | None = None) -> ProgramRun:
    """Run `batchrun run` on one file in a process of its own; its output goes to `keep`, or is thrown away.

    Raises:
        RunFailed: with the exit code and the last line that the program wrote.
    """
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        output = keep or Path(scratch) / "answers.parquet"
        command = [sys.executable, "-m", "batchrun", "run", str(data), "-o", str(output), "--summary-json", *options]
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=err)
        _, status, usage = os.wait4(process.pid, 0)  # the only call that tells this child's peak from other children's
        wall_s = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if process.returncode:
            last = (err.read().strip().splitlines() or ["no message"])[-1]
            raise RunFailed(f"{data.name}: exit code {process.returncode}: {last}")
        return ProgramRun(json.loads(out.read()), wall_s, usage.ru_maxrss * 1024, pq.read_metadata(output).num_rows)


def machine() -> dict[str, Any]:
    """Where and with what the figures were made, as columns of a result file."""
    names = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory_kb = next(int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal"))
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_kb / 2**20, 1),
        "python": platform.python_version(),
        "torch": version("torch"),
        "batchrun": version("batchrun"),
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def shuffled(table: pa.Table, seed: int) -> pa.Table:
    """Return the rows in an order drawn from `seed`."""
    import numpy as np

    return table.take(np.random.default_rng(seed).permutation(table.num_rows))


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table as documents and terminals show it; floats with three significant digits."""
    lines = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(header, *lines, strict=True)]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, lines)])


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def save(rows: list[dict[str, Any]], path: Path | None, say: bool = True) -> None:
    """Write result rows with the machine's columns to a Parquet file, when there is a path; columns that a row lacks are null."""
    if path is not None and rows:
        here = machine()
        names = dict.fromkeys(name for row in rows for name in row)
        pq.write_table(pa.Table.from_pylist([{**dict.fromkeys(names), **row, **here} for row in rows]), path)
        if say:
            print(f"wrote {path}")
