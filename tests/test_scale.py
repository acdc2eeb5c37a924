"""Files of very many rows: what planning and running them costs, by counting calls, bytes and objects.

The sizes are modest, since nothing here may grow faster than the rows. The slow tests are of the full size.
"""

import gc
import subprocess
import sys
import tracemalloc
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from batchrun import pipeline
from batchrun.engine import engine as engine_module
from batchrun.engine.config import ModelConfig
from batchrun.engine.outputs import PromptSet
from batchrun.engine.sampling_params import SamplingParams
from batchrun.options import RunOptions
from batchrun.planning import JobPlan, KVSize, make_plan
from batchrun.prefix_cache import row_sort
from batchrun.progress import Progress

REPOSITORY = Path(__file__).parent.parent
KV = KVSize(page_size=16, bytes_per_token=100, memory=1 << 32)
OPTIONS = RunOptions(inputs=("in.parquet",), output=Path("out.parquet"))


def prompts_of(tokens: np.ndarray, params: SamplingParams) -> PromptSet:
    """Rows of equal length, int32 [rows, length], with the same settings."""
    rows, length = tokens.shape
    number = np.arange(rows, dtype=np.int64)
    lengths = np.full(rows, length, np.int32)
    return PromptSet(tokens.ravel(), number * length, lengths, number, np.zeros(rows, np.int32), [params])


def rows_of(shape: str, rows: int, length: int) -> np.ndarray:
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 49_152, (rows, length), np.int32)
    if shape == "system":
        tokens[:, : length - 8] = tokens[:100, : length - 8][draw.integers(0, 100, rows)]
    if shape == "last_token":
        tokens[:, :-1] = tokens[0, :-1]
        tokens[:, -1] = draw.permutation(rows)
    if shape == "staircase":  # each row parts from the ones after it one token later
        np.copyto(tokens, 7, where=np.arange(length) < (np.arange(rows) % length)[:, None])
    return tokens


SHAPES = ["unique", "system", "last_token", "staircase"]


def plan(prompts: PromptSet, max_context: int = 4096) -> JobPlan:
    model = ModelConfig("LlamaForCausalLM", 2, 64, 128, 4, 2, 16, 300, 1e-5, 1e4, None, max_context, True, (2,), 1)
    return make_plan(prompts, model, OPTIONS, KV)


def peak_of_plan(prompts: PromptSet) -> int:
    gc.collect()
    tracemalloc.start()
    plan(prompts)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


# --- planning -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_planning_takes_bytes_per_row_and_node_and_none_per_token(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_sort, "BATCH_ROWS", 512)
    params = SamplingParams(max_tokens=16)
    plan(prompts_of(rows_of(shape, 100, 16), params))  # what is made once and kept
    short, long = (peak_of_plan(prompts_of(rows_of(shape, 20_000, length), params)) for length in (32, 320))
    assert short < 20_000 * 500
    assert long < short * 1.1


@pytest.mark.parametrize("shape", SHAPES)
def test_planning_calls_no_function_per_row(shape: str) -> None:
    calls: Counter[str] = Counter()

    def count(frame: Any, event: str, _argument: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_qualname] += 1

    prompts = prompts_of(rows_of(shape, 5000, 64), SamplingParams(max_tokens=16))
    sys.setprofile(count)
    try:
        plan(prompts)
    finally:
        sys.setprofile(None)
    assert sum(calls.values()) < 2500, calls.most_common(5)


def test_settings_that_end_at_the_context_are_made_once_per_length(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = prompts_of(rows_of("unique", 3000, 40), SamplingParams(max_tokens=1000))
    prompts.length[:] = 1 + np.arange(3000) % 40
    made: list[int] = []
    monkeypatch.setattr(SamplingParams, "__post_init__", lambda params: made.append(params.max_tokens))
    planned = plan(prompts, max_context=50)
    assert len(made) <= 2 * 40 + 1, "once for the context, and all of them once for greedy rows without a seed"
    assert [planned.prompts.params(row).max_tokens for row in (0, 39, 40)] == [49, 10, 49]


# --- running --------------------------------------------------------------------------------------------------------------


class StubRunner:
    """Stands in for the device: every row's next token is the same."""

    def __init__(self, model: Any, _num_pages: int, _kv_dtype: str) -> None:
        self.logits = torch.zeros(1, model.config.vocab_size)
        self.logits[0, 50] = 1

    def execute(self, step: Any) -> torch.Tensor:
        return self.logits.repeat(len(step.logit_rows), 1)


class Watched(Progress):
    """Looks at memory when a share of the rows is done."""

    def __init__(self, look: Any, every: int) -> None:
        super().__init__(quiet=True)
        self.looks: list[Any] = []
        self._look = look
        self._every = every

    def update(self, done_rows: int, *_args: Any, **_options: Any) -> None:
        if done_rows >= self._every * (len(self.looks) + 1):
            self.looks.append(self._look())


def run_stubbed(folder: Path, model: Path, rows: int, progress: Progress, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(engine_module, "Runner", StubRunner)
    pq.write_table(pa.table({"prompt": [f"the cat {number}" for number in range(rows)]}), folder / "in.parquet")
    options = RunOptions(
        inputs=(str(folder / "in.parquet"),),
        output=folder / "out.parquet",
        model=str(model),
        dtype="float32",
        threads=1,
        max_running=64,
        sampling=SamplingParams(max_tokens=3, ignore_eos=True),
    )
    return pipeline.run(options, progress).summary


def test_finished_rows_leave_nothing_in_memory(tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def look() -> SimpleNamespace:
        gc.collect()
        if not tracemalloc.is_tracing():
            tracemalloc.start()  # late, since it slows everything down
        return SimpleNamespace(new_bytes=tracemalloc.get_traced_memory()[0], objects=len(gc.get_objects()))

    progress = Watched(look, every=1000)
    try:
        summary = run_stubbed(tmp_path, tiny_model_folder, 3500, progress, monkeypatch)
    finally:
        tracemalloc.stop()
    assert (summary["ok"], summary["peak_running"]) == (3500, 64)
    first, last = progress.looks[0], progress.looks[2]
    assert last.objects - first.objects < 1500, "less than one per row that finished in between"
    # Up to a part of results, 1,000 rows, may wait to be written.
    assert last.new_bytes < 1_000_000


# --- full size ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["unique", "system", "turns", "identical", "last_token"])
def test_a_million_rows_are_planned_within_a_minute_and_4_gib(shape: str, tmp_path: Path) -> None:
    figures = tmp_path / "figures.parquet"
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "plan_scale.py"), shape, "--folder", str(tmp_path)]
    subprocess.run([*command, "--rows", "1000000", "--length", "512", "-o", str(figures)], check=True, capture_output=True)
    (row,) = pq.read_table(figures).to_pylist()
    assert row["tokens"] == 512_000_000
    assert row["cpu_s"] < 60
    assert row["peak_gib"] < 4


@pytest.mark.slow
def test_resident_memory_is_flat_over_200_000_rows(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resident_kib() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

    progress = Watched(resident_kib, every=10_000)
    summary = run_stubbed(tmp_path, tiny_model_folder, 200_000, progress, monkeypatch)
    assert summary["ok"] == 200_000
    assert max(progress.looks) - progress.looks[0] < 10 << 10
