"""Times the operations at SmolLM2-135M's shapes: `python kernel_bench.py [--threads N] [--dtype bfloat16] [--kv-dtype int8]`.

Layers rotate through a pool larger than the cache, as in a real step. The machine may be shared: the figure is the fastest
of many calls, and only ratios within one run mean much. With `--threads 1` it is processor time, which other programs disturb
least: two threads that wait for each other lose whole time slices.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from batchrun.kernels import cpu, ops
from batchrun.kernels.ops import AttentionItem, KVConfig

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB = 576, 9, 3, 64, 1536, 49152
LAYERS = 8
"""Enough that the keys of a step do not stay in the cache from one round to the next."""
LINEAR_LAYERS = 12
"""85 MB of weights in bfloat16: more than the caches hold."""


def fastest(call: Callable[[], object], seconds: float = 0.4) -> float:
    """Seconds of the fastest call in about `seconds` of calls."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    call()
    times: list[float] = []
    end = clock() + seconds
    while clock() < end or len(times) < 3:
        start = clock()
        call()
        times.append(clock() - start)
    return min(times)


def typical(call: Callable[[], object], seconds: float) -> float:
    """Seconds of the median call in about `seconds` of calls: for calls that differ in what the caches hold."""
    call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def report(name: str, seconds: float, flop: float = 0.0, num_bytes: float = 0.0) -> None:
    rate = f"{flop / seconds / 1e9:8.0f} GFLOP/s" if flop else f"{num_bytes / seconds / 1e9:8.1f} GB/s"
    print(f"{name:44}{seconds * 1e6:10.0f} us{rate}", flush=True)


def bench_linear(dtype: torch.dtype, _: torch.dtype | None) -> None:
    """One layer's products, the layers in turn, so that the weights come from memory: ours, and in torch operations."""
    shapes = ((HIDDEN + 2 * KV_HEADS * HEAD_DIM, HIDDEN), (HIDDEN, HIDDEN), (2 * MLP, HIDDEN), (HIDDEN, MLP))
    weights = [[torch.randn(*shape).to(dtype) for shape in shapes] for _ in range(LINEAR_LAYERS)]
    ways = {"linear": [list(map(ops.pack_linear, layer)) for layer in weights]}
    if dtype == torch.bfloat16:
        ways["  torch's packed"] = [list(map(cpu.pack_linear, layer)) for layer in weights]
    for rows in (1, 8, 32, 64, 128, 256, 512, 1024):
        inputs = [torch.randn(rows, size).to(dtype) for _, size in shapes]
        for name, packed in ways.items():
            layers = itertools.cycle(packed)

            def one_layer(inputs: list[torch.Tensor] = inputs, layers: Iterator[list[ops.Weight]] = layers) -> None:
                for x, weight in zip(inputs, next(layers), strict=True):
                    ops.linear(x, weight)

            flop = 2.0 * rows * sum(out * size for out, size in shapes)
            report(f"{name}, a layer of {rows} rows", typical(one_layer, 0.5), flop)


