"""The one door to the operations: everything outside this folder imports these names and knows no layout behind them."""

from typing import TypeAlias

import torch

from batchrun.kernels import (
    cpu,
    cpu_attention,
    cpu_plan,
    native,
    native_amx,
    native_elementwise,
    native_linear,
    native_plan,
    native_pool,
    native_sampling,
    sampling,
)
from batchrun.kernels.cpu import PackedLinear, rotary
from batchrun.kernels.sampling import block_sums, invert, weight_scale, whole_weights
from batchrun.kernels.spec import PAGE_SIZE, AttentionItem, Draws, KVConfig
from batchrun.kernels.timing import timed, timing

__all__ = [
    "AttentionItem",
    "AttentionPlan",
    "Draws",
    "GatedWeight",
    "KVCache",
    "KVConfig",
    "Weight",
    "advance_plan",
    "allocate_kv",
    "attend",
    "best",
    "block_sums",
    "build_plan",
    "copy_kv",
    "draw",
    "gated_linear",
    "gather",
    "invert",
    "linear",
    "missing_for_int8",
    "native_status",
    "pack_gated_linear",
    "pack_linear",
    "page_size",
    "rms_norm",
    "rms_norm_residual",
    "rotary",
    "rotate_and_write",
    "silu_mul",
    "timing",
    "weight_scale",
    "whole_weights",
    "write_kv",
]

KVCache: TypeAlias = cpu.KVCache | native_pool.NativeKVCache
"""A pool of keys and values, opaque. Its kind, chosen when it is allocated, decides who computes on it."""
AttentionPlan: TypeAlias = cpu_plan.AttentionPlan | native_plan.NativePlan
"""A step's attention, prepared for all layers of one pool, opaque."""

Weight: TypeAlias = torch.Tensor | PackedLinear | native_linear.NativeLinear
"""A linear layer's weight as `pack_linear` made it, opaque."""
GatedWeight: TypeAlias = Weight
"""A gated layer's two weights as `pack_gated_linear` made them, opaque."""

_choice = "auto"
"""Tests set it, to have one implementation of several: "torch", "native" or the compiled kernel of a target by its name."""


def _load() -> native.Native | native.NotAvailable:
    return native.load(None if _choice in ("auto", "torch", "native") else _choice)


def native_status() -> str:
    """One line: for what processors the kernel is compiled and where it lies, or why there is none. Builds it if need be."""
    loaded = _load()
    if not isinstance(loaded, native.Native):
        return f"torch operations: {loaded}"
    remarks = [native_amx.choose(loaded).remark, loaded.passed_over and f"no better: {loaded.passed_over}"]
    return ", ".join([f"compiled for {loaded.target.title}: {loaded.path}", *filter(None, remarks)])


def page_size(device: str) -> int:
    """Tokens per page of the pool on this device.

    Raises:
        ValueError: a device that has no implementation.
    """
    if device != "cpu":
        raise ValueError(f"device is {device!r}: only 'cpu' is implemented")
    return PAGE_SIZE


def allocate_kv(config: KVConfig, num_pages: int) -> KVCache:
    """A pool for num_pages * page_size tokens. Its contents are undefined until written; attention never uses keys past num_keys.

    bfloat16 with a head size that is a multiple of 16 up to 256 is computed by the compiled kernel where CPU and compiler
    allow it, all else in torch operations. Keys and values in int8 need the compiled kernel.

    Raises:
        ValueError: num_pages below 1, a device that has no implementation, or int8 without the compiled kernel.
    """
    page_size(config.device)
    if num_pages < 1:
        raise ValueError(f"num_pages is {num_pages}: it must be at least 1")
    if _choice != "torch" and native.suits(config):
        loaded = _load()
        if isinstance(loaded, native.Native):
            return native_pool.NativeKVCache(config, num_pages, loaded, native_amx.choose(loaded).rows)
    assert _choice in ("auto", "torch"), f"no compiled kernel for {config}: {native_status()}"
    if config.is_int8:
        raise ValueError(f"kv_dtype is torch.int8, which {missing_for_int8(config.head_dim)}")
    return cpu.KVCache(config, num_pages)


def missing_for_int8(head_dim: int, here: bool = True) -> str | None:
    """What keeps keys and values of a bfloat16 model from being in int8, `needs ...`; None if nothing does.

    Args:
        here: with the compiled kernel as it is on this machine, which is built if need be; else of heads of this size alone.
    """
    if not native.suits(KVConfig(1, 1, 1, head_dim, torch.bfloat16)):
        return f"needs heads of a multiple of 16 dimensions up to {native.MAX_HEAD_DIM}, and this model's have {head_dim}"
    loaded = _load() if here else None
    if isinstance(loaded, native.NotAvailable):
        return f"needs the compiled kernel, and there is none ({loaded})"
    return "needs the compiled kernel, and torch was chosen" if here and _choice == "torch" else None


