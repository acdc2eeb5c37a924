"""A job outlives whoever reads its output streams."""

import subprocess
import sys
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
