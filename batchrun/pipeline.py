"""The main job, from Parquet to Parquet: read, check, render, tokenize, plan, run, record, write."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from batchrun.engine.device import missing_kernel
from batchrun.engine.loader import ModelSource, content_hash, load_model
from batchrun.engine.outputs import Completion, EngineStats, PromptSet
from batchrun.errors import Stopped
from batchrun.failures import failure_lines
from batchrun.intake import Intake, take_in
from batchrun.ledger import WorkFolder
from batchrun.metrics import latency_columns
from batchrun.opening import OpenedModel, check_kv_memory, kv_size, open_input, open_model, settle
from batchrun.options import RunOptions
from batchrun.planning import JobPlan, KVSize, make_plan, take
from batchrun.profile import ProfileWriter, check_profile
from batchrun.progress import Progress
from batchrun.render import Renderer
from batchrun.results import ResultRow, error_row, result_schema
from batchrun.resume import check_output, check_resumable, prepare
from batchrun.rows import RowError, check_input_columns
from batchrun.sinks import PartWriter, finish
from batchrun.sources import Source
from batchrun.time_left import OutputsLeft

if TYPE_CHECKING:
    from batchrun.engine.engine import Engine

POLL_ROWS = 1000
"""Rows written between two looks at whether the run was asked to stop, within a step."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a finished run gave."""

    summary: dict[str, Any]
    exit_code: int
    """0: every row fine; 1: some rows have errors."""
    output: Path
    warnings: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """The most frequent reasons why rows failed, one line each with a count and a row."""


@dataclass(slots=True)
class _Timer:
    """Seconds spent in each part of the run, by the monotonic clock."""

    read_s: float = 0.0
    plan_s: float = 0.0
    load_s: float = 0.0
    run_s: float = 0.0
    _since: float = field(default_factory=time.monotonic)

    def lap(self, part: str) -> None:
        """The time since the last lap was spent on this part."""
        now = time.monotonic()
        setattr(self, part, getattr(self, part) + now - self._since)
        self._since = now


def run(options: RunOptions, progress: Progress | None = None, stop: Callable[[], bool] | None = None) -> RunResult:
    """Answer every row of the inputs and write the output.

    Args:
        progress: told about phases and counts; None is silent.
        stop: polled after every batch read and every step; when true, what is finished is flushed and the run ends.

    Raises:
        Refused: input, options, output or model cannot be used; nothing was created.
        ModelError: the same, for the model.
        Stopped: asked to stop, or the disk is lost; what is finished is in the work folder, for --resume.
    """
    progress = progress or Progress(quiet=True)
    timer = _Timer()
    progress.phase("reading")
    check_kv_memory(options)
    opened = open_input(options)
    source = opened.source
    check_input_columns(source.schema, options.output_prefix, options.return_token_ids, options.keep_columns)
    place: dict[str, Any] = {
        "inputs": options.inputs,
        "files": source.paths,
        "resume": options.resume,
        "overwrite": options.overwrite,
    }
    check_output(options.output, **place)
    if options.profile is not None:
        check_profile(options.profile, options.overwrite, [options.output, *map(Path, source.paths)])
    if options.resume:
        # What can be compared before torch and the model are there; `prepare` compares all of it.
        check_resumable(options.output, _settings(options), options.inputs)
        check_resumable(options.output, {"input": source.content_hash()}, options.inputs)
    model = open_model(options, opened)
    options, warnings = settle(options)
    kv = kv_size(options, model.config)
    timer.lap("load_s")
    prepared = prepare(options.output, _fingerprint(options, source, model.found), **place)
    if prepared.work is None:
        note = f"{options.output} is finished already, by a run of the same input and options"
        return RunResult(prepared.summary, 0, options.output, [note])
    work = prepared.work
    try:
        job = _Job(options, source, model, kv, work, progress, stop or (lambda: False), timer)
        job.warnings.extend([*opened.warnings, *warnings])
        renderer = Renderer(model.tokenizer, options.prompt, work.started_at)
        intake = take_in(source, opened.reader, renderer, work.path, model.config.vocab_size, job.stop_if_asked)
        timer.lap("read_s")
        job.warnings.extend(renderer.warnings)
        if not renderer.uses_chat_template and not options.prompt.raw:
            job.warnings.append("the model has no chat template: prompts were encoded as plain text, as with --raw")
        return job.run(intake)
    except Stopped:
        work.close()
        raise
    except BaseException:
        work.abandon()
        raise


def _fingerprint(options: RunOptions, source: Source, found: ModelSource) -> dict[str, Any]:
    """Everything that changes an output or its columns; two runs of equal fingerprints give the same rows."""
    return {
        "input": source.content_hash(),
        "model": content_hash(found),
        "dtype": options.dtype,
        **_settings(options),
    }


