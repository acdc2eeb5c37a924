"""Run any engines over any workloads, alternating: same weights, bfloat16, same token ids, fixed output length.

    python compare.py --model FOLDER --engine batchrun --engine vllm --data data/agent_tools.parquet --data data/rag.parquet \\
        --rows 150 --rounds 3 --python vllm=VENV/bin/python -o RESULTS.parquet

A round runs every engine once for each order of the rows that it tries (as given, and sorted by their tokens where that can
help it), each with an empty prefix cache. Medians over the rounds are compared, a peer at its better order. What counts is
the time without loading the model: batchrun's `read_s + plan_s + run_s`, a peer's generation. The peers get ready token ids,
while batchrun's time covers reading the file, rendering the chat template and tokenizing. Files with `n` above 1 are sampled
at temperature 0.8, all others are greedy. Beside each result stands the least time that this machine could take
(roofline.py), whose rates are measured before each round.

An engine that is not installed is named and left out; one that fails is named, its log too, and sits out the rest of the file.
Exit code 1 when a run fails or an engine counts other numbers of tokens than the file has.
"""

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import roofline
from engines import ENGINES, Engine, Settings, open_engines
from report import check_same_work, report
from results import RunFailed, machine, save
from roofline import Rates
from workloads import Workload, prepare

from batchrun.hardware import usable_cpus

Run = dict[str, Any]


def add_floor(runs: list[Run], workload: Workload, rates: Rates) -> None:
    """Put the roofline's columns beside every run of one workload."""
    layout, plan = workload.plan.layout, workload.plan
    prefill = roofline.prefill_work(workload.config, plan.trie)
    decode = roofline.decode_work(workload.config, plan.trie, layout.max_tokens, layout.samples, plan.config.max_running)
    found = roofline.floor(prefill, decode, rates)
    for run in runs:
        run |= {
            "distinct_tokens": plan.trie.trie_tokens,
            "gemm_flop_per_s": rates.flop_per_s,
            "read_bytes_per_s": rates.bytes_per_s,
            "prefill_flop": prefill.flop,
            "decode_flop": decode.flop,
            "decode_bytes": decode.bytes,
            "floor_prefill_s": found.prefill_s,
            "floor_decode_s": found.decode_s,
            "floor_s": found.floor_s,
            "overlapped_s": found.overlapped_s,
            "decode_bound": found.decode_bound,
            "floor_to_measured": found.floor_s / run["wall_s"],
        }


def best_rates(seen: Sequence[Rates]) -> Rates:
    """The machine at its best: a rate that was reached once can be reached."""
    return Rates(max(rates.flop_per_s for rates in seen), max(rates.bytes_per_s for rates in seen))


class Comparison:
    """The runs so far."""

    def __init__(self, engines: list[Engine], measure: Callable[[], Rates], output: Path | None) -> None:
        self.runs: list[Run] = []
        self.failures: list[str] = []
        self._engines = engines
        self._measure = measure
        self._rates: list[Rates] = []
        self._output = output

    def add(self, workload: Workload, rounds: int) -> list[Run]:
        """Run all engines over one workload, `rounds` times; returns its runs and saves all that there are.

        An engine that fails takes no further part in this workload.
        """
        runs: list[Run] = []
        taking_part = list(self._engines)
        for number in range(rounds):
            self._rates.append(self._measure())
            for engine in list(taking_part):
                for order in engine.orders:
                    try:
                        run = self._run(engine, workload, order)
                    except RunFailed as failure:
                        print(f"FAILED: {workload.name}: {failure}", flush=True)
                        self.failures.append(f"{workload.name}: {failure}")
                        taking_part.remove(engine)
                        engine.close()
                        break
                    runs.append({"file": workload.name, "rows": workload.num_rows, "round": number} | run)
                    print(f"{workload.name}, round {number}, {engine.name}, rows {order}: {run['wall_s']:.1f} s", flush=True)
            self._save(runs, workload)
        self.runs += runs
        return runs

    def close(self) -> None:
        for engine in self._engines:
            engine.close()

    def _run(self, engine: Engine, workload: Workload, order: str) -> Run:
        began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        run = engine.run(workload, order)
        check_same_work(run, workload.prompt_tokens, workload.output_tokens)
        told = {"temperature": workload.temperature, "started_at": began, "comparison": shlex.join(sys.argv)}
        return run | told | {"rows_per_s": workload.num_rows / run["wall_s"]}

    def _save(self, runs: list[Run], workload: Workload) -> None:
        add_floor(runs, workload, best_rates(self._rates))
        save([*self.runs, *runs], self._output, say=False)