def write_kv(kv: KVCache, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """Store keys and values of T tokens in one layer.

    Arguments: k, v [T, kv_heads, head_dim] in the pool's dtype, keys already turned; slots int64 [T], all different,
        slot = page * page_size + offset.
    Changes those slots and nothing else. All of a step's tokens are written before `attend` of the same layer.

    Raises:
        IndexError: a slot outside the pool.
    """
    if isinstance(kv, native_pool.NativeKVCache):
        native_pool.write_kv(kv, layer, k, v, slots)
    else:
        cpu.write_kv(kv, layer, k, v, slots)


@timed("rotary")
def rotate_and_write(
    kv: KVCache, layer: int, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """Turn the queries and keys of T tokens (`rotary`) and store the keys and values in one layer (`write_kv`).

    Arguments: qkv [T, heads + 2 * kv_heads, head_dim] in the pool's dtype: queries, keys, values; cos, sin [T, head_dim] in
        float32 or the pool's dtype; slots int64 [T], all different. They are not changed.
    Returns: the turned queries [T, heads, head_dim], a tensor of its own. All is equal to what the two functions give,
        but that the compiled kernel takes bfloat16 numbers below 1e-38 for 0.

    Raises:
        IndexError: a slot outside the pool; nothing is written.
    """
    if isinstance(kv, native_pool.NativeKVCache) and native_elementwise.suits(qkv, cos, sin):
        return native_pool.rotate_and_write(kv, layer, qkv, cos, sin, slots)
    heads, end = kv.config.num_heads, kv.config.num_heads + kv.config.num_kv_heads
    q, k = rotary(qkv[:, :heads], qkv[:, heads:end], cos, sin)
    write_kv(kv, layer, k, qkv[:, end:], slots)
    return q


def copy_kv(kv: KVCache, source_slots: torch.Tensor, target_slots: torch.Tensor) -> None:
    """Copy keys and values of tokens in all layers; slots int64 [T]. Sources are read before any target is written."""
    if isinstance(kv, native_pool.NativeKVCache):
        native_pool.copy_kv(kv, source_slots, target_slots)
    else:
        cpu.copy_kv(kv, source_slots, target_slots)


@timed("plan")
def build_plan(kv: KVCache, items: list[AttentionItem], num_tokens: int) -> AttentionPlan:
    """Prepare the attention of a step of `num_tokens` tokens.

    Every token is in at least one item, and the items a token is in have disjoint keys (not checked). The plan holds until
    membership changes; in steps that only decode, `advance_plan` moves it on.

    Raises:
        ValueError: intervals outside the step, runs outside the pool, more keys than slots, a token in no item.
    """
    if isinstance(kv, native_pool.NativeKVCache):
        return native_plan.build_plan(kv, items, num_tokens)
    return cpu_plan.build_plan(kv, items, num_tokens)


@timed("plan")
def advance_plan(plan: AttentionPlan) -> None:
    """Move a plan of decoding rows to the next step: each causal item with one query gets one more key.

    The new key's slot is the next of the item's runs. Afterwards the plan equals one built anew of the longer items.

    Raises:
        ValueError: an item has no reserved slot left; the plan is unchanged.
    """
    if isinstance(plan, native_plan.NativePlan):
        native_plan.advance_plan(plan)
    else:
        cpu_plan.advance_plan(plan)


@timed("attention")
def attend(kv: KVCache, layer: int, q: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    """Attention of the step's tokens in one layer; scale 1/sqrt(head_dim), partial results merged in float32.

    Arguments: q [T, heads, head_dim], turned, in the pool's dtype; the step's keys and values have been written.
    Returns: [T, heads, head_dim] in q's dtype, a tensor of its own; 0 for a token all of whose items have no keys.
    """
    if isinstance(kv, native_pool.NativeKVCache):
        assert isinstance(plan, native_plan.NativePlan), "the plan was built for another pool"
        return native_plan.attend(kv, layer, q, plan)
    assert isinstance(plan, cpu_plan.AttentionPlan), "the plan was built for another pool"
    return cpu_attention.attend(kv, layer, q, plan)


def _kernel_for(*tensors: torch.Tensor) -> native.Native | None:
    """The compiled kernel if it computes these tensors, without which torch does. Batches of any size are treated alike."""
    if _choice == "torch" or not native_elementwise.suits(*tensors):
        return None
    loaded = _load()
    if isinstance(loaded, native.Native):
        return loaded
    assert _choice == "auto", f"no compiled kernel: {loaded}"
    return None


def _onednn_is_faster(tiles: native_amx.Choice, can_pack: bool) -> bool:
    """Whether linear layers in bfloat16 go to torch's oneDNN: matrix tiles are several times as fast as our dot products."""
    return tiles.allowed and can_pack


def _linear_kernel_for(weight: torch.Tensor) -> native.Native | None:
    """The compiled kernel if it is to compute a linear layer of this weight."""
    kernel = _kernel_for(weight) if native_linear.suits(weight) else None
    if kernel and _choice == "auto" and _onednn_is_faster(native_amx.choose(kernel), cpu.can_pack()):
        kernel.library.batchrun_sleep_soon()  # oneDNN's threads need the cores next
        return None
    return kernel


def pack_linear(weight: torch.Tensor) -> Weight:
    """Prepare a weight [out, in] for `linear`. It may be copied: drop the original.

    bfloat16 is packed once for the compiled kernel, or into oneDNN's layout where there is none or the CPU has matrix tiles;
    other dtypes, and builds of torch without the packing operations (they are private), get the weight back as it is.
    """
    kernel = _linear_kernel_for(weight)
    return native_linear.pack(kernel, weight) if kernel else cpu.pack_linear(weight)


def pack_gated_linear(gate_up: torch.Tensor) -> GatedWeight:
    """Prepare the weights of a gated layer, gate_up [2 * I, in] with the gate's first, for `gated_linear`; see `pack_linear`."""
    kernel = _linear_kernel_for(gate_up)
    return native_linear.pack_gated(kernel, gate_up) if kernel else cpu.pack_linear(gate_up)


@timed("linear")
def linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """x [..., in] times the transpose of weight [out, in] -> [..., out] in x's dtype, sums in float32. No bias.

    By the compiled kernel a row's result has the same bits whatever rows are beside it.
    """
    return native_linear.linear(x, weight) if isinstance(weight, native_linear.NativeLinear) else cpu.linear(x, weight)


@timed("linear")
def gated_linear(x: torch.Tensor, weight: GatedWeight) -> torch.Tensor:
    """silu_mul of the linear layer: x [..., in] -> silu(x times gate) * (x times up) [..., I], with the same roundings."""
    if isinstance(weight, native_linear.NativeLinear):
        return native_linear.linear(x, weight)
    return _silu_mul(cpu.linear(x, weight))


@timed("elementwise")
def gather(table: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """Rows `which` (int64 [N]) of table [rows, width] -> [N, width], a tensor of its own.

    Raises:
        IndexError: a row outside the table.
    """
    kernel = _kernel_for(table)
    return native_elementwise.gather(kernel, table, which) if kernel else table.index_select(0, which)


@timed("elementwise")
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; computed in float32, result in x's dtype."""
    kernel = _kernel_for(x, weight)
    return native_elementwise.rms_norm(kernel, x, weight, eps) if kernel else cpu.rms_norm(x, weight, eps)


@timed("elementwise")
def rms_norm_residual(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add and normalise: (rms_norm(x + residual), x + residual), the sum rounded to the model's dtype first.

    Neither argument is changed.
    """
    kernel = _kernel_for(x, residual, weight)
    if kernel:
        return native_elementwise.rms_norm_residual(kernel, x, residual, weight, eps)
    return cpu.rms_norm_residual(x, residual, weight, eps)


@timed("elementwise")
def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of gate_up [..., 2 * I], gate first -> [..., I]; silu is rounded to gate_up's dtype before the product."""
    return _silu_mul(gate_up)


def _silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    kernel = _kernel_for(gate_up)
    return native_elementwise.silu_mul(kernel, gate_up) if kernel else cpu.silu_mul(gate_up)


def best(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely token of each row of logits [R, V].

    Returns: int64 [R], the place of the largest logit, the lowest among equals; bool [R], whether that logit is finite and no
        other is NaN: where not, the place says nothing.
    """
    kernel = _kernel_for(logits)
    return native_sampling.best(kernel, logits) if kernel else sampling.best(logits)


def draw(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Draw tokens from rows of logits [R, V] by inverting the cumulative distribution over the vocabulary.

    Returns: int64 [N]. Weights are whole numbers (`whole_weights`), so a draw does not depend on the batch. The compiled
        kernel's exponential differs from torch's in the last bits: a draw may differ where its uniform number lies that
        close to the boundary between two tokens.
    """
    kernel = _kernel_for(logits)
    return native_sampling.draw(kernel, logits, draws) if kernel else sampling.draw(logits, draws)
