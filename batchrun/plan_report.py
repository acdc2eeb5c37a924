"""`batchrun plan`: what a job would share, how much memory it needs and how long it takes, before anything is computed.

Reads, renders and tokenises the whole input as a run does, and needs of the model its config and tokenizer alone.
"""

import json
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from batchrun import hardware
from batchrun.engine.config import ModelConfig
from batchrun.engine.device import page_size
from batchrun.engine.errors import ModelError
from batchrun.engine.tokenizer import Tokenizer
from batchrun.errors import Refused
from batchrun.failures import kind_of
from batchrun.intake import take_in
from batchrun.opening import OpenedModel, check_kv_dtype, check_kv_memory, kv_size, open_input, open_model, settle
from batchrun.options import RunOptions
from batchrun.planning import JobPlan, KVSize, make_plan, rows_side_by_side
from batchrun.prefix_cache.estimate import ModelDims, SharedNode, TimeEstimate, estimate_time, shared_nodes
from batchrun.render import Renderer
from batchrun.rows import RowError

SHOWN_PREFIXES = 5
SHOWN_TEXT = 60
"""Characters of a prefix's text."""
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Prefix:
    """A beginning that several rows have in common."""

    tokens: int
    rows: int
    saved_tokens: int
    """Prefill that sharing the last part of it saves, the part that no shorter prefix in the tree has."""
    text: str
    """Its beginning."""
    tail: str
    """Its end."""


