"""`batchrun plan`: what a job would share, need and take."""

import json
from pathlib import Path

import click

from batchrun.cli.common import (
    EngineLimits,
    ModelChoice,
    engine_options,
    model_options,
    prompt_options,
    refusing,
    sampling_options,
)
from batchrun.engine.sampling_params import SamplingParams
from batchrun.options import PromptOptions, RunOptions


@click.command("plan")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option(
    "--target",
    default="this",
    show_default=True,
    metavar="NAME",
    help="Predict for this machine, cpu, h200, a100 or a .toml file.",
)
@model_options
@prompt_options
@sampling_options
@engine_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def plan_command(
    *,
    inputs: tuple[str, ...],
    target: str,
    prompt: PromptOptions,
    sampling: SamplingParams,
    model: ModelChoice,
    engine: EngineLimits,
    as_json: bool,
) -> int:
    """Say what a job would share, how long it takes and how much memory it needs.

    Needs no GPU and none of the model's weights: the input is read, rendered and tokenised as a run does, and nothing is
    computed or written. A --target .toml file holds flop_per_s, bytes_per_s and memory_bytes.
    """
    with refusing():
        # Nothing is written: the output only has to be named.
        options = RunOptions(
            inputs=inputs, output=Path("plan.parquet"), prompt=prompt, sampling=sampling, **model.fields(), **engine.fields()
        )
    from batchrun.plan_report import plan_job

    report = plan_job(options, target)
    click.echo(json.dumps(report.as_dict()) if as_json else str(report))
    return 1 if report.failed_rows else 0
