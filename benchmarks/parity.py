"""Does batchrun answer what transformers answers, token for token?

    python parity.py reference MODEL DATA.parquet ... -o FOLDER           # greedy float32 transformers, each row alone
    python parity.py compare MODEL DATA.parquet ... --reference FOLDER    # batchrun, in several ways, against it
    python parity.py rounding MODEL DATA.parquet ... --reference FOLDER   # what bfloat16 alone does, by transformers

A row may differ from a position on where the reference's two best logits lie within 1e-4, and nowhere else. For the variants
`bfloat16` and `int8-kv` it is 0.5, less than the largest gap over which transformers' own bfloat16 tips, see `rounding`. Exit
code 1 when one does.
"""

import argparse
import itertools
import json
import math
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from reference import ReferenceRow, bfloat16_gaps, content_hash, read_reference, reference_path, write_reference

NEAR_TIE = 1e-4
BFLOAT16 = "bfloat16"
INT8 = "int8-kv"
NEAR_TIES = {BFLOAT16: 0.5, INT8: 0.5}
"""Of variants in another arithmetic, which are run only when they are asked for."""
SMALL_POOL = "small-pool"
VARIANTS: dict[str, list[str]] = {
    "defaults": [],
    "no-prefix-cache": ["--no-prefix-cache"],
    "order-given": ["--order", "given"],
    "chunk-16": ["--chunk-tokens", "16"],
    SMALL_POOL: [],  # through the engine: the program reserves a row's output, so that it never preempts
    BFLOAT16: ["--dtype", "bfloat16"],
    INT8: ["--dtype", "bfloat16", "--kv-dtype", "int8"],
}


@dataclass(frozen=True, slots=True)
class Answers:
    """What one variant said about one file."""

    output_ids: list[list[int]]
    prompt_tokens: list[int]
    note: str
    """What the engine did: counts of the summary."""


@dataclass(frozen=True, slots=True)
class Difference:
    row: int
    position: int
    """First output position that differs; -1 when the prompts have different lengths."""
    gap: float | None
    """The reference's best logit minus its second best there; None past the reference's end or where a token is missing."""

    def excused(self, near_tie: float) -> bool:
        return self.gap is not None and self.gap <= near_tie


class VariantFailed(Exception):
    """The program did not do what the variant needs, so there is nothing to compare."""


def differences(reference: list[ReferenceRow], answers: Answers) -> list[Difference]:
    """Return the first difference of each row that has one."""
    found = []
    for expected, output_ids, prompt_tokens in zip(reference, answers.output_ids, answers.prompt_tokens, strict=True):
        if prompt_tokens != len(expected.prompt_ids):
            found.append(Difference(expected.row, -1, None))
        elif output_ids != expected.output_ids:
            pairs = zip(output_ids, expected.output_ids, strict=False)
            shorter = min(len(output_ids), len(expected.output_ids))
            position = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), shorter)
            found.append(Difference(expected.row, position, expected.gaps[position] if position < shorter else None))
    return found


def write_input(data: Path, reference: list[ReferenceRow], path: Path) -> None:
    """Write the reference's rows of `data` with its limits; no `n`, since greedy samples are all alike."""
    table = pq.read_table(data).take([row.row for row in reference])
    limits = pa.array([row.max_tokens for row in reference], pa.int32())
    table = table.set_column(table.column_names.index("max_tokens"), "max_tokens", limits)
    pq.write_table(table.drop_columns([name for name in ("n",) if name in table.column_names]), path)


