"""The rules of --resume and --overwrite, and where an output may lie."""

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun.errors import Refused
from batchrun.ledger import WorkFolder, work_path
from batchrun.results import ResultRow, result_schema
from batchrun.resume import Prepared, check_output, check_resumable, prepare
from batchrun.sinks import PartWriter, finish
from batchrun.sources import open_source

FINGERPRINT = {"model": "abc", "template": None, "max_tokens": 16}


@pytest.fixture
def source(tmp_path):
    pq.write_table(pa.table({"prompt": ["a", "b"]}), tmp_path / "in.parquet")
    return open_source((str(tmp_path / "in.parquet"),))


@pytest.fixture(params=["out.parquet", "out"])
def output(tmp_path, request) -> Path:
    return tmp_path / request.param


def answer(work: WorkFolder, text: str = "x") -> None:
    writer = PartWriter(work, result_schema())
    for row in range(2):
        writer.add(ResultRow(row, 0, text, "stop", None, 1, 0, 1))
    writer.close()


def complete(source, output: Path, text: str = "x", **options) -> Prepared:
    prepared = prepare(output, FINGERPRINT, **options)
    assert prepared.work is not None
    answer(prepared.work, text)
    finish(source, prepared.work, summary={"ok": 2})
    return prepared


def content(path: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()} or {"": path.read_bytes()}


def test_resume_with_nothing_there_starts_afresh(output):
    prepared = prepare(output, FINGERPRINT, resume=True)
    assert prepared.status == "fresh"
    assert prepared.work is not None
    prepared.work.abandon()


def test_unfinished_work_needs_resume_or_overwrite(output):
    work = prepare(output, FINGERPRINT).work
    answer(work)
    work.close()
    with pytest.raises(Refused, match=r"--resume goes on with it, --overwrite starts over"):
        prepare(output, FINGERPRINT)
    prepared = prepare(output, FINGERPRINT, overwrite=True)
    assert prepared.work.done().row_index.tolist() == []
    prepared.work.close()


def test_a_finished_output_is_refused_and_stays_byte_for_byte(source, output):
    complete(source, output)
    before = content(output)
    with pytest.raises(Refused, match="exists already: --overwrite replaces it"):
        prepare(output, FINGERPRINT)
    assert content(output) == before
    assert not work_path(output).exists()


def test_resuming_a_finished_output_says_so_and_gives_its_summary(source, output):
    complete(source, output)
    before = content(output)
    prepared = prepare(output, FINGERPRINT, resume=True)
    assert (prepared.status, prepared.work, prepared.summary) == ("finished", None, {"ok": 2})
    assert content(output) == before
    assert not work_path(output).exists()


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("max_tokens", 17, r"max_tokens \(16 -> 17\)"),
        ("template", "Hi {{ x }}", r"template \(None -> 'Hi {{ x }}'\)"),
        ("model", "xyz", r"model \('abc' -> 'xyz'\)"),
    ],
)
def test_resume_with_other_settings_is_refused_and_names_both_values(source, output, finished, name, value, words):
    if finished:
        complete(source, output)
    else:
        prepare(output, FINGERPRINT).work.close()
    with pytest.raises(Refused, match=words) as caught:
        prepare(output, FINGERPRINT | {name: value}, resume=True)
    assert str(caught.value).count(" -> ") == 1
    if not finished:
        prepare(output, FINGERPRINT, resume=True).work.close()


def test_resume_with_overwrite_is_refused(output):
    with pytest.raises(Refused, match="--resume and --overwrite"):
        prepare(output, FINGERPRINT, resume=True, overwrite=True)


def test_overwrite_keeps_the_old_output_until_the_new_is_whole(source, output):
    complete(source, output, "old")
    before = content(output)
    work = prepare(output, FINGERPRINT, overwrite=True).work
    answer(work, "new")
    assert content(output) == before
    work.close()
    # Killed here: the same command with --resume goes on, and still may replace the old output.
    prepared = prepare(output, FINGERPRINT, resume=True)
    assert prepared.status == "resumed"
    finish(source, prepared.work)
    assert pq.read_table(output)["output"].to_pylist() == ["new", "new"]
    assert sorted(os.listdir(output.parent)) == ["in.parquet", output.name]


def test_an_output_that_appeared_beside_unfinished_work_is_not_replaced(source, output):
    prepare(output, FINGERPRINT).work.close()
    pq.write_table(pa.table({"a": [1]}), output) if output.suffix else output.mkdir()
    with pytest.raises(Refused, match="is not what this work will become"):
        prepare(output, FINGERPRINT, resume=True)


