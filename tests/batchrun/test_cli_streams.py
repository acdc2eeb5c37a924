"""A job outlives whoever reads its output streams."""

import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest


@pytest.fixture
def command(tmp_path: Path, tiny_model_folder: Path) -> str:
    pq.write_table(pa.table({"prompt": ["the cat", "the dog"]}), tmp_path / "in.parquet")
    run = f"{sys.executable} -m batchrun run {tmp_path}/in.parquet -o {tmp_path}/out.parquet --model {tiny_model_folder}"
    return f"{run} --threads 1 --max-tokens 4"


@pytest.mark.parametrize(
    "streams",
    [">&-", "2>&-", ">&- 2>&-", "2>/dev/full", "--summary-json >/dev/full", "2>&1 | true; exit ${PIPESTATUS[0]}"],
)
def test_lost_stream_costs_neither_the_job_nor_its_exit_code(command: str, tmp_path: Path, streams: str) -> None:
    done = subprocess.run(["bash", "-c", f"{command} {streams}"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert pq.read_table(tmp_path / "out.parquet").num_rows == 2


SLOW_IMPORT = """
import runpy, sys, time

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "batchrun.cli.main":
            print("importing", flush=True)
            time.sleep(30)

sys.meta_path.insert(0, Slow())
runpy.run_module("batchrun", run_name="__main__")
"""


def test_an_interrupt_while_the_program_is_still_being_imported_ends_it_without_a_traceback() -> None:
    with subprocess.Popen([sys.executable, "-c", SLOW_IMPORT], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"importing\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == b""
    assert process.returncode == 130


def test_the_installed_command_begins_where_the_module_does() -> None:
    root = Path(__file__).parents[2]
    scripts = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    module, _, name = scripts["batchrun"].partition(":")
    assert f"from {module} import {name}\n" in (root / "batchrun" / "__main__.py").read_text(encoding="utf-8")
