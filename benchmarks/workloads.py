"""A file of rows as every engine gets it: the same rows for batchrun, their token ids for the others, and their tree."""

import json
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.engine.config import ModelConfig
from batchrun.engine.loader import load_tokenizer, resolve_model
from batchrun.engine.outputs import PromptSet
from batchrun.hardware import total_memory
from batchrun.intake import take_in
from batchrun.options import RunOptions
from batchrun.planning import JobPlan, KVSize, make_plan
from batchrun.render import Renderer
from batchrun.rows import RowReader
from batchrun.sources import open_source

SAMPLED_AT = 0.8


@dataclass(frozen=True)
class Workload:
    """Rows that are ready to run, each with a fixed output length."""

    name: str
    num_rows: int
    data: Path
    """Parquet for batchrun; without `n` where the rows are greedy, since greedy samples are all alike."""
    requests: Path
    """JSON list of {ids, max_tokens, n}, one for each row: what the other engines get."""
    temperature: float
    config: ModelConfig
    plan: JobPlan
    """Distinct rows and their tree, as batchrun computes them by default."""
    prompt_tokens: int
    """Of all rows, each once whatever its `n`: every engine must say so too."""
    output_tokens: int
    """Of all samples of all rows: every engine must say so too."""


def temperature_of(table: pa.Table, asked: float | None) -> float:
    """`asked`, or by the rule: files with an `n` above 1 are sampled at 0.8, all others are greedy."""
    if asked is not None:
        return asked
    return SAMPLED_AT if "n" in table.column_names and max(table["n"].to_pylist(), default=1) > 1 else 0.0


def trimmed(table: pa.Table, rows: int, max_tokens: int | None, temperature: float) -> pa.Table:
    """The first rows, each with at most `max_tokens` output tokens."""
    table = table.slice(0, rows)
    if temperature == 0 and "n" in table.column_names:
        table = table.drop_columns(["n"])
    if max_tokens is not None:
        lengths = pa.array([min(length, max_tokens) for length in table["max_tokens"].to_pylist()], pa.int32())
        table = table.set_column(table.column_names.index("max_tokens"), "max_tokens", lengths)
    return table


def prepare(path: Path, model: str, folder: Path, rows: int, max_tokens: int | None, temperature: float | None) -> Workload:
    """Read a Parquet file with `messages`, `max_tokens` and maybe `n`, and write into `folder` what the engines read.

    Token ids, deduplication and tree come from batchrun's own reader, renderer and planner, so that every engine gets the
    ids that batchrun makes of the rows.

    Raises:
        ValueError: a row cannot run: engines that skip different rows cannot be compared.
    """
    table = pq.read_table(path)
    sampled_at = temperature_of(table, temperature)
    table = trimmed(table, rows, max_tokens, sampled_at)
    data, requests = folder / path.name, folder / f"{path.stem}.json"
    pq.write_table(table, data)
    spool = folder / f"{path.stem}.spool"
    spool.mkdir()
    options = RunOptions(inputs=(str(data),), output=folder / "unused.parquet", model=model)
    options = replace(options, sampling=replace(options.sampling, temperature=sampled_at, ignore_eos=True))
    source = open_source(options.inputs)
    config, tokenizer = load_tokenizer(resolve_model(model))
    renderer = Renderer(tokenizer, options.prompt, datetime.now())
    intake = take_in(source, RowReader(source.schema, options.prompt, options.sampling, None), renderer, spool, config.vocab_size)
    kv = KVSize(1, config.kv_bytes_per_token("bfloat16"), total_memory())  # only the tree is used, which has no pages
    plan = make_plan(intake.prompts, config, options, kv)
    for error in [*intake.errors, *plan.errors]:
        raise ValueError(f"{path.name}: row {error.row_index}: {error.message}")
    asked = _requests(intake.prompts)
    requests.write_text(json.dumps(asked))
    return Workload(
        name=path.stem,
        num_rows=table.num_rows,
        data=data,
        requests=requests,
        temperature=sampled_at,
        config=config,
        plan=plan,
        prompt_tokens=sum(len(request["ids"]) for request in asked),
        output_tokens=sum(request["max_tokens"] * request["n"] for request in asked),
    )


def _requests(prompts: PromptSet) -> list[dict[str, Any]]:
    params = [prompts.params(row) for row in range(len(prompts))]
    tokens = np.asarray(prompts.tokens)
    begins, lengths = prompts.begin.tolist(), prompts.length.tolist()
    return [
        {"ids": tokens[begin : begin + length].tolist(), "max_tokens": each.max_tokens, "n": each.n}
        for begin, length, each in zip(begins, lengths, params, strict=True)
    ]
