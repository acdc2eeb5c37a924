"""What is done, on disk: the work folder OUTPUT.batchrun with its lock, settings and list of finished parts.

    OUTPUT.batchrun/
      lock          held by the run that is at work
      run.json      the settings' fingerprint, the inputs' names, the job's id, how many processes have worked on it
      parts.jsonl   one line per finished part, append-only; a part counts when its line is there and its bytes match
      part-0000-000000.parquet ...    run id and number within the run

A part is written under a temporary name, synced and renamed, its folder synced, and only then named in parts.jsonl, which is
synced too. So a kill at any moment leaves parts that are whole, or that nobody names and the next run deletes.
"""

import json
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from batchrun.disk import sync_folder, write_durably, writing
from batchrun.errors import Refused
from batchrun.lock import RunLock

RUN_FILE = "run.json"
PARTS_FILE = "parts.jsonl"
TEMPORARY_RUN_FILE = "run.json.tmp"
"""Where `write_durably` writes run.json first."""
LOCK_FILE = "lock"
REPLACED = "replaced"
"""Where an old folder output waits while the new one takes its place."""


@dataclass(frozen=True, slots=True)
class Part:
    """One line of parts.jsonl."""

    file: str
    rows: int
    size: int
    xxh3: str
    run_id: int


class Done(NamedTuple):
    """Finished samples, in the order of the parts."""

    row_index: npt.NDArray[np.int64]
    sample: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over all finished parts, those of earlier processes included."""

    rows: int
    ok: int
    failed: int
    """Input rows with an error in any sample."""
    samples: int
    prompt_tokens: int
    """Each input row once."""
    output_tokens: int


def work_path(output: Path) -> Path:
    """The work folder that belongs to an output."""
    return output.with_name(output.name + ".batchrun")


class WorkFolder:
    """An open, locked work folder. Made by `create` and `reopen`; `close` or `remove` lets go of the lock."""

    def __init__(self, output: Path, lock: RunLock, settings: dict[str, Any], parts: list[Part], notes: list[str]) -> None:
        self.output = output
        self.path = work_path(output)
        self.parts = parts
        self.notes = notes
        """What was found wrong and will be done again; one line each."""
        self.fingerprint: dict[str, Any] = settings["fingerprint"]
        self.inputs: list[str] = settings.get("inputs", [])
        """What the first process's user typed; only for messages."""
        self.job_id: str = settings["job_id"]
        self.started_at = datetime.fromisoformat(settings["started_at"])
        """When the first process of the job began, local time; what templates are told, so that resumed rows are no different."""
        self.overwrite: bool = settings["overwrite"]
        """Whether the final rename may replace an old output."""
        self.run_id: int = settings["runs"] - 1
        """0, 1, ...: which process this is."""
        self._lock = lock
        self._sequence = 0

    @classmethod
    def create(
        cls,
        output: Path,
        fingerprint: Mapping[str, Any],
        *,
        inputs: Iterable[str] = (),
        overwrite: bool = False,
        reuse: bool = False,
    ) -> "WorkFolder":
        """Start afresh. A folder that is there already is an error, but with `overwrite` or `reuse` its content goes.

        `inputs` are as the user typed them.

        Raises:
            Refused: another run holds the folder, or it cannot be made.
        """
        folder = work_path(output)
        settings = {
            "fingerprint": _plain(fingerprint),
            "inputs": list(inputs),
            "job_id": uuid.uuid4().hex,
            "started_at": datetime.now().isoformat(),
            "overwrite": overwrite,
            "runs": 1,
        }
        lock = None
        try:
            folder.mkdir(exist_ok=overwrite or reuse)
            lock = RunLock(folder / LOCK_FILE)
            _clear(folder, keep={LOCK_FILE})
            write_durably(folder / RUN_FILE, json.dumps(settings).encode())
            sync_folder(folder.absolute().parent)
        except OSError as error:
            if lock is not None:
                lock.release()
            raise Refused(f"-o {output}: {folder} cannot be created: {error.strerror}: write to another place") from error
        return cls(output, lock, settings, [], [])

    @classmethod
    def reopen(cls, output: Path, lock: RunLock, settings: dict[str, Any]) -> "WorkFolder":
        """Go on with a folder whose lock is held: checks the parts, drops what is not whole, counts one more process.

        Raises:
            Refused: the folder cannot be written.
        """
        folder = work_path(output)
        parts, notes = _check_parts(folder)
        settings = {**settings, "runs": settings["runs"] + 1}
        try:
            _clear(folder, keep={LOCK_FILE, RUN_FILE, PARTS_FILE, REPLACED, *(part.file for part in parts)})
            # Written anew, so that a torn last line cannot run into the next one.
            write_durably(folder / PARTS_FILE, b"".join(_line(part) for part in parts))
            write_durably(folder / RUN_FILE, json.dumps(settings).encode())
        except OSError as error:
            raise Refused(f"{folder}: cannot be written: {error.strerror}: mend that and try again") from error
        return cls(output, lock, settings, parts, notes)

    def add_part(self, content: memoryview, rows: int) -> None:
        """Make a part durable, then name it in the ledger.

        Raises:
            Stopped: the disk is full or lost; the ledger is as it was before.
        """
        name = f"part-{self.run_id:04d}-{self._sequence:06d}.parquet"
        part = Part(name, rows, len(content), xxhash.xxh3_128(content).hexdigest(), self.run_id)
        with writing(self.path / name):
            write_durably(self.path / name, content)
        with writing(self.path / PARTS_FILE):
            _append_durably(self.path / PARTS_FILE, _line(part))
        self._sequence += 1
        self.parts.append(part)

    def done(self) -> Done:
        """Which samples are finished."""
        tables = [self.read_part(part, [0, 1]) for part in self.parts]
        columns = [np.concatenate([table.column(i).to_numpy() for table in tables] or [np.empty(0)]) for i in (0, 1)]
        return Done(columns[0].astype(np.int64), columns[1].astype(np.int32))

    def totals(self) -> Totals:
        """Count what is finished; columns are known by their place in RESULT_FIELDS."""
        tables = [self.read_part(part, [0, 1, 4, 5, 7]) for part in self.parts]
        if not tables:
            return Totals(0, 0, 0, 0, 0, 0)
        table = pa.concat_tables(tables)
        row_index, sample, prompt_tokens, output_tokens = (table.column(i).to_numpy() for i in (0, 1, 3, 4))
        in_error = table.column(2).is_valid().to_numpy()
        rows = len(np.unique(row_index))
        failed = len(np.unique(row_index[in_error]))
        first = sample == 0
        return Totals(rows, rows - failed, failed, len(table), int(prompt_tokens[first].sum()), int(output_tokens.sum()))

    def read_part(self, part: Part, columns: list[int] | None = None) -> pa.Table:
        """A part's rows; `columns` are places in RESULT_FIELDS, None reads all."""
        with pq.ParquetFile(self.path / part.file) as parquet:
            names = None if columns is None else [parquet.schema_arrow.names[i] for i in columns]
            table = parquet.read(names, use_threads=False)
            return table if names is None else table.select(names)

    def remove(self) -> None:
        """Delete the folder: the output is in place. Lets go of the lock last. Harmless when removed before."""
        if not self.path.exists():
            self.close()
            return
        with writing(self.path):
            _clear(self.path, keep={LOCK_FILE, RUN_FILE})
            # run.json goes near the end: while it is there, a killed removal is known for what it is.
            (self.path / RUN_FILE).unlink()
            (self.path / LOCK_FILE).unlink()
            self.path.rmdir()
            sync_folder(self.path.absolute().parent)
        self.close()

    def abandon(self) -> None:
        """After a refusal: leave no trace of a run that finished nothing; what earlier processes did stays."""
        if self.parts:
            self.close()
        else:
            self.remove()

    def close(self) -> None:
        """Let go of the lock and leave the folder for --resume."""
        self._lock.release()


