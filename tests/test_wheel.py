"""The wheel and the editable install: made, put into a clean environment and used from other folders (`make wheel-check`)."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from batchrun.kernels.ops import native_status

ROOT = Path(__file__).parent.parent
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "__pycache__", "*.egg-info", "build", "dist", ".*_cache", ".hypothesis")

pytestmark = pytest.mark.slow


def check(*command: object, **options: object) -> str:
    """Run a command; its output is the failure's message."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=300, check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return str(done.stdout)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy so that no old build folder can leak into it."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=LEFT_OUT)
    check(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, folder / "source")
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_one_top_level_name_and_every_source(wheel: Path) -> None:
    check(Path(sys.executable).with_name("check-wheel-contents"), "--toplevel", "batchrun", wheel)
    held = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("batchrun", "engine", "jobs", "kernels", "prefix_cache"):
        for path in (ROOT / folder).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            assert (name if folder == "batchrun" else f"batchrun/{name}") in held
    assert {f"batchrun/kernels/csrc/{path.name}" for path in (ROOT / "kernels" / "csrc").glob("*.[ch]")} <= held
    assert any(name.endswith("licenses/LICENSE") for name in held)


def test_installed_wheel_runs_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    check(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    check(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    # The dependencies of this environment; on PYTHONPATH its .pth files are not read, so the editable install stays out.
    environment = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")}
    code = (
        "import batchrun, batchrun.engine, batchrun.jobs, batchrun.prefix_cache, batchrun.kernels.ops; "
        "from batchrun import run, plan; print(batchrun.__file__)"
    )
    where = check(python, "-c", code, cwd=tmp_path, env=environment).strip()
    assert Path(where).is_relative_to(tmp_path / "venv")
    kernel = "from batchrun.kernels import ops; print(ops.native_status())"
    built = check(python, "-c", kernel, cwd=tmp_path, env={**environment, "XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert built.split(":")[0] == native_status().split(":")[0]
    shown = check(tmp_path / "venv" / "bin" / "batchrun", "--help", cwd=tmp_path, env=environment)
    assert "run" in shown


def test_editable_install_works_from_the_folder_that_holds_the_clone(tmp_path: Path) -> None:
    """There the clone's own folder, named batchrun and without an `__init__.py`, comes before everything that is installed."""
    shutil.copytree(ROOT, tmp_path / "batchrun", symlinks=True, ignore=LEFT_OUT)
    check(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    environment = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")}
    install = ("install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--editable", tmp_path / "batchrun")
    check(python, "-m", "pip", *install, env=environment)
    (tmp_path / "elsewhere").mkdir()
    for folder in (tmp_path, tmp_path / "batchrun", tmp_path / "elsewhere"):
        code = "import batchrun, batchrun.engine; print(batchrun.__file__, batchrun.run.__name__)"
        found = check(python, "-c", code, cwd=folder, env=environment).split()
        assert found == [str(tmp_path / "batchrun" / "batchrun" / "__init__.py"), "run"]
        assert check(python, "-m", "batchrun", "--version", cwd=folder, env=environment).startswith("batchrun ")