@dataclass(frozen=True, slots=True)
class PlanReport:
    """What `batchrun plan` says; `str()` is its text, `as_dict()` its JSON."""

    rows: int
    failed_rows: int
    errors: dict[str, int]
    """What is wrong, and with how many rows: as it stands in the first row of each kind."""
    warnings: tuple[str, ...]
    chat_template: bool
    """Prompts are rendered by the model's chat template; else they are plain text to continue."""
    computed_rows: int
    """Rows that are computed; the others are identical to one of them."""
    prompt_tokens: int
    distinct_tokens: int
    saved_share: float
    """Of the prompt tokens, 0 to 1."""
    max_output_tokens: int
    """When every output is as long as it may be."""
    deepest: tuple[Prefix, ...]
    biggest: tuple[Prefix, ...]
    model: str
    num_heads: int
    num_kv_heads: int
    max_context: int
    dtype: str
    kv_dtype: str
    kv_bytes_per_token: int
    kv_pool_tokens: int
    kv_pool_bytes: int
    rows_that_fit: int
    """Samples side by side in the pool with their paths and longest outputs, in the planned order, on average."""
    max_running: int
    target: str
    flop_per_s: float
    bytes_per_s: float
    memory_bytes: int
    ttft_s: float
    """To the first output token of the first row, from the first step."""
    tpot_s: float
    prefill_s: float
    decode_s: float
    total_s: float
    """By the roofline of the target, model load apart, every output as long as it may be."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def plan_job(options: RunOptions, target: str = "this") -> PlanReport:
    """Plan a job without running it.

    Args:
        options: those of a run; output, resume and the like are not looked at.
        target: `this` (measured, about a second), one of hardware.TARGETS, or a TOML file.

    Raises:
        Refused: the input, the options, the model or the target cannot be used.
    """
    if target == "this":
        check_kv_memory(options)
    opened = open_input(options)
    source = opened.source
    machine = None if target == "this" else hardware.load_target(target)
    try:
        model = open_model(options, opened)
        if machine is None:
            options, warnings = settle(options)
            kv = kv_size(options, model.config)
        else:
            options, warnings = replace(options, dtype=_dtype(options.dtype)), []
            check_kv_dtype(options, model.config, here=False)
            kv = _target_kv(machine, model.config, options)
    except ModelError as error:
        raise Refused(str(error)) from error
    except ValueError as error:
        raise Refused(f"{error}: give --device cpu") from error
    renderer = Renderer(model.tokenizer, options.prompt, datetime.now())
    with tempfile.TemporaryDirectory(prefix="batchrun-plan-") as folder:
        intake = take_in(source, opened.reader, renderer, Path(folder), model.config.vocab_size)
        plan = make_plan(intake.prompts, model.config, options, kv)
        machine = machine or hardware.measure(options.device, options.dtype, options.threads)
        subject = _Subject(model, options.dtype, kv, machine)
        errors = sorted([*intake.errors, *plan.errors], key=_row_index)
        noted = [*opened.warnings, *warnings, *renderer.warnings, *plan.warnings]
        return _report(plan, subject, options, source.num_rows, errors, noted, renderer.uses_chat_template)


def _row_index(error: RowError) -> int:
    return error.row_index


def _dtype(wanted: str) -> str:
    """The compute type on another machine."""
    return "bfloat16" if wanted == "auto" else wanted


def _target_kv(machine: hardware.Target, config: ModelConfig, options: RunOptions) -> KVSize:
    weights = config.num_parameters * _BYTES[options.dtype]
    memory = max(0, machine.memory_bytes - weights) * 9 // 10 if machine.name != "cpu" else machine.memory_bytes // 8
    per_token = config.kv_bytes_per_token(options.dtype, options.kv_dtype)
    return KVSize(page_size("cpu"), per_token, memory, options.kv_dtype)


class _Subject(NamedTuple):
    """The model, and the machine that it would run on."""

    model: OpenedModel
    dtype: str
    kv: KVSize
    machine: hardware.Target


def _report(
    plan: JobPlan,
    subject: _Subject,
    options: RunOptions,
    num_rows: int,
    errors: list[RowError],
    warnings: list[str],
    chat_template: bool,
) -> PlanReport:
    config, kv, machine = subject.model.config, subject.kv, subject.machine
    tokenizer = subject.model.tokenizer
    fixed = options.kv_tokens is not None or options.kv_memory is not None
    pages = plan.config.num_pages if fixed else max(plan.config.num_pages, kv.memory // kv.page_bytes)
    rows_that_fit = rows_side_by_side(plan, pages, depth_first=options.order == "plan")
    time = _time(plan, subject, max(1, min(rows_that_fit, plan.config.max_running)))
    return PlanReport(
        rows=num_rows,
        failed_rows=len(errors),
        errors=_kinds(errors),
        warnings=tuple(warnings),
        chat_template=chat_template,
        computed_rows=len(plan.prompts),
        prompt_tokens=plan.prompt_tokens,
        distinct_tokens=plan.trie.trie_tokens,
        saved_share=1 - plan.trie.trie_tokens / plan.prompt_tokens if plan.prompt_tokens else 0.0,
        max_output_tokens=plan.max_output_tokens,
        deepest=tuple(_prefix(plan, node, tokenizer) for node in shared_nodes(plan.trie, SHOWN_PREFIXES, by="depth")),
        biggest=tuple(_prefix(plan, node, tokenizer) for node in shared_nodes(plan.trie, SHOWN_PREFIXES)),
        model=subject.model.found.name,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        max_context=config.max_context,
        dtype=subject.dtype,
        kv_dtype=subject.dtype if kv.dtype == "auto" else kv.dtype,
        kv_bytes_per_token=kv.bytes_per_token,
        kv_pool_tokens=plan.config.kv_tokens,
        kv_pool_bytes=plan.config.num_pages * kv.page_bytes,
        rows_that_fit=rows_that_fit,
        max_running=plan.config.max_running,
        target=machine.name,
        flop_per_s=machine.flop_per_s,
        bytes_per_s=machine.bytes_per_s,
        memory_bytes=machine.memory_bytes,
        ttft_s=time.ttft_s,
        tpot_s=time.tpot_s,
        prefill_s=time.prefill_s,
        decode_s=time.decode_s,
        total_s=time.total_s,
    )


def _time(plan: JobPlan, subject: _Subject, rows_at_once: int) -> TimeEstimate:
    config = subject.model.config
    # A table of embeddings that is not the head as well is looked up, not multiplied.
    linear = config.num_parameters - (0 if config.tie_embeddings else config.vocab_size * config.hidden_size)
    dims = ModelDims(
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        linear_parameters=linear,
        weight_bytes=linear * _BYTES[subject.dtype],
        kv_bytes_per_token=subject.kv.bytes_per_token,
    )
    return estimate_time(
        dims,
        plan.trie,
        plan.layout.max_tokens.astype(np.float64),
        rows_at_once=rows_at_once,
        flop_per_s=subject.machine.flop_per_s,
        bytes_per_s=subject.machine.bytes_per_s,
        samples=plan.layout.samples,
        first_row=int(plan.order.rows[0]) if len(plan.prompts) else 0,
    )


def _kinds(errors: list[RowError]) -> dict[str, int]:
    """How many rows have each kind of error, shown by its first row's message."""
    shown: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for error in errors:
        counts[shown.setdefault(kind_of(error.message), error.message)] += 1
    return dict(counts.most_common())


