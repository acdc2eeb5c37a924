"""How much of a run its last rows take, on a file whose output lengths are lognormal.

    python tail.py data/rag.parquet [--mean 64 --sigma 1.0] [-o RESULTS.parquet]

The rows get `max_tokens` from a lognormal distribution and run past end tokens, in the planned order and as given. The tail is
the time from the moment at which nine rows in ten were finished to the end, as a share of the time from the first step to the
end.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from results import RunFailed, markdown, run_batchrun, save


def with_lengths(table: pa.Table, mean: float, sigma: float, most: int) -> pa.Table:
    """The rows with lognormal `max_tokens`, the same ones at every call; without `n`."""
    draws = np.random.default_rng(0).lognormal(np.log(mean) - sigma**2 / 2, sigma, table.num_rows)
    lengths = np.clip(np.rint(draws), 1, most).astype(np.int64)
    kept = table.drop_columns([name for name in ("max_tokens", "n") if name in table.column_names])
    return kept.append_column("max_tokens", pa.array(lengths))


def finish_times(output: pa.Table) -> np.ndarray:
    """Seconds from the first row's start to each row's end, ascending."""
    started = pc.cast(output["started_at"], pa.int64()).to_numpy() / 1e6
    ended = started + (output["latency_ms"].to_numpy() - output["queue_ms"].to_numpy()) / 1e3
    return np.sort(ended - started.min())


def tail_share(times: np.ndarray) -> float:
    """The share of the last tenth of the rows in the time that all took."""
    return float(1.0 - times[int(np.ceil(0.9 * len(times))) - 1] / times[-1])


def measure(data: Path, order: str, options: list[str]) -> dict[str, Any]:
    """One run as a result row."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "answers.parquet"
        run = run_batchrun(data, ["--dtype", "bfloat16", "--ignore-eos", "--order", order, *options], output)
        times = finish_times(pq.read_table(output, columns=["started_at", "queue_ms", "latency_ms"]))
    return {
        "file": data.stem,
        "order": order,
        "rows": len(times),
        "output_tokens": run.summary["output_tokens"],
        "steps": run.summary["steps"],
        "run_s": run.summary["run_s"],
        "tail_share": tail_share(times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="Parquet file of prompts")
    parser.add_argument("--mean", type=float, default=64, help="output tokens (default 64)")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm (default 1)")
    parser.add_argument("--most", type=int, default=1024, help="output tokens (default 1024)")
    parser.add_argument("--rows", type=int, help="first rows of the file (default all)")
    parser.add_argument("--model", help="default the embedded one")
    parser.add_argument("-o", "--output", type=Path, help="write one row per run to this Parquet file")
    args = parser.parse_args()
    options = [] if args.model is None else ["--model", args.model]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / args.data.name
        table = pq.read_table(args.data)
        pq.write_table(with_lengths(table.slice(0, args.rows), args.mean, args.sigma, args.most), data)
        try:
            rows = [measure(data, order, options) for order in ("plan", "given")]
        except RunFailed as failure:
            sys.exit(f"FAILED: {failure}")
    header = ["file", "order", "rows", "output_tokens", "steps", "run_s", "tail_share"]
    print(markdown(header, [[row[name] for name in header] for row in rows]))
    save(rows, args.output)


if __name__ == "__main__":
    main()
