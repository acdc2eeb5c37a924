"""Plan token files of many rows: seconds and memory from the mapped tokens to the engine's orders.

    python plan_scale.py [SHAPE ...] [--rows 1000000] [--length 512] [-o RESULTS.parquet]

Each shape is written as a run's spool (int32 ids, 4 bytes a token) and planned in a process of its own: trie, duplicates,
order, pool. `anonymous` is the most memory that is the process's own; `peak` counts the pages of the mapped file too that are
resident at that moment (VmHWM: unlike ru_maxrss it starts at 0 in a new program). Exit code 1 when a plan has another number of
rows or distinct tokens than it should.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from results import markdown, save

from batchrun import planning
from batchrun.engine.config import ModelConfig
from batchrun.engine.outputs import PromptSet
from batchrun.engine.sampling_params import SamplingParams
from batchrun.options import RunOptions
from batchrun.spool import TokenSpool, open_spool

DATA = Path(__file__).parent / "data"
VOCABULARY = 49_152
CHUNK_ROWS = 1 << 14
SYSTEM_PROMPTS = 1000
TURNS = 32
SUFFIX = 16
"""Tokens that make each copy of a real prompt another prompt."""
SAMPLE_S = 0.01
"""Between two looks at a process's memory."""

Rows = Iterator[np.ndarray]
"""Rows of ids, int32 [length] each."""

# --- shapes ---------------------------------------------------------------------------------------------------------------


def unique(rows: int, length: int, draw: np.random.Generator) -> Rows:
    """Nothing shared."""
    for count in _chunks(rows):
        yield from _ids(draw, (count, length))


def system(rows: int, length: int, draw: np.random.Generator) -> Rows:
    """1,000 system prompts in turn, and a question of an eighth of the length behind each."""
    question = length // 8
    systems = _ids(draw, (SYSTEM_PROMPTS, length - question))
    for which in _shuffled(rows, SYSTEM_PROMPTS, draw):
        yield from np.concatenate([systems[which], _ids(draw, (len(which), question))], axis=1)


