"""batchrun from Python: the same options as the command line, tables in and tables out."""

import difflib
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.engine.sampling_params import SamplingParams
from batchrun.option_types import typed
from batchrun.options import PromptOptions, RunOptions, parse_size, read_template
from batchrun.plan_report import PlanReport, plan_job

__all__ = ["PlanReport", "RunResult", "plan", "run"]

Inputs = str | Path | Iterable[str | Path] | Any
"""A path, a folder, a glob, several of them, or a table: pyarrow's, or anything that exports an Arrow stream (pandas, polars)."""

_NEGATED = {"no_dedupe": "dedupe", "no_prefix_cache": "prefix_cache"}
_PROMPT = {f.name for f in fields(PromptOptions)}
_SAMPLING = {f.name for f in fields(SamplingParams)} - {"seed"}
_RUN = {f.name for f in fields(RunOptions)} - {"inputs", "output", "model", "prompt", "sampling", *_NEGATED.values()}


@dataclass(slots=True)
class RunResult:
    """What a finished run gave."""

    summary: dict[str, Any]
    """Counts and times; the keys are in docs/architecture.md."""
    warnings: tuple[str, ...]
    failures: tuple[str, ...]
    """The most frequent reasons why rows failed, one line each with a count and a row."""
    output: Path | None
    """The output file or folder; None when none was asked for."""
    _table: pa.Table | None = field(default=None, repr=False)

    @property
    def table(self) -> pa.Table:
        """The output rows: the input's columns, then ours. Read from the output at the first use and kept."""
        if self._table is None:
            assert self.output is not None, "a result without an output holds its table"
            self._table = _read_output(self.output)
        return self._table


def run(table_or_paths: Inputs, output: str | Path | None = None, model: str | Path | None = None, **options: Any) -> RunResult:
    """Answer every prompt; `batchrun run` from Python.

    Args:
        table_or_paths: Parquet file(s), folder(s), glob(s), or a table in memory.
        output: a `.parquet` file or a folder; None gives the answers in `.table` only.
        model: Hugging Face folder or hub id, or a `.gguf` file; None is the embedded model.
        options: the options of `batchrun run` with underscores, for example `max_tokens=64`, `temperature=0.7`,
            `stop=["\\n"]`, `template="prompt.jinja"`, `kv_memory="4GiB"`, `no_dedupe=True`, `overwrite=True`;
            `quiet=False` shows progress on standard error.

    Raises:
        ValueError: an unknown option, a value of a wrong type or out of range, or options that contradict each other.
        batchrun.errors.Refused: the input, the output or the model cannot be used.
        batchrun.errors.Stopped: the run could not go on; what was finished is beside the output and can be resumed.
    """
    from batchrun import pipeline
    from batchrun.progress import Progress

    quiet = options.pop("quiet", True)
    if not isinstance(quiet, bool):
        raise ValueError(f"--quiet is {quiet!r}: it must be True or False")
    if output is not None and not isinstance(output, str | Path):
        raise ValueError(f"--output is {output!r}: it must be a path")
    if output is None and (options.get("resume") or options.get("overwrite")):
        raise ValueError("resume and overwrite are about an output that is there already: give output=... with them")
    with _scratch_folder() as scratch:
        target = scratch / "output.parquet" if output is None else Path(output)
        made = _run_options(_as_paths(table_or_paths, scratch), target, model, options)
        with Progress(quiet=quiet) as progress:
            done = pipeline.run(made, progress=progress)
        result = RunResult(
            summary=dict(done.summary),
            warnings=tuple(done.warnings),
            failures=tuple(done.failures),
            output=None if output is None else target,
        )
        if output is None:
            result._table = _read_output(target)
    return result


def plan(table_or_paths: Inputs, model: str | Path | None = None, target: str = "this", **options: Any) -> PlanReport:
    """What would be shared, how long it would take and how much memory it needs; `batchrun plan` from Python.

    Needs the model's config and tokenizer, not its weights. Arguments and errors as for `run`.

    Args:
        target: the machine to predict for: `this`, a name that `batchrun plan --help` lists, or a TOML file.
    """
    with _scratch_folder() as scratch:
        made = _run_options(_as_paths(table_or_paths, scratch), scratch / "output.parquet", model, options)
        return plan_job(made, target)


def option_names() -> list[str]:
    """What `run` takes beside its input, output and model, in alphabetical order."""
    return sorted({*_PROMPT, *_SAMPLING, *_RUN, *_NEGATED, "quiet"})


def _run_options(paths: tuple[str, ...], output: Path, model: str | Path | None, options: dict[str, Any]) -> RunOptions:
    """RunOptions from the command line's names."""
    known = option_names()
    for name in options:
        if name not in known:
            guess = difflib.get_close_matches(name, known, n=1)
            raise ValueError(
                f"unknown option {name!r}: " + (f"did you mean {guess[0]!r}?" if guess else f"there are {', '.join(known)}")
            )
    values = {name: typed(name, value) for name, value in options.items()}
    if isinstance(values.get("kv_memory"), str):
        values["kv_memory"] = parse_size(values["kv_memory"])
    if values.get("template") is not None:
        values["template"] = read_template("--template", values["template"])
    if values.get("profile") is not None:
        values["profile"] = Path(values["profile"])
    for negated, name in _NEGATED.items():
        if negated in values:
            values[name] = not values.pop(negated)
    if model is not None and not isinstance(model, str | Path):
        raise ValueError(f"--model is {model!r}: it must be a path or the name of a model")
    return RunOptions(
        inputs=paths,
        output=output,
        model=None if model is None else str(model),
        prompt=PromptOptions(**{name: value for name, value in values.items() if name in _PROMPT}),
        sampling=SamplingParams(**{name: value for name, value in values.items() if name in _SAMPLING}),
        **{name: value for name, value in values.items() if name in {*_RUN, *_NEGATED.values()}},
    )


def _as_paths(given: Inputs, scratch: Path) -> tuple[str, ...]:
    """The inputs as paths; a table is written into the scratch folder first, so that it takes the same way as a file."""
    if isinstance(given, str | Path):
        return (str(given),)
    if isinstance(given, pa.Table) or hasattr(given, "__arrow_c_stream__"):
        path = scratch / "input.parquet"
        pq.write_table(given if isinstance(given, pa.Table) else pa.table(given), path)
        return (str(path),)
    if isinstance(given, Sequence) and all(isinstance(item, str | Path) for item in given):
        return tuple(str(item) for item in given)
    raise ValueError(
        f"the input is a {type(given).__name__}: give paths, a pyarrow table, or a data frame that exports Arrow streams"
    )


def _read_output(output: Path) -> pa.Table:
    """The rows of an output file, or of an output folder's part files in order."""
    files = sorted(output.glob("*.parquet")) if output.is_dir() else [output]
    # File by file: pyarrow would take a folder's name like `a=b` for a partition and add a column.
    return pa.concat_tables([pq.ParquetFile(file).read() for file in files])


@contextmanager
def _scratch_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="batchrun-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
