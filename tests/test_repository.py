"""The layout: links, names and what the packages may load (docs/architecture.md says why)."""

import ast
import importlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import batchrun
from batchrun.errors import Refused
from batchrun.links import LINKED, check_links

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "transformers", "pyarrow", "duckdb")


def loaded_modules(code: str, cwd: Path = ROOT) -> set[str]:
    """The modules that a fresh process has loaded after running the code."""
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=cwd, capture_output=True, text=True, check=True, timeout=60)
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("name", LINKED)
def test_each_link_is_a_relative_link_to_a_folder_that_imports(name: str) -> None:
    link = ROOT / "batchrun" / name
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{name}"
    assert link.is_dir()
    module = importlib.import_module(f"batchrun.{name}")
    assert [Path(path).resolve() for path in module.__path__] == [(ROOT / name).resolve()]


def test_links_are_committed_as_links() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "--stage", *(f"batchrun/{name}" for name in LINKED)]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(listed) == len(LINKED)
    assert {line.split()[0] for line in listed} == {"120000"}


def test_a_copy_without_links_is_refused_with_advice(tmp_path: Path) -> None:
    for name in LINKED:
        (tmp_path / name).mkdir()
    check_links(tmp_path)
    (tmp_path / "kernels").rmdir()
    (tmp_path / "kernels").write_text("../kernels")
    with pytest.raises(Refused, match=r"kernels is not a folder.*git"):
        check_links(tmp_path)


def test_kernels_folder_has_no_init_so_that_it_never_hides_another_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    # From the root of the repository, where the folder itself is on the path.
    code = "import importlib.util as u; s = u.find_spec('kernels'); print(s.origin if s and s.origin else '')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    origin = done.stdout.strip()
    assert not origin or "site-packages" in origin


def test_all_agrees_with_what_the_package_serves() -> None:
    from batchrun import api

    assert sorted(batchrun.__all__) == batchrun.__all__
    assert sorted(api.__all__) == batchrun.__all__
    for name in batchrun.__all__:
        assert getattr(batchrun, name) is getattr(api, name)
        assert name in dir(batchrun)
    assert not hasattr(batchrun, "no_such_name")


def test_package_init_imports_nothing_of_ours_up_front() -> None:
    tree = ast.parse((ROOT / "batchrun" / "__init__.py").read_text())
    assert not [node for node in tree.body if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("batchrun")]


@pytest.mark.parametrize("module", ["batchrun", "batchrun.engine", "batchrun.prefix_cache", "batchrun.kernels", "batchrun.jobs"])
def test_importing_one_part_does_not_load_the_program(module: str) -> None:
    loaded = loaded_modules(f"import {module}")
    assert not loaded & {"batchrun.cli", "batchrun.api", "batchrun.pipeline", *HEAVY, "click"}


def test_the_command_line_loads_no_heavy_library() -> None:
    loaded = loaded_modules("import batchrun.cli.main, batchrun.cli.common")
    assert not loaded & {*HEAVY, "numpy", "rich", "tokenizers"}


def test_version_is_a_literal_that_the_build_can_read_without_importing() -> None:
    tree = ast.parse((ROOT / "batchrun" / "__init__.py").read_text())
    assignments = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    assert ast.literal_eval(assignments["__version__"]) == batchrun.__version__
    assert f"## {batchrun.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_constraints_pin_every_direct_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    dependencies = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    wanted = {re.split(r"[<>=!~ ]", line)[0].lower() for line in dependencies}
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    assert {line.split("==")[0].lower() for line in lines} == wanted