def turns(rows: int, length: int, draw: np.random.Generator) -> Rows:
    """Conversations of 32 turns: a row has its conversation up to one of them, and goes its own way from there on."""
    conversations = -(-rows // TURNS)
    seeds = draw.integers(0, 2**32, conversations)
    for which in _shuffled(rows, conversations * TURNS, draw):
        for row in which.tolist():
            conversation, turn = divmod(row, TURNS)
            common = np.random.default_rng(seeds[conversation]).integers(0, VOCABULARY, length, np.int32)
            common[turn * length // TURNS :] = _ids(draw, (length - turn * length // TURNS,))
            yield common


def identical(rows: int, length: int, draw: np.random.Generator) -> Rows:
    """One prompt."""
    yield from np.broadcast_to(_ids(draw, (length,)), (rows, length))


def last_token(rows: int, length: int, draw: np.random.Generator) -> Rows:
    """One prompt but for the last token, which is the row's number."""
    row = _ids(draw, (length,))
    for which in _shuffled(rows, rows, draw):
        for last in which.tolist():
            row[-1] = last
            yield row


def real(rows: int, length: int, draw: np.random.Generator) -> Rows:
    """The prompts of data/ in turn, cut so that they leave room for 16 tokens of each row's own."""
    prompts = _real_prompts()
    for which in _shuffled(rows, len(prompts), draw):
        for prompt, own in zip(which.tolist(), _ids(draw, (len(which), SUFFIX)), strict=True):
            yield np.concatenate([prompts[prompt][: length - SUFFIX], own])


SHAPES: dict[str, Callable[[int, int, np.random.Generator], Rows]] = {
    shape.__name__: shape for shape in (unique, system, turns, identical, last_token, real)
}


def _chunks(rows: int) -> Iterator[int]:
    yield from (min(CHUNK_ROWS, rows - first) for first in range(0, rows, CHUNK_ROWS))


def _shuffled(rows: int, kinds: int, draw: np.random.Generator) -> Iterator[np.ndarray]:
    """The numbers 0 to kinds - 1, each as often as the others, in random order, by chunks."""
    which = draw.permutation(rows) % kinds
    yield from (which[first : first + CHUNK_ROWS] for first in range(0, rows, CHUNK_ROWS))


def _ids(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return draw.integers(0, VOCABULARY, shape, np.int32)


def _real_prompts() -> list[np.ndarray]:
    from batchrun.engine.loader import load_tokenizer, resolve_model

    _, tokenizer = load_tokenizer(resolve_model(None))
    texts = []
    for path in sorted(DATA.glob("*.parquet")):
        for messages in pq.read_table(path, columns=["messages"]).column(0).to_pylist():
            texts.append("\n".join(message["content"] for message in messages))
    return [np.array(ids, np.int32) for ids in tokenizer.encode_batch(texts, parse_special=False)]


def expected_distinct(shape: str, rows: int, length: int) -> int | None:
    """Least number of tokens to compute, where it is known and chance does not change it."""
    return {"identical": length, "last_token": length - 1 + rows}.get(shape)


# --- one measurement ------------------------------------------------------------------------------------------------------


class Phases:
    """Seconds in functions of a module, by the name of what they do."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def time(self, module: Any, function: str, phase: str) -> None:
        """Have the module's function counted from now on."""
        inner = getattr(module, function)
        self.seconds.setdefault(phase, 0.0)

        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return inner(*args, **options)
            finally:
                self.seconds[phase] += time.perf_counter() - began

        setattr(module, function, timed)


def plan_folder(folder: Path) -> dict[str, Any]:
    """Plan the spool of a folder; the figures of one result row."""
    phases = Phases()
    for function, phase in [
        ("find_duplicates", "dedupe_s"),
        ("build_trie", "trie_s"),
        ("pages_for_path", "pool_s"),
        ("order_rows", "order_s"),
        ("useful_pages", "pool_s"),
    ]:
        phases.time(planning, function, phase)
    imports, imports_kib = resource.getrusage(resource.RUSAGE_SELF), _status_kib("self", "VmHWM")
    began = time.perf_counter()
    tokens, begin, length = open_spool(folder)
    rows = np.arange(len(length), dtype=np.int64)
    prompts = PromptSet(tokens, begin, length, rows, np.zeros(len(rows), np.int32), [SamplingParams()])
    model = ModelConfig("LlamaForCausalLM", 30, 576, 1536, 9, 3, 64, VOCABULARY, 1e-5, 1e4, None, 1 << 20, True, (2,), 1)
    kv = planning.KVSize(page_size=16, bytes_per_token=23_040, memory=8 << 30)
    plan = planning.make_plan(prompts, model, RunOptions(inputs=("x",), output=Path("x")), kv)
    total_s = time.perf_counter() - began
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "rows": len(length),
        "tokens": plan.prompt_tokens,
        "computed_rows": len(plan.prompts),
        "nodes": plan.trie.num_nodes,
        "distinct_tokens": plan.trie.trie_tokens,
        "pool_pages": plan.config.num_pages,
        **phases.seconds,
        "total_s": total_s,
        "cpu_s": usage.ru_utime + usage.ru_stime - imports.ru_utime - imports.ru_stime,
        "peak_gib": _status_kib("self", "VmHWM") / 2**20,
        "imports_gib": imports_kib / 2**20,
    }


def measure(folder: Path) -> dict[str, Any]:
    """`plan_folder` in a process of its own, watched from here for its anonymous memory."""
    command = [sys.executable, str(Path(__file__).resolve()), "--plan-folder", str(folder)]
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdout=out)
        anonymous = 0
        while process.poll() is None:
            anonymous = max(anonymous, _status_kib(process.pid, "RssAnon"))
            time.sleep(SAMPLE_S)
        if process.returncode:
            raise SystemExit(f"planning failed with exit code {process.returncode}")
        out.seek(0)
        return {**json.loads(out.read()), "anonymous_gib": anonymous / 2**20}


def _status_kib(process: int | str, name: str) -> int:
    """An entry of the process's /proc/.../status; 0 when the process has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)


def write_spool(shape: str, rows: int, length: int, seed: int, folder: Path) -> None:
    """The shape's rows as a run would leave them in its work folder."""
    spool = TokenSpool(folder)
    for row in SHAPES[shape](rows, length, np.random.default_rng(seed)):
        spool.append(row)
    spool.close()


# --- the command ----------------------------------------------------------------------------------------------------------

COLUMNS = {
    "shape": "shape",
    "rows": "rows",
    "tokens": "tokens",
    "computed_rows": "computed rows",
    "distinct_tokens": "distinct tokens",
    "nodes": "nodes",
    "dedupe_s": "dedupe s",
    "trie_s": "trie s",
    "order_s": "order s",
    "pool_s": "pool s",
    "total_s": "total s",
    "cpu_s": "CPU s",
    "anonymous_gib": "anonymous GiB",
    "peak_gib": "peak GiB",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="*", choices=[[], *SHAPES], metavar="SHAPE", help=f"{', '.join(SHAPES)} (default: all)")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--length", type=int, default=512, help="tokens of a row (default 512)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the token files go, 4 bytes a token (default: the system's)")
    parser.add_argument("-o", "--output", type=Path, help="write the figures to this Parquet file")
    parser.add_argument("--plan-folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plan_folder is not None:
        print(json.dumps(plan_folder(args.plan_folder)))
        return
    measured: list[dict[str, Any]] = []
    failures = 0
    for shape in args.shape or SHAPES:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            write_spool(shape, args.rows, args.length, args.seed, Path(folder))
            row = {"shape": shape, "length": args.length, **measure(Path(folder))}
        wanted = expected_distinct(shape, args.rows, args.length)
        if row["rows"] != args.rows or wanted not in (None, row["distinct_tokens"]):
            failures += 1
            print(f"FAILED: {shape}: {row['rows']} rows and {row['distinct_tokens']} distinct tokens", flush=True)
        measured.append(row)
        print(f"{shape}: {row['total_s']:.1f} s", file=sys.stderr, flush=True)
    print(markdown(list(COLUMNS.values()), [[row[key] for key in COLUMNS] for row in measured]))
    print(f"load average {os.getloadavg()[0]:.1f}")
    save(measured, args.output)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