def bench_elementwise(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    for rows in (64, 512):
        x, weight = torch.randn(rows, HIDDEN).to(dtype), torch.ones(HIDDEN).to(dtype)
        qkv, gate_up = torch.randn(rows, 15, HEAD_DIM).to(dtype), torch.randn(rows, 2 * MLP).to(dtype)
        angle = torch.randn(rows, HEAD_DIM)
        cos, sin = angle.cos(), angle.sin()
        kv = ops.allocate_kv(KVConfig(1, HEADS, KV_HEADS, HEAD_DIM, dtype, kv_dtype=kv_dtype), rows)
        slots = torch.arange(rows) * 3
        width = dtype.itemsize * rows
        calls: list[tuple[str, Callable[[], object], int]] = [
            ("rms_norm", lambda x=x, w=weight: ops.rms_norm(x, w, 1e-5), 2 * HIDDEN),
            ("rms_norm_residual", lambda x=x, w=weight: ops.rms_norm_residual(x, x, w, 1e-5), 4 * HIDDEN),
            ("silu_mul", lambda gate_up=gate_up: ops.silu_mul(gate_up), 3 * MLP),
            (
                "rotate_and_write",
                lambda kv=kv, qkv=qkv, cos=cos, sin=sin, slots=slots: ops.rotate_and_write(kv, 0, qkv, cos, sin, slots),
                (2 * HEADS + 4 * KV_HEADS) * HEAD_DIM,
            ),
        ]
        for name, call, size in calls:
            report(f"{name} {rows}", fastest(call, 0.2), num_bytes=size * width)


def decode_items(rows: int, own: int, shared: int, group: int) -> list[AttentionItem]:
    """Rows with `own` keys each; every `group` of them share `shared` keys, all share 16."""
    items = [AttentionItem(row, 1, [(row * 256, 256)], own, True) for row in range(rows)]
    first = rows * 256
    for row in range(0, rows if shared else 0, group):
        items.append(AttentionItem(row, min(group, rows - row), [(first, shared)], shared, False))
        first += -(-shared // 16) * 16
    return [*items, AttentionItem(0, rows, [(first, 16)], 16, False)]


def prefill_items(tokens: int, cached: int) -> list[AttentionItem]:
    own = AttentionItem(0, tokens, [(0, tokens)], tokens, True)
    return [own, AttentionItem(0, tokens, [(tokens, cached)], cached, False)] if cached else [own]


def bench_attention(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    kv = ops.allocate_kv(KVConfig(LAYERS, HEADS, KV_HEADS, HEAD_DIM, dtype, kv_dtype=kv_dtype), 6000)
    generator = torch.Generator().manual_seed(0)
    for layer in range(LAYERS):
        rows = torch.randn(6000 * 16, KV_HEADS, HEAD_DIM, generator=generator).to(dtype)
        ops.write_kv(kv, layer, rows, rows, torch.arange(len(rows)))
    cases = [
        ("decode 64 rows, own 100", decode_items(64, 100, 0, 1)),
        ("decode 256 rows, own 96", decode_items(256, 96, 0, 1)),
        ("decode 64 rows, own 1180", [AttentionItem(row, 1, [(row * 1200, 1200)], 1180, True) for row in range(64)]),
        ("decode 256 rows, own 50, 640 per 16", decode_items(256, 50, 640, 16)),
        ("decode 64 rows, own 100, 800 per 3", decode_items(64, 100, 800, 3)),
        ("decode 128 rows, own 100, 800 per 3", decode_items(128, 100, 800, 3)),
        ("decode 64 rows, own 100, 1500 for all", decode_items(64, 100, 1500, 64)),
        ("prefill 512", prefill_items(512, 0)),
        ("prefill 512 behind 500", prefill_items(512, 500)),
        ("prefill 512 behind 3000", prefill_items(512, 3000)),
    ]
    for name, items in cases:
        tokens = max(item.query_start + item.query_count for item in items)
        q = torch.randn(tokens, HEADS, HEAD_DIM, generator=generator).to(dtype)
        build = fastest(lambda items=items, tokens=tokens: ops.build_plan(kv, items, tokens), 0.1)
        plan = ops.build_plan(kv, items, tokens)
        layers = iter(range(1 << 40))
        seconds = fastest(lambda plan=plan, q=q, layers=layers: ops.attend(kv, next(layers) % LAYERS, q, plan))
        pairs = sum(i.query_count * i.num_keys - (i.query_count * (i.query_count - 1) // 2 if i.causal else 0) for i in items)
        report(name, seconds, flop=4.0 * pairs * HEADS * HEAD_DIM)
        num_bytes = sum(item.num_keys for item in items) * kv.config.bytes_per_token / LAYERS
        print(f"{'  keys at':44}{num_bytes / seconds / 1e9:10.1f} GB/s; plan {build * 1e6:.0f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--kv-dtype", choices=("auto", "int8"), default="auto")
    parser.add_argument("--only", choices=("linear", "elementwise", "attention"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype, kv_dtype = getattr(torch, arguments.dtype), torch.int8 if arguments.kv_dtype == "int8" else None
    benches = {"linear": bench_linear, "elementwise": bench_elementwise, "attention": bench_attention}
    for name, bench in benches.items():
        if arguments.only in (None, name):
            bench(dtype, kv_dtype)


if __name__ == "__main__":
    main()