def _prefix(plan: JobPlan, node: SharedNode, tokenizer: Tokenizer) -> Prefix:
    ids = plan.prompts.token_ids(node.sample_row)[: node.depth]
    # A token gives at least one character of text in all but odd cases, and never needs more than is shown.
    head = tokenizer.decode(ids[: 2 * SHOWN_TEXT].tolist(), skip_special=False)
    tail = tokenizer.decode(ids[-2 * SHOWN_TEXT :].tolist(), skip_special=False)
    return Prefix(node.depth, node.num_rows, node.tokens_saved, head[:SHOWN_TEXT], tail[-SHOWN_TEXT:])


def _lines(report: PlanReport) -> list[str]:
    """The report as text for a person."""
    computed = report.rows - report.failed_rows - report.computed_rows
    facts = [
        ("rows", f"{report.rows}, {report.failed_rows} in error, {computed} identical to another"),
        ("prompts", "rendered by the model's chat template" if report.chat_template else "plain text to continue"),
        ("prompt tokens", f"{report.prompt_tokens}"),
        ("distinct tokens", f"{report.distinct_tokens}, {report.saved_share:.1%} of the prefill saved"),
        ("output tokens", f"{report.max_output_tokens} at most"),
        ("model", f"{report.model}, {report.dtype}, context {report.max_context}"),
        ("KV per token", f"{report.kv_bytes_per_token} bytes in {report.kv_dtype} ({_heads(report)})"),
        ("KV pool", f"{report.kv_pool_tokens} tokens, {_size(report.kv_pool_bytes)}"),
        ("rows that fit", f"{report.rows_that_fit} side by side, {report.max_running} run at once at most"),
        ("target", f"{report.target}: {_speed(report)}, {_size(report.memory_bytes)}"),
        ("TTFT", f"{_time_text(report.ttft_s)} for the first row"),
        ("TPOT", _time_text(report.tpot_s)),
        ("total", f"{_time_text(report.total_s)}: prefill {_time_text(report.prefill_s)}, decode {_time_text(report.decode_s)}"),
        ("", "(roofline of the target, model load apart, every output as long as it may be)"),
    ]
    lines = [f"{name:<16} {text}" for name, text in facts]
    for title, prefixes in (("biggest shared prefixes", report.biggest), ("deepest shared prefixes", report.deepest)):
        lines += ["", f"{title}:", f"  {'tokens':>7} {'rows':>7} {'saved':>9}  text"] if prefixes else []
        lines += [f"  {p.tokens:>7} {p.rows:>7} {p.saved_tokens:>9}  {_quote(p)}" for p in prefixes]
    lines += ["", "errors:"] if report.errors else []
    lines += [f"  {count:>7} {message}" for message, count in report.errors.items()]
    lines += [f"warning: {warning}" for warning in report.warnings]
    return lines


def _heads(report: PlanReport) -> str:
    return f"{report.num_heads} query heads, {report.num_kv_heads} KV heads"


def _quote(prefix: Prefix) -> str:
    head = json.dumps(prefix.text, ensure_ascii=False)
    return head if prefix.text.endswith(prefix.tail) else f"{head} ... {json.dumps(prefix.tail, ensure_ascii=False)}"


def _speed(report: PlanReport) -> str:
    return f"{report.flop_per_s / 1e12:.3g} TFLOP/s, {report.bytes_per_s / 1e9:.3g} GB/s"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _time_text(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