def _settings(options: RunOptions) -> dict[str, Any]:
    """The part of the fingerprint that needs neither the input nor the model."""
    return {
        **{name.replace("_", "-"): value for name, value in asdict(options.prompt).items()},
        **{name.replace("_", "-"): value for name, value in asdict(options.sampling).items() if name != "seed"},
        "seed": options.seed,
        "kv-tokens": options.kv_tokens,
        "kv-memory": options.kv_memory,
        "kv-dtype": options.kv_dtype,
        "output-prefix": options.output_prefix,
        "keep-columns": options.keep_columns,
        "return-token-ids": options.return_token_ids,
    }


class _Job:
    """One run between its work folder and its output."""

    def __init__(
        self,
        options: RunOptions,
        source: Source,
        model: OpenedModel,
        kv: KVSize,
        work: WorkFolder,
        progress: Progress,
        stop: Callable[[], bool],
        timer: _Timer,
    ) -> None:
        self.warnings: list[str] = list(work.notes)
        self._options = options
        self._source = source
        self._model = model
        self._kv = kv
        self._work = work
        self._progress = progress
        self._stop = stop
        self._timer = timer
        self._writer = PartWriter(work, result_schema(return_token_ids=options.return_token_ids), options.flush_seconds)
        self._before = work.done()
        self._done_samples = np.bincount(self._before.row_index, minlength=source.num_rows)
        self._rows_before = int(np.count_nonzero(self._done_samples))
        self._done_partly: set[tuple[int, int]] = set()
        """Samples that earlier processes finished, of rows that are not yet whole: only those rows run again."""
        self._samples = np.ones(source.num_rows, np.int64)
        """How many output rows each input row has: n, or 1 for an error row that never ran."""
        self._num_done = 0
        self._num_added = 0
        self._failed_rows: set[int] = set()
        self._failed_before = work.totals().failed

    def stop_if_asked(self) -> None:
        """Flush and raise Stopped when the run was asked to end."""
        if self._stop():
            self._writer.flush()
            raise Stopped(f"stopped with {self._source.num_rows - self._num_done} of {self._source.num_rows} rows left")

    def run(self, intake: Intake) -> RunResult:
        """Plan, compute, write; what earlier processes finished is left alone.

        Raises:
            Refused: the KV pool that was asked for is too small to be one.
            Stopped: asked to stop, or the disk is lost.
        """
        self._progress.phase("planning")
        todo = self._not_done(intake.prompts)
        plan = make_plan(todo, self._model.config, self._options, self._kv)
        self.warnings.extend(plan.warnings)
        self._timer.lap("plan_s")
        engine = self._load(plan)
        self._write_errors([*intake.errors, *plan.errors], todo)
        if engine is not None:
            self._compute(engine, plan)
        self._writer.close()
        self._timer.lap("run_s")
        self._progress.phase("writing")
        summary = self._summary(plan, EngineStats() if engine is None else engine.stats)
        failures = failure_lines(self._work) if summary["failed"] else []
        options = self._options
        report = finish(
            self._source,
            self._work,
            keep=options.keep_columns,
            prefix=options.output_prefix,
            return_token_ids=options.return_token_ids,
            summary=summary,
            samples=self._samples,
        )
        if report.repaired_rows:
            self.warnings.append(f"{report.repaired_rows} output rows had bytes that are not UTF-8: see their `error`")
        return RunResult(summary, int(summary["failed"] > 0), options.output, self.warnings, failures)

    def _not_done(self, prompts: PromptSet) -> PromptSet:
        """The rows that have samples left to compute; notes how many samples each row has, and which are there already."""
        samples = np.array([params.n for params in prompts.params_table], np.int64)[prompts.params_id]
        self._samples[prompts.row_index] = samples
        rows, done = self._before.row_index, self._before.sample
        partly = self._done_samples[rows] < self._samples[rows]
        self._done_partly = set(zip(rows[partly].tolist(), done[partly].tolist(), strict=True))
        self._num_done = int((self._done_samples >= self._samples).sum())
        return take(prompts, self._done_samples[prompts.row_index] < samples)

    def _load(self, plan: JobPlan) -> "Engine | None":
        if not len(plan.prompts):
            return None
        from batchrun.engine.engine import Engine

        self._progress.phase("loading")
        model = load_model(self._model.found, self._options.device, self._options.dtype, self._options.threads)
        if (status := missing_kernel(self._options.dtype)) is not None:
            self.warnings.append(f"bfloat16 is computed without the compiled kernel, several times slower: {status}")
        engine = Engine(model, plan.config)
        self._timer.lap("load_s")
        return engine

    def _write_errors(self, errors: list[RowError], prompts: PromptSet) -> None:
        """The rows that cannot run: one output row each, with the prompt's tokens where the prompt could be encoded."""
        places = np.searchsorted(prompts.row_index, [error.row_index for error in errors])
        for error, place in zip(errors, places.tolist(), strict=True):
            known = place < len(prompts) and prompts.row_index[place] == error.row_index
            tokens = int(prompts.length[place]) if known else 0
            self._samples[error.row_index] = 1
            self._add(error_row(error.row_index, error.message, self._work.run_id, prompt_tokens=tokens))

    def _compute(self, engine: "Engine", plan: JobPlan) -> None:
        """Run the engine to the end; results reach the disk as they come."""
        self._progress.phase("running")
        outputs = OutputsLeft(plan.prompts.row_index, plan.layout.max_tokens, plan.layout.samples)
        # The wall clock is read once: a clock that is set during the run moves no row's times.
        zero = datetime.now(UTC)
        profile = None if self._options.profile is None else ProfileWriter(self._options.profile)
        try:
            for completions in engine.run(plan.prompts, plan.trie, plan.order, profile.add if profile else None):
                for completion in completions:
                    outputs.end(completion.row, len(completion.output_ids))
                    for row in _results(completion, plan, zero, self._work.run_id):
                        self._add(row)
                self._writer.flush_if_due()
                self._report(engine, plan, outputs)
                self.stop_if_asked()
        except Stopped:
            raise
        except Exception:
            self._writer.flush()
            raise
        finally:
            if profile:
                profile.close()

    def _add(self, row: ResultRow) -> None:
        if self._done_samples[row.row_index] >= self._samples[row.row_index] or (row.row_index, row.sample) in self._done_partly:
            return
        self._done_samples[row.row_index] += 1
        self._num_done += int(self._done_samples[row.row_index] == self._samples[row.row_index])
        if row.error is not None:
            self._failed_rows.add(row.row_index)
        self._writer.add(row)
        self._num_added += 1
        if self._num_added % POLL_ROWS == 0:  # a step can finish very many rows: duplicates, and copies of a greedy row
            self.stop_if_asked()

    def _report(self, engine: "Engine", plan: JobPlan, outputs: OutputsLeft) -> None:
        stats = engine.stats
        self._progress.update(
            done_rows=self._num_done,
            total_rows=self._source.num_rows,
            failed=self._failed_before + len(self._failed_rows),
            prompt_tokens_done=stats.computed_prompt_tokens - stats.recomputed_tokens,
            prompt_tokens_total=plan.trie.trie_tokens,
            output_tokens=stats.output_tokens,
            output_tokens_left=outputs.tokens(stats.output_tokens),
            running=engine.running,
            kv_used_share=engine.kv_used_share,
        )

    def _summary(self, plan: JobPlan, stats: EngineStats) -> dict[str, Any]:
        """Rows, samples and tokens of the whole output; times, rates and the engine's counts of this process alone."""
        totals, timer = self._work.totals(), self._timer
        computed_rows = totals.rows - self._rows_before
        return {
            "rows": totals.rows,
            "ok": totals.ok,
            "failed": totals.failed,
            "samples": totals.samples,
            "prompt_tokens": totals.prompt_tokens,
            "trie_tokens": plan.trie.trie_tokens,
            "computed_prompt_tokens": stats.computed_prompt_tokens,
            "recomputed_tokens": stats.recomputed_tokens,
            "recomputed_output_tokens": stats.recomputed_output_tokens,
            "output_tokens": totals.output_tokens,
            "read_s": round(timer.read_s, 3),
            "load_s": round(timer.load_s, 3),
            "plan_s": round(timer.plan_s, 3),
            "run_s": round(timer.run_s, 3),
            "rows_per_s": round(computed_rows / timer.run_s, 3),
            "total_tokens_per_s": round((plan.prompt_tokens + stats.output_tokens) / timer.run_s, 1),
            "peak_kv_tokens": stats.peak_kv_tokens,
            "kv_pool_tokens": plan.config.kv_tokens,
            "peak_running": stats.peak_running,
            "preemptions": stats.preemptions,
            "evictions": stats.evictions,
            "steps": stats.steps,
            "decode_steps": stats.decode_steps,
            "run_id": self._work.run_id,
            "model": self._model.found.name,
            "device": self._options.device,
            "dtype": self._options.dtype,
            "kv_dtype": self._options.dtype if self._kv.dtype == "auto" else self._kv.dtype,
        }


def _results(completion: Completion, plan: JobPlan, zero: datetime, run_id: int) -> Iterator[ResultRow]:
    """The output rows of one computed sample: the row's own, those of its duplicates, and the copies of a greedy row."""
    failed = completion.error is not None
    started_at = None if completion.started is None else zero + timedelta(seconds=completion.started)
    latency = latency_columns(completion)
    for target in plan.fan_out(completion.row):
        is_own = target.row_index == completion.row
        for sample in range(target.copies) if target.copies > 1 else (completion.sample,):
            yield ResultRow(
                row_index=target.row_index,
                sample=sample,
                output=None if failed else completion.text,
                finish_reason=completion.finish_reason,
                error=completion.error,
                prompt_tokens=completion.prompt_tokens,
                cached_tokens=0 if failed else completion.cached_tokens if is_own else completion.prompt_tokens,
                output_tokens=len(completion.output_ids),
                **latency._asdict(),
                started_at=started_at,
                run_id=run_id,
                output_ids=completion.output_ids,
            )
