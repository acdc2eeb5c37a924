"""The whole pipeline inside the test process, each model loaded once.

`run_job(table, ...)` writes the table as a Parquet file, runs the job on it and gives back the output's rows, the summary,
the plan and the scheduler as it was at the end. Options of RunOptions and SamplingParams are given by their names;
`engine={...}` changes fields of the engine's configuration that users cannot set.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from batchrun import pipeline
from batchrun.engine import engine as engine_module
from batchrun.engine.loader import LoadedModel, ModelSource, load_model
from batchrun.engine.sampling_params import SamplingParams
from batchrun.engine.scheduler import Scheduler
from batchrun.options import PromptOptions, RunOptions
from batchrun.planning import JobPlan


@dataclass
class Outcome:
    """What one run gave."""

    output: Path
    summary: dict[str, Any]
    exit_code: int
    warnings: list[str]
    plan: JobPlan | None
    scheduler: Scheduler | None
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ids(self) -> list[list[int]]:
        """The output ids of each output row."""
        return [row["output_ids"] for row in self.rows]

    def column(self, name: str) -> list[Any]:
        return [row[name] for row in self.rows]


RunJob = Callable[..., Outcome]


@pytest.fixture(scope="session")
def cached_load() -> Iterator[Callable[..., LoadedModel]]:
    """load_model that remembers; the process's number of threads comes back at the end."""
    models: dict[tuple[Path, str, str], LoadedModel] = {}
    threads_before = torch.get_num_threads()

    def load(source: ModelSource, device: str, dtype: str, threads: int | None = None) -> LoadedModel:
        key = (source.path, device, dtype)
        if key not in models:
            models[key] = load_model(source, device, dtype, threads)
        if threads is not None:
            torch.set_num_threads(threads)
        return models[key]

    yield load
    torch.set_num_threads(threads_before)


@pytest.fixture
def cached_models(cached_load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipeline takes its models from `cached_load`."""
    monkeypatch.setattr(pipeline, "load_model", cached_load)


@pytest.fixture
def run_job(tmp_path: Path, cached_models: None, monkeypatch: pytest.MonkeyPatch) -> RunJob:
    """See the module's docstring."""
    seen: dict[str, Any] = {}
    changes: dict[str, Any] = {}
    make_plan, make_scheduler = pipeline.make_plan, engine_module.Scheduler

    def plan(*arguments: Any) -> JobPlan:
        made = make_plan(*arguments)
        seen["plan"] = replace(made, config=replace(made.config, **changes))
        return seen["plan"]

    def scheduler(*arguments: Any) -> Scheduler:
        seen["scheduler"] = make_scheduler(*arguments)
        return seen["scheduler"]

    monkeypatch.setattr(pipeline, "make_plan", plan)
    monkeypatch.setattr(engine_module, "Scheduler", scheduler)
    sampling_names = {item.name for item in fields(SamplingParams)} - {"seed"}

    def run(
        table: pa.Table | Path,
        *,
        model: Path,
        output: Path | None = None,
        engine: dict[str, Any] | None = None,
        prompt: PromptOptions | None = None,
        stop: Callable[[], bool] | None = None,
        **options: Any,
    ) -> Outcome:
        seen.clear()
        changes.clear()
        changes.update(engine or {})
        number = len(list(tmp_path.iterdir()))
        source = table
        if isinstance(table, pa.Table):
            source = tmp_path / f"in-{number}.parquet"
            pq.write_table(table, source)
        sampling = SamplingParams(**{name: options.pop(name) for name in sampling_names & set(options)})
        given = {"dtype": "float32", "threads": 1, "return_token_ids": True, **options}
        run_options = RunOptions(
            inputs=(str(source),),
            output=output or tmp_path / f"out-{number}.parquet",
            model=str(model),
            prompt=prompt or PromptOptions(raw=True),
            sampling=sampling,
            **given,
        )
        result = pipeline.run(run_options, stop=stop)
        rows = pq.read_table(result.output).to_pylist() if result.output.is_file() else []
        return Outcome(
            result.output, result.summary, result.exit_code, result.warnings, seen.get("plan"), seen.get("scheduler"), rows
        )

    return run
