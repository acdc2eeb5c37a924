"""Whether a run may start, and from where: the rules of --resume and --overwrite."""

import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.errors import Refused
from batchrun.ledger import LOCK_FILE, RUN_FILE, TEMPORARY_RUN_FILE, WorkFolder, differences, read_settings, work_path
from batchrun.lock import RunLock

FOOTER_KEY = b"batchrun"
"""Key of the Parquet schema metadata that holds fingerprint, job id and summary as JSON."""
PART_NAME = re.compile(r"part-\d{5,}\.parquet")


@dataclass(frozen=True, slots=True)
class Prepared:
    """Where a run stands before it starts."""

    status: Literal["fresh", "resumed", "finished"]
    work: WorkFolder | None
    """None when the output is finished already: nothing is left to do."""
    summary: dict[str, Any] = field(default_factory=dict)
    """The finished output's own summary."""


def prepare(
    output: Path,
    fingerprint: Mapping[str, Any],
    *,
    inputs: Iterable[str] = (),
    files: Iterable[str] = (),
    resume: bool = False,
    overwrite: bool = False,
) -> Prepared:
    """Check the output's place and open its work folder, whose lock is then held.

    Args:
        output: a `.parquet` file, or a folder (no suffix).
        fingerprint: what makes two runs the same, JSON values by name; a difference is named by its key.
        inputs: as the user typed them; files: the input files.

    Raises:
        Refused: see `check_output`; or --resume with settings that differ from those of the work or the output.
    """
    inputs = tuple(inputs)
    check_output(output, inputs=inputs, files=files, resume=resume, overwrite=overwrite)
    folder = work_path(output)
    if not resume:
        return Prepared("fresh", WorkFolder.create(output, fingerprint, inputs=inputs, overwrite=overwrite))
    if not folder.is_dir():
        if not _exists(output):
            return Prepared("fresh", WorkFolder.create(output, fingerprint, inputs=inputs))
        return _finished(output, fingerprint, inputs)
    lock = RunLock(folder / LOCK_FILE)
    try:
        return _go_on(output, fingerprint, inputs, lock)
    except BaseException:
        lock.release()
        raise


def check_resumable(output: Path, known: Mapping[str, Any], inputs: Iterable[str]) -> None:
    """Refuse --resume by a part of the fingerprint, so that what costs time to know is not waited for; changes nothing.

    Args:
        known: entries of the fingerprint that are known already; the others are not compared.
        inputs: as the user typed them.

    Raises:
        Refused: work or output that is there was made with other values of these.
    """
    folder = work_path(output)
    before = read_settings(folder) if folder.is_dir() else _footer(output) if _exists(output) else None
    if before is not None:
        entries = {name: value for name, value in before["fingerprint"].items() if name in known}
        where = folder if folder.is_dir() else output
        _refuse_difference(where, {**before, "fingerprint": entries}, known, tuple(inputs))


def _go_on(output: Path, fingerprint: Mapping[str, Any], inputs: tuple[str, ...], lock: RunLock) -> Prepared:
    folder = work_path(output)
    settings = read_settings(folder)
    if settings is None:
        if left := sorted(set(os.listdir(folder)) - {LOCK_FILE, TEMPORARY_RUN_FILE}):
            raise Refused(
                f"--resume: {folder} has lost its {RUN_FILE}, which says what its {left[0]} belongs to: "
                "put it back, or start over with --overwrite"
            )
        # Either the run had hardly begun, or the removal of the folder was all but done.
        finished = _finished(output, fingerprint, inputs) if _exists(output) else None
        lock.release()
        work = WorkFolder.create(output, fingerprint, inputs=inputs, reuse=True)
        if finished is None:
            return Prepared("fresh", work)
        work.remove()
        return finished
    if _exists(output):
        footer = _footer(output)
        if footer is not None and footer.get("job_id") == settings["job_id"]:
            # Killed after the rename, before the work folder was gone.
            prepared = _finished(output, fingerprint, inputs)
            WorkFolder(output, lock, settings, [], []).remove()
            return prepared
        if not settings["overwrite"]:
            raise Refused(f"{output}: exists and is not what this work will become: move it away, or start over with --overwrite")
    _refuse_difference(folder, settings, fingerprint, inputs)
    return Prepared("resumed", WorkFolder.reopen(output, lock, settings))


def _finished(output: Path, fingerprint: Mapping[str, Any], inputs: tuple[str, ...]) -> Prepared:
    footer = _footer(output)
    if footer is None:
        raise Refused(f"{output}: exists and is no finished run: --overwrite replaces it, or choose another -o")
    _refuse_difference(output, footer, fingerprint, inputs)
    return Prepared("finished", None, footer.get("summary") or {})


