"""The least time that this machine could take for a workload: what its matrix units and its memory allow.

    python roofline.py FOLDER [--threads N]      # measures both rates, prints them as one line of JSON

**Prefill.** P weights in the linear layers of the blocks, H the head's (vocabulary x hidden), a = 4 x layers x query heads x
head dimension, T distinct prompt tokens (the tree's edges, after deduplication), R distinct prompts:

    FLOP  = 2 P T + 2 H R + a x sum over edges [s, e) of sum over p in [s, e) of (p + 1)
    bytes = the weights once

**Decode.** A sample of m tokens behind a prompt of L takes m - 1 tokens through the model: its first token comes out of
prefill, its last is not fed. With D the sum of m - 1 over the samples, and at most B sequences in one step:

    FLOP  = 2 (P + H) D + a x sum over samples of sum over j in 1 .. m - 1 of (L + j)
    bytes = steps x weights + KV bytes of a token x (shared + own)
    steps = max(longest m - 1, ceil(D / B))
    shared = sum over edges of length x max(longest m - 1 beneath, ceil(sum of m - 1 beneath / B))
    own    = sum over samples of sum over j in 1 .. m - 1 of j

All sequences beneath an edge decode in the same steps as far as B allows, so its keys are read once for B tokens; a sample's
own keys are read by it alone. Writes, norms, activations, sampling and everything outside the model count nothing.

A phase takes max(FLOP / GEMM rate, bytes / memory bandwidth), which no engine can undercut with B sequences at once whose
keys and weights do not stay in the caches from one step to the next. `floor_s` is the sum of the two phases.
`overlapped_s` does not assume that they follow each other: max(all FLOP / rate, all bytes / bandwidth).
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from batchrun.engine.config import ModelConfig
from batchrun.prefix_cache.trie import Trie

MEASURED_ROWS = 1024
READ_BYTES = 5 << 28
"""1.25 GiB, far more than the caches hold."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What this machine reaches, both by the best of many tries."""

    flop_per_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Work:
    """FLOP and bytes of one phase."""

    flop: float
    bytes: float

    def seconds(self, rates: Rates) -> float:
        return max(self.flop / rates.flop_per_s, self.bytes / rates.bytes_per_s)


@dataclass(frozen=True, slots=True)
class Floor:
    """Least seconds; see the module's docstring."""

    prefill_s: float
    decode_s: float
    overlapped_s: float
    decode_bound: str
    """`memory` or `compute`."""

    @property
    def floor_s(self) -> float:
        return self.prefill_s + self.decode_s


def block_weights(config: ModelConfig) -> int:
    """Weights in the linear layers of all blocks."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return config.num_layers * config.hidden_size * (2 * q + 2 * kv + 3 * config.intermediate_size)


def head_weights(config: ModelConfig) -> int:
    return config.vocab_size * config.hidden_size


def attention_flop_per_key(config: ModelConfig) -> int:
    """One query token and one key, all layers and heads: a product for the score and one for the value."""
    return 4 * config.num_layers * config.num_heads * config.head_dim


def prefill_work(config: ModelConfig, trie: Trie, weight_bytes: int = 2) -> Work:
    """Work of computing every distinct prompt token once; weight_bytes is 2 in bfloat16."""
    start, end = trie.start.astype(np.int64), trie.end.astype(np.int64)
    keys = int((end * (end + 1) // 2 - start * (start + 1) // 2).sum())
    prompts = len(np.unique(trie.row_node))
    flop = 2 * block_weights(config) * trie.trie_tokens + 2 * head_weights(config) * prompts
    weights = block_weights(config) + head_weights(config)
    return Work(float(flop + attention_flop_per_key(config) * keys), float(weight_bytes * weights))


def decode_work(
    config: ModelConfig, trie: Trie, max_tokens: np.ndarray, samples: np.ndarray, max_running: int, element_bytes: int = 2
) -> Work:
    """Work of decoding.

    max_tokens and samples, int64 [rows of the trie]: output tokens of each sample of a row, and its samples; max_running, B
    above; element_bytes of weights and KV, 2 in bfloat16.
    """
    fed = max_tokens.astype(np.int64) - 1
    length = trie.end[trie.row_node].astype(np.int64)
    own = fed * (fed + 1) // 2
    tokens = fed * samples
    keys = int((samples * (fed * length + own)).sum())
    weights = block_weights(config) + head_weights(config)
    flop = 2 * weights * int(tokens.sum()) + attention_flop_per_key(config) * keys
    by_place = np.append(0, np.cumsum(tokens[trie.sorted_rows]))
    shared = 0
    for node in range(1, trie.num_nodes):
        low, high = int(trie.row_lo[node]), int(trie.row_hi[node])
        longest = int(fed[trie.sorted_rows[low:high]].max())
        reads = max(longest, -(-int(by_place[high] - by_place[low]) // max_running))
        shared += int(trie.end[node] - trie.start[node]) * reads
    steps = max(int(fed.max(initial=0)), -(-int(tokens.sum()) // max_running))
    kv_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * element_bytes
    return Work(float(flop), float(steps * weights * element_bytes + kv_token * (shared + int((samples * own).sum()))))


def floor(prefill: Work, decode: Work, rates: Rates) -> Floor:
    by_compute = decode.flop / rates.flop_per_s >= decode.bytes / rates.bytes_per_s
    return Floor(
        prefill_s=prefill.seconds(rates),
        decode_s=decode.seconds(rates),
        overlapped_s=Work(prefill.flop + decode.flop, prefill.bytes + decode.bytes).seconds(rates),
        decode_bound="compute" if by_compute else "memory",
    )


def measured_rates(model: str, threads: int) -> Rates:
    """Measure in a process of its own, which takes its threads and its memory with it when it ends."""
    command = [sys.executable, __file__, model, "--threads", str(threads)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return Rates(**json.loads(done.stdout))


def _best_s(work: Callable[[], object], seconds: float) -> float:
    best, end = math.inf, time.perf_counter() + seconds
    work()
    while time.perf_counter() < end:
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best


def gemm_rate(config: ModelConfig, seconds: float = 0.4) -> float:
    """FLOP/s of the best of the model's own linear layers, bfloat16, packed, 1,024 rows at once; `seconds` for each shape."""
    import torch

    from batchrun.kernels import ops

    q, kv, hidden = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.hidden_size
    mlp = config.intermediate_size
    best = 0.0
    for out, size in {(q + 2 * kv, hidden), (hidden, q), (2 * mlp, hidden), (hidden, mlp), (config.vocab_size, hidden)}:
        weight = ops.pack_linear(torch.randn(out, size).bfloat16())
        x = torch.randn(MEASURED_ROWS, size).bfloat16()
        taken = _best_s(lambda x=x, weight=weight: ops.linear(x, weight), seconds)
        best = max(best, 2 * MEASURED_ROWS * out * size / taken)
    return best


def read_rate(seconds: float = 1.0) -> float:
    """Bytes/s of the best way found to read 1.25 GiB: a sum of integers, or the largest of floats."""
    import torch

    block = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    ways: list[Callable[[], object]] = [block.sum, block.view(torch.float32).amax]
    return READ_BYTES / min(_best_s(way, seconds) for way in ways)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hugging Face folder, for the shapes")
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    args = parser.parse_args()
    import torch

    from batchrun.engine.loader import load_tokenizer, resolve_model

    if args.threads:
        torch.set_num_threads(args.threads)
    config, _ = load_tokenizer(resolve_model(args.model))
    with torch.inference_mode():
        print(json.dumps({"flop_per_s": gemm_rate(config), "bytes_per_s": read_rate()}))


if __name__ == "__main__":
    main()
