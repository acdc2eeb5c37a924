"""Run batchrun on whole files, each in its own process, and say what it did with time, memory and prefixes.

    python run_files.py [DATA.parquet ...] [--model MODEL] [-o RESULTS.parquet]

Each file is run three times: as it is ("given"), with its rows shuffled, and with one output token per row ("prefill"), where
nearly all of the run is prefill, so that distinct prompt tokens per second can be told. Rows with `n` above 1 are sampled at
temperature 0.8, all others are greedy. Exit code 1 when a run fails or writes another number of rows than it should.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from results import ProgramRun, RunFailed, markdown, run_batchrun, save, shuffled

DATA = Path(__file__).parent / "data"
VARIANTS = ("given", "shuffled", "prefill")


def variant_of(table: pa.Table, variant: str, seed: int) -> pa.Table:
    """Return the rows as the variant wants them."""
    if variant == "shuffled":
        return shuffled(table, seed)
    if variant == "prefill":
        ones = pa.array([1] * table.num_rows, pa.int32())
        return table.set_column(table.column_names.index("max_tokens"), "max_tokens", ones)
    return table


def samples_in(table: pa.Table) -> int:
    """Return the number of output rows that the file asks for."""
    return sum(table["n"].to_pylist()) if "n" in table.column_names else table.num_rows


def measure(name: str, variant: str, table: pa.Table, run: ProgramRun) -> dict[str, Any]:
    """Return one result row.

    Raises:
        RunFailed: the output or the summary has another number of rows than the file asks for.
    """
    summary = run.summary
    samples = samples_in(table)
    if (summary["rows"], summary["samples"], run.output_rows) != (table.num_rows, samples, samples):
        found = f"{summary['rows']} rows, {summary['samples']} samples, {run.output_rows} output rows"
        raise RunFailed(f"{name}: {found}; the file asks for {table.num_rows} rows, {samples} samples")
    trie_tokens, run_s = summary["trie_tokens"], summary["run_s"]
    return {
        "file": name,
        "variant": variant,
        **{key: value for key, value in summary.items() if isinstance(value, int | float | str)},
        "wall_s": run.wall_s,
        "peak_rss_gib": run.peak_rss_bytes / 2**30,
        "computed_to_trie": (summary["computed_prompt_tokens"] - summary["recomputed_tokens"]) / trie_tokens,
        "sharing": summary["prompt_tokens"] / trie_tokens,
        "trie_tokens_per_s": trie_tokens / run_s,
        "plan_share": summary["plan_s"] / (summary["plan_s"] + run_s),
    }


COLUMNS = {
    "file": "file",
    "variant": "rows are",
    "rows": "rows",
    "samples": "output rows",
    "failed": "failed",
    "prompt_tokens": "prompt tokens",
    "trie_tokens": "distinct",
    "computed_to_trie": "computed / distinct",
    "recomputed_tokens": "recomputed",
    "output_tokens": "output tokens",
    "load_s": "load s",
    "read_s": "read s",
    "plan_s": "plan s",
    "run_s": "run s",
    "wall_s": "process s",
    "plan_share": "plan share",
    "rows_per_s": "rows/s",
    "trie_tokens_per_s": "distinct tokens/s",
    "preemptions": "preemptions",
    "evictions": "evictions",
    "peak_rss_gib": "peak RSS GiB",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="*", help="Parquet files (default: those in data/)")
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="only this one (repeatable)")
    parser.add_argument("--seed", type=int, default=0, help="of the shuffled rows (default 0)")
    parser.add_argument("-o", "--output", type=Path, help="write the figures to this Parquet file")
    args = parser.parse_args()
    options = ["--dtype", args.dtype, *(["--model", args.model] if args.model else [])]
    options += ["--threads", str(args.threads)] if args.threads else []
    measured: list[dict[str, Any]] = []
    failures = 0
    for path in args.data or sorted(DATA.glob("*.parquet")):
        table = pq.read_table(path)
        sampled = ["--temperature", "0.8"] if "n" in table.column_names else []
        for variant in args.variant or VARIANTS:
            rows = variant_of(table, variant, args.seed)
            with tempfile.TemporaryDirectory() as folder:
                pq.write_table(rows, Path(folder) / path.name)
                try:
                    run = run_batchrun(Path(folder) / path.name, [*options, *sampled])
                    measured.append(measure(path.stem, variant, rows, run))
                except RunFailed as failure:
                    failures += 1
                    print(f"FAILED: {variant} {failure}", flush=True)
                    continue
            print(f"{path.stem} {variant}: {run.wall_s:.1f} s", file=sys.stderr, flush=True)
    print(markdown(list(COLUMNS.values()), [[row[key] for key in COLUMNS] for row in measured]))
    save(measured, args.output)
    sys.exit(1 if failures or not measured else 0)


if __name__ == "__main__":
    main()