def _refuse_difference(where: Path, before: Mapping[str, Any], now: Mapping[str, Any], inputs: tuple[str, ...]) -> None:
    """Compare fingerprints; `before` is run.json or a footer, which say as well what the inputs were called."""
    found = differences(before["fingerprint"], now)
    if not found:
        return
    # Nobody knows a file by its hash.
    names = before.get("inputs")
    found = [_other_input(names, inputs) if names and entry.startswith("input (") else entry for entry in found]
    raise Refused(
        f"--resume: {where} was made with other settings: {', '.join(found)}: give the same, or start over with --overwrite"
    )


def _other_input(before: list[str], now: tuple[str, ...]) -> str:
    names = ", ".join(now)
    return f"input ({names} holds other bytes than before)" if list(now) == before else f"input ({', '.join(before)} -> {names})"


def check_output(
    output: Path, *, inputs: Iterable[str] = (), files: Iterable[str] = (), resume: bool = False, overwrite: bool = False
) -> None:
    """All that can be refused about an output without knowing the fingerprint; leaves nothing there.

    Raises:
        Refused: --resume with --overwrite; a wrong suffix; no such parent folder, or one that cannot be written; the output
            is, holds or lies in an input; it or unfinished work exists and neither --resume nor --overwrite was given; another
            run is at work on it.
    """
    if resume and overwrite:
        raise Refused("--resume and --overwrite contradict each other: give one of them")
    if output.name in ("", ".."):
        raise Refused(f"-o {output}: has no name of its own: give a .parquet file or a new folder")
    is_file = output.suffix == ".parquet"
    if not is_file and output.suffix and not output.is_dir():
        raise Refused(f"-o {output}: must end in .parquet (one file) or have no suffix (a folder of part files)")
    parent = output.absolute().parent
    if not parent.is_dir():
        raise Refused(f"-o {output}: there is no folder {parent}: make it first (mkdir -p)")
    _check_writable(output, parent)
    _check_apart(output, inputs, files)
    folder = work_path(output)
    if os.path.lexists(folder):
        _check_work(folder, resume or overwrite)
    if not _exists(output):
        return
    if is_file and output.is_dir():
        raise Refused(f"-o {output}: is a folder: name a .parquet file in it, or a path without suffix")
    if not is_file and not output.is_dir():
        raise Refused(f"-o {output}: is a file: give a path that ends in .parquet, or another folder")
    if not (resume or overwrite):
        raise Refused(f"-o {output}: exists already: --overwrite replaces it, or choose another -o")
    if overwrite and output.is_dir():
        _check_replaceable(output)


def _check_writable(output: Path, parent: Path) -> None:
    """By making a folder and taking it away: permissions alone say little of read-only, full and made-up file systems."""
    try:
        os.rmdir(tempfile.mkdtemp(prefix=f".{output.name[:50]}.", dir=parent))
    except OSError as error:
        raise Refused(
            f"-o {output}: the folder {parent} cannot be written: {error.strerror}: choose another place or mend that"
        ) from error


def _check_work(folder: Path, may_use: bool) -> None:
    if not folder.is_dir():
        raise Refused(f"{folder}: is in the way of the work folder: move it away")
    if (folder / LOCK_FILE).exists():
        RunLock(folder / LOCK_FILE).release()
    if not may_use:
        raise Refused(f"{folder}: holds the work of a run that did not finish: --resume goes on with it, --overwrite starts over")


def _check_replaceable(output: Path) -> None:
    """A folder is only replaced when nothing but part files would be lost with it."""
    for name in sorted(os.listdir(output)):
        if PART_NAME.fullmatch(name) is None:
            raise Refused(f"-o {output}: holds {name}, which is no part file of a run: choose another -o, or move it away")


def _check_apart(output: Path, inputs: Iterable[str], files: Iterable[str]) -> None:
    real = Path(os.path.realpath(output))
    for name in files:
        source = Path(os.path.realpath(name))
        if source == real or (output.exists() and source.exists() and os.path.samefile(source, output)):
            raise Refused(f"-o {output}: is the input {name}: choose another -o")
        if real in source.parents:
            raise Refused(f"-o {output}: holds the input {name}: choose another -o")
    for name in inputs:
        folder = Path(os.path.realpath(name))
        if folder.is_dir() and folder in real.parents:
            raise Refused(f"-o {output}: lies in the input folder {name}, and would be read as input: choose another -o")


def _exists(output: Path) -> bool:
    return os.path.lexists(output)


def _footer(output: Path) -> dict[str, Any] | None:
    """What a finished run left in its output's footer; None when it is not one."""
    path = output
    if output.is_dir():
        parts = sorted(name for name in os.listdir(output) if PART_NAME.fullmatch(name))
        if not parts:
            return None
        path = output / parts[0]
    try:
        metadata = pq.read_schema(path).metadata or {}
        footer = json.loads(metadata.get(FOOTER_KEY, b"null"))
    except (pa.ArrowException, OSError, ValueError):
        return None
    return footer if isinstance(footer, dict) and isinstance(footer.get("fingerprint"), dict) else None