def read_settings(folder: Path) -> dict[str, Any] | None:
    """run.json, or None when the folder's run ended before it was written.

    Raises:
        Refused: it is there and cannot be read.
    """
    path = folder / RUN_FILE
    try:
        settings = json.loads(path.read_bytes())
        if not {"fingerprint", "job_id", "started_at", "overwrite", "runs"} <= set(settings):
            raise ValueError("an entry is missing")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise Refused(f"{path}: cannot be read ({error}): start over with --overwrite") from error
    return dict(settings)


def _plain(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """As it will read back from JSON, so that equal settings compare equal."""
    return dict(json.loads(json.dumps(dict(fingerprint))))


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The entries that differ, as `name (value before -> value now)`, values shortened around where they part."""
    now = _plain(now)
    found = []
    for name in dict.fromkeys((*before, *now)):
        old, new = (repr(side[name]) if name in side else "none" for side in (before, now))
        if old != new:
            start = max(0, len(os.path.commonprefix([old, new])) - 12)  # noqa: RUF071 - of characters, as wanted
            found.append(f"{name} ({_shorten(old, start)} -> {_shorten(new, start)})")
    return found


def _shorten(text: str, start: int, length: int = 40) -> str:
    if len(text) <= length:
        return text
    start = min(start, len(text) - length)
    return ("..." if start else "") + text[start : start + length] + ("..." if start + length < len(text) else "")


def _line(part: Part) -> bytes:
    return json.dumps(asdict(part)).encode() + b"\n"


def _append_durably(path: Path, line: bytes) -> None:
    """Append and sync; a write that fails half-way is taken back."""
    is_new = not path.exists()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        before = os.fstat(descriptor).st_size
        try:
            written = os.write(descriptor, line)
            while written < len(line):
                written += os.write(descriptor, line[written:])
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, before)
            raise
    finally:
        os.close(descriptor)
    if is_new:
        sync_folder(path.parent)


def _check_parts(folder: Path) -> tuple[list[Part], list[str]]:
    """The parts that are named and whole, and a note for each that is not."""
    path = folder / PARTS_FILE
    lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
    parts: list[Part] = []
    notes: list[str] = []
    # What follows the last newline is a line that was being written when the process died: its part is nobody's loss.
    for number, line in enumerate(lines[:-1], start=1):
        try:
            part = Part(**json.loads(line))
        except (ValueError, TypeError):
            notes.append(f"{path}: line {number} cannot be read: its rows are done again")
            continue
        fault = _fault(folder / part.file, part)
        if fault is None:
            parts.append(part)
        else:
            notes.append(f"{folder / part.file}: {fault}: its {part.rows} rows are done again")
    return parts, notes


def _fault(path: Path, part: Part) -> str | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if len(content) != part.size:
        return f"has {len(content)} bytes instead of {part.size}"
    return None if xxhash.xxh3_128(content).hexdigest() == part.xxh3 else "is damaged"


def _clear(folder: Path, keep: set[str]) -> None:
    for entry in os.scandir(folder):
        if entry.name in keep:
            continue
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)