def common_options() -> argparse.ArgumentParser:
    """The options that say which engines run and how; for every script that compares."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--model", required=True, help="Hugging Face folder, weights in bfloat16")
    parser.add_argument("--engine", action="append", choices=list(ENGINES), help="repeatable (default batchrun and vllm)")
    parser.add_argument(
        "--python", action="append", default=[], metavar="ENGINE=PYTHON", help="Python of a peer's environment (repeatable)"
    )
    parser.add_argument("--openvino-model", type=Path, metavar="FOLDER", help="the same weights in OpenVINO's format")
    parser.add_argument("--kv-gib", type=int, default=8, help="KV cache of the peers that must be told (default 8)")
    parser.add_argument("--threads", type=int, default=usable_cpus(), help="of every engine (default all)")
    parser.add_argument("--batchrun-options", default="", metavar="TEXT", help='of batchrun, e.g. "--max-running 64"')
    parser.add_argument("--rounds", type=int, default=3, help="(default 3)")
    parser.add_argument(
        "--peer-order", choices=("given", "sorted"), help="of vLLM and OpenVINO (default: both, and the better one counts)"
    )
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()), help="folder for the peers' messages")
    parser.add_argument("-o", "--output", type=Path, help="write one row per run to this Parquet file")
    return parser


def settings_of(args: argparse.Namespace) -> Settings:
    """What the common options say.

    Raises:
        SystemExit: a --python that names no engine.
    """
    pythons = {}
    for text in args.python:
        name, given, path = text.partition("=")
        if not given or name not in ENGINES:
            sys.exit(f"--python is {text!r}: it must be ENGINE=PYTHON with one of {', '.join(ENGINES)}")
        pythons[name] = Path(path)
    return Settings(
        model=args.model,
        threads=args.threads,
        pythons=pythons,
        openvino_model=args.openvino_model,
        kv_gib=args.kv_gib,
        batchrun_options=shlex.split(args.batchrun_options),
        logs=args.logs,
        peer_orders=(args.peer_order,) if args.peer_order else ("given", "sorted"),
    )


def start(args: argparse.Namespace) -> Comparison:
    """Open the engines that the options name.

    Raises:
        SystemExit: none of them can be run.
    """
    engines = open_engines(args.engine or ["batchrun", "vllm"], settings_of(args))
    if not engines or args.rounds < 1:
        sys.exit("nothing to run: no engine is left" if not engines else f"--rounds is {args.rounds}: it must be at least 1")
    return Comparison(engines, lambda: roofline.measured_rates(args.model, args.threads), args.output)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[common_options()]
    )
    parser.add_argument("--data", action="append", type=Path, required=True, help="Parquet file with `messages` (repeatable)")
    parser.add_argument("--rows", type=int, default=10**9, help="first rows of each file (default all)")
    parser.add_argument("--max-tokens", type=int, help="most output tokens of a row (default as the file says)")
    parser.add_argument("--temperature", type=float, help="of all files (default 0.8 where a row has n above 1, else 0)")
    args = parser.parse_args()
    comparison = start(args)
    print(", ".join(f"{name} {value}" for name, value in machine().items()), flush=True)
    reports = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for path in args.data:
                workload = prepare(path, args.model, Path(folder), args.rows, args.max_tokens, args.temperature)
                if runs := comparison.add(workload, args.rounds):
                    reports.append(report(runs))
                    print(f"\n{reports[-1]}\n", flush=True)
        finally:
            comparison.close()
    save(comparison.runs, args.output)
    if args.output:
        args.output.with_suffix(".md").write_text("\n\n".join(reports) + "\n")
    sys.exit(1 if comparison.failures else 0)


if __name__ == "__main__":
    main()
