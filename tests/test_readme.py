"""The documents: made from the program, or run against it."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from batchrun.overrides import OVERRIDES
from batchrun.results import RESULT_FIELDS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md"), *ROOT.glob("kernels/*.md")]


def blocks(language: str) -> list[str]:
    """The README's code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_cli_reference_is_what_the_program_says() -> None:
    path = ROOT / "docs" / "make_cli_reference.py"
    spec = importlib.util.spec_from_file_location("make_cli_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.TARGET.read_text(encoding="utf-8") == module.reference(), "docs/cli.md is out of date: run `make docs`"


def test_readme_lists_every_output_column_in_order() -> None:
    section = README.partition("## Output columns")[2].partition("\n## ")[0]
    named = [
        name for line in section.splitlines() if line.startswith("| `") for name in re.findall(r"`(\w+)`", line.split("|")[1])
    ]
    assert named == [*(name for name, _ in RESULT_FIELDS), "output_ids"]


def test_readme_and_reference_list_every_column_that_sets_something_for_its_row() -> None:
    paragraph = README.partition("A column named like a setting")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"`(\w+)`", paragraph)) == sorted(OVERRIDES)
    table = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8").partition("## Columns that set something")[2]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == list(OVERRIDES)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text(encoding="utf-8")):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.slow
def test_readme_commands_work_one_after_the_other(tmp_path: Path, embedded_model: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    script = "\n".join(blocks("bash"))
    assert script.count("batchrun ") >= 5
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "36 ok, 0 failed" in done.stderr
    assert "20 ok, 0 failed" in done.stderr
    (code,) = blocks("python")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\d+ prompt tokens computed of \d+", done.stdout)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo", "examples"], "the tour writes into the clone itself"
