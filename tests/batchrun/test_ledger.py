"""The work folder: parts that survive a kill, and its lock."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from batchrun import ledger
from batchrun.errors import Refused, Stopped
from batchrun.ledger import PARTS_FILE, Done, WorkFolder, differences, work_path
from batchrun.results import ResultRow, error_row, result_schema
from batchrun.resume import prepare
from batchrun.sinks import PartWriter

FINGERPRINT = {"model": "abc", "max_tokens": 16}


def start(output: Path, **options) -> WorkFolder:
    prepared = prepare(output, FINGERPRINT, **options)
    assert prepared.work is not None
    return prepared.work


def fill(work: WorkFolder, rows: range, rows_per_part: int = 2) -> None:
    writer = PartWriter(work, result_schema(), max_rows=rows_per_part)
    for row in rows:
        writer.add(ResultRow(row, 0, f"answer {row}", "stop", None, 5, 0, 2, run_id=work.run_id))
    writer.close()


def done(work: WorkFolder) -> list[int]:
    return sorted(work.done().row_index.tolist())


def test_parts_are_known_to_the_next_process_and_run_ids_count_up(tmp_path):
    output = tmp_path / "out.parquet"
    work = start(output)
    fill(work, range(5))
    assert work.run_id == 0
    work.close()
    again = start(output, resume=True)
    assert again.run_id == 1
    assert done(again) == [0, 1, 2, 3, 4]
    fill(again, range(5, 7))
    again.close()
    third = start(output, resume=True)
    assert (third.run_id, done(third), third.notes) == (2, list(range(7)), [])
    third.close()


def test_an_empty_ledger_has_nothing_done(tmp_path):
    work = start(tmp_path / "out.parquet")
    assert [column.tolist() for column in work.done()] == [[], []]
    assert work.totals() == ledger.Totals(0, 0, 0, 0, 0, 0)
    work.close()


@pytest.mark.parametrize("leave", [0, 100])
def test_a_cut_or_missing_part_is_dropped_with_a_note(tmp_path, leave):
    output = tmp_path / "out.parquet"
    work = start(output)
    fill(work, range(6))
    victim = work.path / work.parts[1].file
    work.close()
    if leave:
        victim.write_bytes(victim.read_bytes()[:leave])
    else:
        victim.unlink()
    again = start(output, resume=True)
    assert done(again) == [0, 1, 4, 5]
    (note,) = again.notes
    assert victim.name in note
    assert ("has 100 bytes instead of" if leave else "is missing") in note
    assert "2 rows are done again" in note
    again.close()
    assert start(output, resume=True).notes == []


def test_a_part_with_a_flipped_bit_is_dropped(tmp_path):
    output = tmp_path / "out.parquet"
    work = start(output)
    fill(work, range(4))
    victim = work.path / work.parts[0].file
    work.close()
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    again = start(output, resume=True)
    assert done(again) == [2, 3]
    assert "is damaged" in again.notes[0]
    again.close()


def test_a_part_that_nobody_names_and_temporary_files_are_deleted(tmp_path):
    output = tmp_path / "out.parquet"
    work = start(output)
    fill(work, range(4))
    names = [part.file for part in work.parts]
    # As after a kill between the part's rename and its ledger line.
    path = work.path / PARTS_FILE
    path.write_bytes(path.read_bytes().split(b"\n")[0] + b"\n")
    (work.path / "part-0000-000009.parquet.tmp").write_bytes(b"half a pa")
    (work.path / "output").mkdir()
    (work.path / "output" / "part-00000.parquet").write_bytes(b"half")
    work.close()
    again = start(output, resume=True)
    assert done(again) == [0, 1]
    assert again.notes == []
    assert sorted(os.listdir(again.path)) == ["lock", names[0], PARTS_FILE, "run.json"]
    again.close()


def test_a_torn_last_line_is_ignored_and_does_not_spoil_the_next(tmp_path):
    output = tmp_path / "out.parquet"
    work = start(output)
    fill(work, range(4))
    path = work.path / PARTS_FILE
    path.write_bytes(path.read_bytes()[:-20])
    work.close()
    again = start(output, resume=True)
    assert done(again) == [0, 1]
    fill(again, range(2, 4))
    again.close()
    third = start(output, resume=True)
    assert done(third) == [0, 1, 2, 3]
    third.close()


def test_the_part_is_synced_and_renamed_before_the_ledger_names_it(tmp_path, monkeypatch):
    work = start(tmp_path / "out.parquet")
    events: list[str] = []

    def record(name, function):
        def wrapped(*args, **options):
            events.append(name)
            return function(*args, **options)

        return wrapped

    monkeypatch.setattr(os, "fsync", record("sync", os.fsync))
    monkeypatch.setattr(os, "replace", record("rename", os.replace))
    monkeypatch.setattr(ledger, "_append_durably", record("name", ledger._append_durably))
    fill(work, range(1))
    # part, its name, its folder; then the line, and the folder once for the ledger's own name
    assert events == ["sync", "rename", "sync", "name", "sync", "sync"]
    work.close()


@pytest.mark.parametrize("after", range(3))
def test_a_full_disk_stops_and_leaves_the_ledger_whole(tmp_path, monkeypatch, after):
    output = tmp_path / "out.parquet"
    work = start(output)
    fill(work, range(2))
    syncs = 0

    def full(descriptor):
        nonlocal syncs
        syncs += 1
        if syncs > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(Stopped, match=r"out\.parquet\.batchrun/.*no space left on the disk.*--resume"):
            fill(work, range(2, 4))
    assert syncs == after + 1
    fill(work, range(4, 6))
    work.close()
    again = start(output, resume=True)
    assert done(again) == [0, 1, 4, 5]
    assert again.notes == []
    again.close()


def test_totals_count_rows_once_and_samples_each(tmp_path):
    work = start(tmp_path / "out.parquet")
    writer = PartWriter(work, result_schema())
    for sample in range(3):
        writer.add(ResultRow(4, sample, "x", "stop", None, 10, 0, 2))
    writer.add(ResultRow(5, 0, "x", "stop", None, 7, 0, 1))
    writer.add(error_row(6, "bad", 0, prompt_tokens=3))
    writer.close()
    assert work.totals() == ledger.Totals(rows=3, ok=2, failed=1, samples=5, prompt_tokens=20, output_tokens=7)
    found = work.done()
    assert isinstance(found, Done)
    assert list(zip(found.row_index.tolist(), found.sample.tolist(), strict=True)) == [(4, 0), (4, 1), (4, 2), (5, 0), (6, 0)]
    work.close()


def test_differences_name_the_entry_and_show_where_values_part():
    before = {"model": "a", "template": "x" * 200 + "OLD", "same": 1, "gone": True}
    now = {"model": "b", "template": "x" * 200 + "NEW", "same": 1, "files": ("p",)}
    found = differences(before, now)
    assert [text.split(" ")[0] for text in found] == ["model", "template", "gone", "files"]
    assert found[0] == "model ('a' -> 'b')"
    assert "OLD" in found[1]
    assert "NEW" in found[1]
    assert len(found[1]) < 120
    assert found[2] == "gone (True -> none)"
    assert differences({"a": [1, 2]}, {"a": (1, 2)}) == []


def test_abandoning_a_run_that_did_nothing_leaves_no_trace(tmp_path):
    work = start(tmp_path / "out.parquet")
    work.abandon()
    work.abandon()
    assert os.listdir(tmp_path) == []


def test_abandoning_keeps_what_earlier_processes_did(tmp_path):
    output = tmp_path / "out.parquet"
    work = start(output)
    fill(work, range(2))
    work.close()
    start(output, resume=True).abandon()
    again = start(output, resume=True)
    assert done(again) == [0, 1]
    again.close()


HOLD = """
import sys, time
from pathlib import Path
from batchrun.resume import prepare
work = prepare(Path(sys.argv[1]), {"model": "abc", "max_tokens": 16}).work
print("held", flush=True)
time.sleep(60)
"""


def test_a_live_runs_folder_is_refused_and_a_dead_ones_is_not(tmp_path):
    output = tmp_path / "out.parquet"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(output)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        try:
            for options in ({}, {"resume": True}, {"overwrite": True}):
                with pytest.raises(Refused, match=f"another run \\(process {child.pid} on"):
                    prepare(output, FINGERPRINT, **options)
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait()
    assert json.loads((work_path(output) / "lock").read_text())["pid"] == child.pid
    work = start(output, resume=True)
    assert work.run_id == 1
    work.close()