@pytest.mark.parametrize("left", [("lock", "run.json"), ("lock",)])
def test_a_kill_between_rename_and_removal_is_taken_as_finished(source, output, left, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(WorkFolder, "remove", lambda self: self.close())
        complete(source, output)
    for name in os.listdir(work_path(output)):
        if name not in left:
            (work_path(output) / name).unlink()
    assert prepare(output, FINGERPRINT, resume=True).status == "finished"
    assert not work_path(output).exists()


def test_a_kill_before_the_settings_were_written_starts_afresh(output):
    work_path(output).mkdir()
    (work_path(output) / "run.json.tmp").write_text('{"finger')
    prepared = prepare(output, FINGERPRINT, resume=True)
    assert prepared.status == "fresh"
    prepared.work.abandon()


def test_a_foreign_file_as_output_is_not_taken_for_a_finished_run(tmp_path):
    pq.write_table(pa.table({"a": [1]}), tmp_path / "out.parquet")
    with pytest.raises(Refused, match="is no finished run"):
        prepare(tmp_path / "out.parquet", FINGERPRINT, resume=True)


def test_a_folder_with_other_files_is_never_replaced(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(Refused, match=r"holds thesis\.tex"):
        prepare(tmp_path / "out", FINGERPRINT, overwrite=True)


def test_the_output_may_not_be_hold_or_lie_in_an_input(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    file = data / "in.parquet"
    file.write_bytes(b"x")
    (tmp_path / "link.parquet").symlink_to(file)
    (tmp_path / "hard.parquet").hardlink_to(file)
    cases = [(file, "is the input"), (tmp_path / "link.parquet", "is the input"), (tmp_path / "hard.parquet", "is the input")]
    cases += [(data, "holds the input"), (data / "out.parquet", "lies in the input folder")]
    for output, words in cases:
        for options in ({}, {"overwrite": True}, {"resume": True}):
            with pytest.raises(Refused, match=words):
                check_output(output, inputs=(str(data),), files=(str(file),), **options)
    check_output(tmp_path / "out.parquet", inputs=(str(data),), files=(str(file),))
    assert sorted(os.listdir(tmp_path)) == ["data", "hard.parquet", "link.parquet"]


def test_a_place_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "dir.parquet").mkdir()
    (tmp_path / "file").write_text("")
    for name, words in (
        ("gone/out.parquet", "there is no folder"),
        ("file/out.parquet", "there is no folder"),
        ("out.csv", "must end in .parquet"),
        ("dir.parquet", "is a folder"),
        ("file", "is a file"),
        ("..", "has no name"),
    ):
        with pytest.raises(Refused, match=words):
            check_output(tmp_path / name, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["dir.parquet", "file"]


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="no /proc")
def test_a_folder_that_cannot_be_written_is_refused_by_the_name_that_was_typed(tmp_path, monkeypatch):
    monkeypatch.chdir("/proc")  # its permissions say yes to root
    for output in (Path("out.parquet"), Path("/proc/out.parquet")):
        with pytest.raises(Refused, match=rf"^-o {output}: the folder /proc cannot be written: "):
            check_output(output)


def test_looking_whether_a_folder_can_be_written_leaves_nothing_there(tmp_path):
    check_output(tmp_path / "out.parquet")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("finished", [False, True])
def test_other_inputs_are_named_as_they_were_typed(source, output, finished):
    fingerprint = FINGERPRINT | {"input": "0123"}
    work = prepare(output, fingerprint, inputs=("a.parquet", "b/*.parquet")).work
    if finished:
        answer(work)
        finish(source, work)
    work.close()
    other = FINGERPRINT | {"input": "4567"}
    for check in (
        lambda now, inputs: check_resumable(output, now, inputs),
        lambda now, inputs: prepare(output, now, inputs=inputs, resume=True),
    ):
        with pytest.raises(Refused, match=r"other settings: input \(a\.parquet, b/\*\.parquet -> c\.parquet\): give"):
            check(other, ("c.parquet",))
        with pytest.raises(Refused, match=r"input \(a\.parquet, b/\*\.parquet holds other bytes than before\): give"):
            check(other, ("a.parquet", "b/*.parquet"))


@pytest.mark.parametrize("finished", [False, True])
def test_a_part_of_the_settings_is_enough_to_refuse(source, output, finished):
    if finished:
        complete(source, output)
    else:
        prepare(output, FINGERPRINT).work.close()
    check_resumable(output, {"max_tokens": 16}, ())
    with pytest.raises(Refused, match=r"other settings: max_tokens \(16 -> 17\): give"):
        check_resumable(output, {"max_tokens": 17}, ())


def test_work_that_lost_its_settings_is_refused_and_kept(output):
    work = prepare(output, FINGERPRINT).work
    answer(work)
    work.close()
    (work_path(output) / "run.json").unlink()
    before = content(work_path(output))
    with pytest.raises(Refused, match=r"has lost its run\.json, .* put it back, or start over with --overwrite"):
        prepare(output, FINGERPRINT, resume=True)
    assert content(work_path(output)) == before
    prepare(output, FINGERPRINT, overwrite=True).work.close()


def test_unreadable_settings_are_refused_and_overwrite_helps(output):
    prepare(output, FINGERPRINT).work.close()
    (work_path(output) / "run.json").write_text('{"fingerprint"')
    with pytest.raises(Refused, match=r"run\.json: cannot be read.*--overwrite"):
        prepare(output, FINGERPRINT, resume=True)
    prepare(output, FINGERPRINT, overwrite=True).work.close()