def run_program(model: Path, data: Path, folder: Path, options: list[str], threads: int | None) -> Answers:
    """Run `batchrun run` on `data` and return what it wrote."""
    output = folder / "answers.parquet"
    command = [sys.executable, "-m", "batchrun", "run", str(data), "-o", str(output), "--model", str(model), "--overwrite"]
    command += ["--device", "cpu", "--dtype", "float32", "--temperature", "0", "--return-token-ids", "--summary-json", *options]
    command += ["--threads", str(threads)] if threads else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise VariantFailed(f"exit code {done.returncode}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    summary = json.loads(done.stdout)
    table = pq.read_table(output, columns=["output_ids", "prompt_tokens"])
    counts = ("prompt_tokens", "trie_tokens", "computed_prompt_tokens", "recomputed_tokens", "steps")
    note = ", ".join(f"{key} {summary[key]}" for key in counts)
    return Answers(table["output_ids"].to_pylist(), table["prompt_tokens"].to_pylist(), note)


def small_pool(reference: list[ReferenceRow]) -> int:
    """Return a pool size in tokens: any one row fits; the prompts of the two longest fit together, their outputs do not."""
    longest = sorted(reference, key=lambda row: len(row.prompt_ids))[-2:]
    two_prompts = sum(len(row.prompt_ids) for row in longest) + longest[0].max_tokens // 2
    return max(two_prompts, *(len(row.prompt_ids) + row.max_tokens for row in reference))


def run_small_pool(model: Path, reference: list[ReferenceRow], threads: int | None) -> Answers:
    """Run the reference's token ids in given order through an engine that reserves no output, in a pool of two prompts.

    Raises:
        VariantFailed: no row was preempted, so that the variant shows nothing.
    """
    import numpy as np

    from batchrun.engine.config import EngineConfig
    from batchrun.engine.engine import Engine
    from batchrun.engine.loader import load_model, resolve_model
    from batchrun.engine.outputs import Completion, PromptSet
    from batchrun.engine.sampling_params import SamplingParams
    from batchrun.kernels.ops import page_size
    from batchrun.prefix_cache.order import order_rows
    from batchrun.prefix_cache.trie import build_trie

    limits = sorted({row.max_tokens for row in reference})
    length = np.array([len(row.prompt_ids) for row in reference], np.int32)
    prompts = PromptSet(
        tokens=np.concatenate([np.array(row.prompt_ids, np.int32) for row in reference]),
        begin=np.concatenate([[0], np.cumsum(length)[:-1]]).astype(np.int64),
        length=length,
        row_index=np.array([row.row for row in reference], np.int64),
        params_id=np.array([limits.index(row.max_tokens) for row in reference], np.int32),
        params_table=[SamplingParams(max_tokens=limit) for limit in limits],
    )
    trie = build_trie(prompts.tokens, prompts.begin, prompts.length)
    order = order_rows(trie, np.array([row.max_tokens for row in reference], np.float64), "given")
    page = page_size("cpu")
    loaded = load_model(resolve_model(str(model)), "cpu", "float32", threads)
    config = EngineConfig(
        num_pages=math.ceil(small_pool(reference) / page),
        page_size=page,
        max_running=16,
        chunk_tokens=256,
        max_context=loaded.config.max_context,
        reserve_output=False,
        check_integrity=True,
    )
    engine = Engine(loaded, config)
    done: dict[int, Completion] = {}
    for finished in engine.run(prompts, trie, order):
        done |= {completion.row: completion for completion in finished}
    if failed := [completion for completion in done.values() if completion.error]:
        raise VariantFailed(f"row {failed[0].row}: {failed[0].error}")
    stats = engine.stats
    note = f"pool {config.kv_tokens} tokens, preemptions {stats.preemptions}, evictions {stats.evictions}, steps {stats.steps}"
    if not stats.preemptions:
        raise VariantFailed(f"no row was preempted ({note}): choose more rows")
    rows = [done[row.row] for row in reference]
    return Answers([row.output_ids for row in rows], [row.prompt_tokens for row in rows], note)


def compare(model: Path, data: list[Path], folder: Path, rows: int | None, variants: list[str], threads: int | None) -> int:
    """Print one line per file and variant and one per differing row; return how many of them nothing excuses."""
    bad = 0
    for source in data:
        header, reference = read_reference(reference_path(folder, source))
        if header["data"] != content_hash(source):
            raise SystemExit(f"{reference_path(folder, source)} was made from another {source.name}: write it anew")
        with tempfile.TemporaryDirectory() as scratch:
            reference = reference[:rows]
            copy = Path(scratch) / source.name
            write_input(source, reference, copy)
            for variant in variants:
                try:
                    if variant == SMALL_POOL:
                        answers = run_small_pool(model, reference, threads)
                    else:
                        answers = run_program(model, copy, Path(scratch), VARIANTS[variant], threads)
                except VariantFailed as failure:
                    print(f"{source.stem:14} {variant:16} FAILED: {failure}", flush=True)
                    bad += 1
                    continue
                bad += _report(source.stem, variant, reference, answers)
    return bad


def print_rounding(model: Path, data: list[Path], folder: Path, threads: int) -> None:
    """Print one line per file: how many rows transformers' bfloat16 would answer otherwise, and at which gaps at most."""
    for source in data:
        _, reference = read_reference(reference_path(folder, source))
        gaps = bfloat16_gaps(model, reference, threads)
        largest = ", ".join(f"{gap:.2f}" for gap in sorted(itertools.chain(*gaps))[-3:])
        print(f"{source.stem:14} {sum(map(bool, gaps))} of {len(gaps)} rows differ; largest gaps {largest}", flush=True)


def _report(name: str, variant: str, reference: list[ReferenceRow], answers: Answers) -> int:
    found = differences(reference, answers)
    near_tie = NEAR_TIES.get(variant, NEAR_TIE)
    unexcused = sum(not difference.excused(near_tie) for difference in found)
    verdict = f"{len(reference) - len(found)} of {len(reference)} rows equal, {len(found) - unexcused} excused, {unexcused} wrong"
    print(f"{name:14} {variant:16} {verdict} ({answers.note})", flush=True)
    for difference in found:
        where = "prompt length" if difference.position < 0 else f"output position {difference.position}"
        gap = "no gap to excuse it" if difference.gap is None else f"gap {difference.gap:.2e}"
        print(f"    row {difference.row}: {where}, {gap}, {'excused' if difference.excused(near_tie) else 'WRONG'}", flush=True)
    return unexcused


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("reference", help="write the answers of transformers")
    check = commands.add_parser("compare", help="compare batchrun with them")
    rounding = commands.add_parser("rounding", help="what bfloat16 alone does to the answers, by transformers")
    for command in (make, check, rounding):
        command.add_argument("model", type=Path, help="Hugging Face folder")
        command.add_argument("data", type=Path, nargs="+", help="Parquet files with `messages` and `max_tokens`")
    make.add_argument("-o", "--output", type=Path, required=True, help="folder of the reference files")
    make.add_argument("--rows", type=int, default=40, help="first rows of each file (default 40)")
    check.add_argument("--rows", type=int, help="first rows of each reference file (default all)")
    make.add_argument("--cap", type=int, default=64, help="most output tokens of a row (default 64)")
    make.add_argument("--threads", type=int, default=1)
    check.add_argument("--reference", type=Path, required=True, help="folder of the reference files")
    one_of = "only this one (repeatable; default: all in float32)"
    check.add_argument("--variant", action="append", choices=list(VARIANTS), help=one_of)
    check.add_argument("--threads", type=int)
    rounding.add_argument("--reference", type=Path, required=True, help="folder of the reference files")
    rounding.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.command == "reference":
        write_reference(args.model, args.data, args.output, args.rows, args.cap, args.threads)
        return
    if args.command == "rounding":
        print_rounding(args.model, args.data, args.reference, args.threads)
        return
    variants = args.variant or [variant for variant in VARIANTS if variant not in NEAR_TIES]
    sys.exit(1 if compare(args.model, args.data, args.reference, args.rows, variants, args.threads) else 0)


if __name__ == "__main__":
    main()
