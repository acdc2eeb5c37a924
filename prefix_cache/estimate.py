"""What a plan saves and what it will cost: tokens, pages, and time by the roofline of a machine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from batchrun.prefix_cache.trie import Int32Array, Int64Array, Trie


class PrefillSummary(NamedTuple):
    tokens: int
    """Prompt tokens, each row's counted."""
    distinct_tokens: int
    """Tokens that have to be computed: the trie's."""
    saved_share: float
    """Share of the tokens that need no computation, 0 to 1."""


class SharedNode(NamedTuple):
    """A prefix that several rows have in common, up to the end of a node's edge."""

    node: int
    depth: int
    """Tokens of the prefix, from the first of the prompt."""
    tokens: int
    """Tokens of the node's own edge, the last of those."""
    num_rows: int
    tokens_saved: int
    """tokens x (num_rows - 1)"""
    sample_row: int
    """One of the rows: its first `depth` tokens are the prefix."""


class LargestPath(NamedTuple):
    row: int
    pages: int


@dataclass(frozen=True)
class ModelDims:
    """What of a model its speed depends on."""

    num_layers: int
    num_heads: int
    """Query heads."""
    head_dim: int
    linear_parameters: int
    """Weights that each token is multiplied with."""
    weight_bytes: int
    """Bytes of those weights, all read once per step."""
    kv_bytes_per_token: int


class TimeEstimate(NamedTuple):
    prefill_flop: float
    prefill_s: float
    decode_steps: int
    decode_s: float
    total_s: float
    ttft_s: float
    """From the first step to the first output token of the first row."""
    tpot_s: float
    """Mean gap between two output tokens of a row."""


def prefill_summary(trie: Trie, length: Int32Array) -> PrefillSummary:
    """Tokens of the rows (length int32 [R]) and how many of them the trie saves."""
    tokens = int(length.sum(dtype=np.int64))
    return PrefillSummary(tokens, trie.trie_tokens, 1 - trie.trie_tokens / tokens if tokens else 0.0)


def shared_nodes(trie: Trie, count: int, by: Literal["tokens_saved", "depth"] = "tokens_saved") -> list[SharedNode]:
    """The `count` nodes with at least two rows that save the most tokens, or that reach deepest; best first."""
    num_rows = trie.row_hi - trie.row_lo
    saved = (trie.end - trie.start).astype(np.int64) * (num_rows - 1)
    nodes = np.flatnonzero(num_rows > 1)
    nodes = nodes[nodes > 0]
    keys = (-saved[nodes], -trie.end[nodes]) if by == "tokens_saved" else (-trie.end[nodes], -saved[nodes])
    best = nodes[np.lexsort((nodes, keys[1], keys[0]))][:count]
    return [
        SharedNode(
            node=node,
            depth=int(trie.end[node]),
            tokens=int(trie.end[node] - trie.start[node]),
            num_rows=int(num_rows[node]),
            tokens_saved=int(saved[node]),
            sample_row=int(trie.sorted_rows[trie.row_lo[node]]),
        )
        for node in best.tolist()
    ]


def pages_for_path(trie: Trie, page_size: int) -> Int64Array:
    """KV pages of each row's prompt, int64 [R]: every node of its path starts on a page boundary."""
    pages = -((trie.start - trie.end).astype(np.int64) // page_size)
    return trie.path_sums(pages)[trie.row_node]


def largest_path(trie: Trie, page_size: int) -> LargestPath:
    """The row whose prompt takes the most pages, the first of them on ties. The trie must have a row."""
    pages = pages_for_path(trie, page_size)
    row = int(pages.argmax())
    return LargestPath(row, int(pages[row]))


def estimate_time(
    dims: ModelDims,
    trie: Trie,
    output_tokens: npt.NDArray[np.float64],
    *,
    rows_at_once: int,
    flop_per_s: float,
    bytes_per_s: float,
    samples: Int64Array | None = None,
    first_row: int = 0,
) -> TimeEstimate:
    """Time of a whole job by the roofline.

    output_tokens float64 [R], of each of a row's samples; samples int64 [R], outputs per row (1 each when None);
    rows_at_once, sequences that decode at the same time; flop_per_s and bytes_per_s, what the machine reaches;
    first_row, the row that starts first.

    Prefill is bound by compute: n tokens behind c cached ones cost 2 P n + 4 layers heads head_dim n (c + n / 2) FLOP.
    A decode step of B sequences takes max(2 P B / flop_per_s, weight bytes / bytes_per_s) plus the time to read the KV,
    where rows that decode together read a key that they share once. Later prompts are prefilled beside decoding rows,
    whose gaps they lengthen; prompts of the first `rows_at_once` are not.
    """
    flop = prefill_flop(dims, trie)
    prefill_s = float(flop.sum()) / flop_per_s
    weights_s = dims.weight_bytes / bytes_per_s
    # The first row can answer when its own path is computed, which reads the weights once at least.
    first_path = float(flop[trie.path(first_row)].sum()) if trie.num_rows else 0.0
    ttft_s = max(first_path / flop_per_s, weights_s) if trie.num_rows else 0.0
    if samples is None:
        samples = np.ones(trie.num_rows, np.int64)
    gaps = np.maximum(output_tokens - 1, 0)  # the first token comes with the prefill
    decode_tokens = float((gaps * samples).sum())
    num_sequences = int(samples.sum())
    if not decode_tokens:
        return TimeEstimate(float(flop.sum()), prefill_s, 0, 0.0, max(prefill_s, ttft_s), ttft_s, 0.0)
    at_once = min(rows_at_once, num_sequences)
    # No fewer steps than the longest output has.
    steps = math.ceil(max(decode_tokens / at_once, float(gaps.max())))
    batch = decode_tokens / steps
    prompt_keys = _keys_read(trie, max(1, round(at_once * trie.num_rows / num_sequences))) * (batch / at_once)
    output_keys = batch * float((gaps**2 * samples).sum()) / decode_tokens / 2
    linear_s = max(2 * dims.linear_parameters * batch / flop_per_s, weights_s)
    step_s = linear_s + (prompt_keys + output_keys) * dims.kv_bytes_per_token / bytes_per_s
    decode_s = steps * step_s
    beside = prefill_s * (1 - at_once / num_sequences)
    total_s = max(prefill_s, ttft_s) + decode_s
    return TimeEstimate(float(flop.sum()), prefill_s, steps, decode_s, total_s, ttft_s, step_s + beside / steps)


def prefill_flop(dims: ModelDims, trie: Trie) -> npt.NDArray[np.float64]:
    """FLOP to compute each node's edge behind the tokens before it, float64 [N]."""
    start, tokens = trie.start.astype(np.float64), (trie.end - trie.start).astype(np.float64)
    attention = 4.0 * dims.num_layers * dims.num_heads * dims.head_dim
    return 2.0 * dims.linear_parameters * tokens + attention * tokens * (start + tokens / 2)


def _keys_read(trie: Trie, rows_at_once: int) -> float:
    """Distinct prompt tokens beneath `rows_at_once` neighbouring rows, on average over such groups."""
    groups = -(-trie.num_rows // rows_at_once)
    touched = (trie.row_hi - 1) // rows_at_once - trie.row_lo // rows_at_once + 1
    return float(((trie.end - trie.start) * touched).sum()) / groups
