"""`batchrun run`: the main job."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import click

from batchrun.cli.common import (
    EngineLimits,
    ModelChoice,
    engine_options,
    model_options,
    parse_names,
    prompt_options,
    refusing,
    sampling_options,
)
from batchrun.cli.ending import Interrupted, StopSignals, log_crash, one_line, say, silence_stdout
from batchrun.engine.errors import ModelError
from batchrun.engine.sampling_params import SamplingParams
from batchrun.errors import BatchrunError, Refused, Stopped
from batchrun.options import PromptOptions, RunOptions


@click.command("run")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option("-o", "--output", required=True, type=Path, metavar="PATH", help="A .parquet file, or a folder for part files.")
@model_options
@prompt_options
@sampling_options
@click.option("--seed", type=int, default=0, show_default=True, help="The job's seed; a row's own `seed` column goes before it.")
@engine_options
@click.option("--resume", is_flag=True, help="Go on where a stopped job of the same input and options left off.")
@click.option("--overwrite", is_flag=True, help="Replace an output, or the work of a stopped job, that is there already.")
@click.option("--flush-seconds", type=float, default=10.0, show_default=True, help="Write finished rows at least this often.")
@click.option("--output-prefix", default="", metavar="TEXT", help="Put before the name of every column that is added.")
@click.option("--keep-columns", type=parse_names, metavar="A,B", help="Input columns to carry over.  [default: all]")
@click.option("--return-token-ids", is_flag=True, help="Add the column `output_ids`.")
@click.option("--profile", type=Path, metavar="FILE", help="Write what each engine step did and where its time went: Parquet.")
@click.option("--summary-json", is_flag=True, help="Print the summary as one line of JSON on standard output.")
@click.option("-q", "--quiet", is_flag=True, help="No progress on standard error.")
def run_command(
    *,
    inputs: tuple[str, ...],
    output: Path,
    prompt: PromptOptions,
    sampling: SamplingParams,
    model: ModelChoice,
    engine: EngineLimits,
    summary_json: bool,
    quiet: bool,
    **rest: Any,
) -> int:
    """Answer every prompt of Parquet files, folders or globs.

    The output holds every input column, the answer, why it ended, and the row's token counts and latencies; one bad row
    costs one row. A stopped or killed job goes on with --resume.
    """
    with refusing():
        options = RunOptions(
            inputs=inputs,
            output=output,
            prompt=prompt,
            sampling=sampling,
            **model.fields(),
            **engine.fields(),
            **rest,
        )
    return _run(options, quiet, summary_json)


def _run(options: RunOptions, quiet: bool, summary_json: bool) -> int:
    with StopSignals() as signals:
        try:
            from batchrun import pipeline
            from batchrun.progress import Progress

            with Progress(quiet=quiet) as progress:
                result = pipeline.run(options, progress=progress, stop=signals.requested)
        except ModelError as error:
            raise Refused(str(error)) from error
        except (Interrupted, Stopped):
            if signals.signal_number is None:
                raise
            _say_stopped(signals.signal_number, options.output)
            return 128 + signals.signal_number
        except BatchrunError:
            raise
        except Exception as error:
            log = log_crash(error, _work_folder(options.output))
            raise Stopped(f"{one_line(error)}; the traceback is in {log}{_resume_hint(options.output)}") from error
    if summary_json:
        try:
            click.echo(json.dumps(result.summary, ensure_ascii=True))
            sys.stdout.flush()
        except OSError as error:
            # The job itself is finished: its exit code stands.
            say(f"batchrun: warning: the summary cannot be written to standard output: {error.strerror}")
            silence_stdout()
    for warning in result.warnings:
        say(f"batchrun: warning: {one_line(warning)}")
    for failure in result.failures:
        say(f"batchrun: {one_line(failure)}")
    say(f"{result.summary['ok']} ok, {result.summary['failed']} failed")
    return result.exit_code


def _work_folder(output: Path) -> Path:
    # Imported here, because it brings pyarrow along, which parsing and refusing need not wait for.
    from batchrun.ledger import work_path

    return work_path(output)


def _say_stopped(signal_number: int, output: Path) -> None:
    name = signal.Signals(signal_number).name
    say(f"batchrun: stopped by {name}{_resume_hint(output)}")


def _resume_hint(output: Path) -> str:
    return "; the same command with --resume goes on from here" if _work_folder(output).is_dir() else ""
