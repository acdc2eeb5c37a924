"""Time against sharing: 1, 2, 4, 8, 16 and 32 rows for each shared prefix, the number of rows staying the same.

    python sharing_sweep.py --model FOLDER --python vllm=VENV/bin/python -o SWEEP.parquet [--rows 64]

A row is a document of data/summarize.parquet (its first --prefix-chars characters, about 1,000 tokens) and a question of
data/rag.parquet (about 50 tokens) behind it; a group of rows has the document in common. Rows are shuffled. Engines run as in
compare.py. Writes one Parquet row per run, and beside it a Markdown table (.md) and a picture (.svg): seconds of each engine at
its better order, and the roofline's floor.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from chart import Line, line_chart
from compare import common_options, start
from report import best, medians
from results import markdown, save
from workloads import prepare

DATA = Path(__file__).parent / "data"
GROUP_SIZES = (1, 2, 4, 8, 16, 32)


def documents(path: Path, chars: int) -> list[str]:
    """The beginnings of the texts to summarize that are that long, without the instruction; no two alike."""
    texts = [row["messages"][-1]["content"].partition("\n\n")[2] for row in pq.read_table(path).to_pylist()]
    return list(dict.fromkeys(text[:chars] for text in texts if len(text) >= chars))


def questions(path: Path) -> list[str]:
    """What follows the passages in the user turns, no two alike."""
    texts = [row["messages"][-1]["content"] for row in pq.read_table(path).to_pylist()]
    return list(dict.fromkeys(text.rpartition("Question:")[2].strip() for text in texts))


def shared_rows(prefixes: list[str], suffixes: list[str], rows: int, group: int, max_tokens: int, seed: int) -> pa.Table:
    """`rows` rows in groups of `group`, each group with one prefix and a suffix of its own for each row, shuffled.

    Raises:
        ValueError: `rows` is no multiple of `group`, or there are fewer prefixes or suffixes than that takes.
    """
    if rows % group:
        raise ValueError(f"{rows} rows cannot be dealt into groups of {group}: give a multiple of it")
    if len(prefixes) < rows // group or len(suffixes) < rows:
        wanted = f"{rows} rows want {rows // group} documents and {rows} questions"
        raise ValueError(f"{wanted}: there are {len(prefixes)} and {len(suffixes)}")
    messages = [
        [{"role": "user", "content": f"{prefixes[row // group]}\n\nQuestion: {suffixes[row]}"}]
        for row in np.random.default_rng(seed).permutation(rows).tolist()
    ]
    return pa.table({"messages": messages, "max_tokens": pa.array([max_tokens] * rows, pa.int32())})


def summary(runs: list[dict[str, Any]]) -> tuple[str, list[Line]]:
    """The Markdown table over group sizes, and the picture's lines."""
    engines = list(dict.fromkeys(run["engine"] for run in runs))
    sizes = sorted({run["rows_per_prefix"] for run in runs})
    seconds: dict[str, list[tuple[float, float]]] = {engine: [] for engine in engines}
    floor, lines = [], []
    for size in sizes:
        at_size = [run for run in runs if run["rows_per_prefix"] == size]
        found = {engine: best(median for median in medians(at_size) if median.engine == engine) for engine in engines}
        for engine, median in found.items():
            if median:
                seconds[engine].append((size, median.wall_s))
        floor.append((size, at_size[0]["floor_s"]))
        cells = [f"{median.wall_s:.1f} ({median.order})" if median else "failed" for median in found.values()]
        lines.append([size, at_size[0]["prompt_tokens"], at_size[0]["distinct_tokens"], *cells, at_size[0]["floor_s"]])
    header = ["rows per prefix", "prompt tokens", "distinct", *(f"{engine}, s" for engine in engines), "floor, s"]
    drawn = [Line(engine, points) for engine, points in seconds.items()]
    return markdown(header, lines), [*drawn, Line("floor", floor, dashed=True)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[common_options()]
    )
    parser.add_argument("--rows", type=int, default=64, help="(default 64)")
    parser.add_argument("--prefix-chars", type=int, default=4200, help="characters of a document (default 4200)")
    parser.add_argument("--max-tokens", type=int, default=32, help="output tokens of each row (default 32)")
    parser.add_argument("--group", action="append", type=int, help="only this many rows per prefix (repeatable)")
    parser.add_argument("--seed", type=int, default=0, help="of the shuffled rows (default 0)")
    args = parser.parse_args()
    if args.output is None:
        sys.exit("give -o RESULTS.parquet: the table and the picture are written beside it")
    prefixes, suffixes = documents(DATA / "summarize.parquet", args.prefix_chars), questions(DATA / "rag.parquet")
    try:
        sizes = args.group or GROUP_SIZES
        tables = {size: shared_rows(prefixes, suffixes, args.rows, size, args.max_tokens, args.seed) for size in sizes}
    except ValueError as error:
        sys.exit(str(error))
    comparison = start(args)
    with tempfile.TemporaryDirectory() as folder:
        try:
            for size, table in tables.items():
                path = Path(folder) / f"shared_by_{size}.parquet"
                pq.write_table(table, path)
                inputs = Path(folder) / str(size)
                inputs.mkdir()
                workload = prepare(path, args.model, inputs, args.rows, None, 0.0)
                for run in comparison.add(workload, args.rounds):
                    run["rows_per_prefix"] = size
        finally:
            comparison.close()
    if comparison.runs:
        text, lines = summary(comparison.runs)
        title = f"{args.rows} rows, {args.max_tokens} output tokens each, by rows per shared prefix"
        save(comparison.runs, args.output)
        args.output.with_suffix(".md").write_text(text + "\n")
        args.output.with_suffix(".svg").write_text(line_chart(title, "rows per shared prefix", "seconds", lines))
        print(text)
    sys.exit(1 if comparison.failures else 0)


if __name__ == "__main__":
    main()
