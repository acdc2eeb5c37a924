"""The one door to the operations: everything outside this folder imports these names and knows no layout behind them."""

import torch

from batchrun.kernels import cpu
from batchrun.kernels.cpu import KVCache, PackedLinear, linear, pack_linear, rms_norm, rms_norm_residual, rotary, silu_mul
from batchrun.kernels.cpu_attention import attend
from batchrun.kernels.cpu_plan import AttentionPlan, advance_plan, build_plan
from batchrun.kernels.spec import AttentionItem, KVConfig

__all__ = [
    "AttentionItem",
    "AttentionPlan",
    "KVCache",
    "KVConfig",
    "PackedLinear",
    "advance_plan",
    "allocate_kv",
    "attend",
    "build_plan",
    "copy_kv",
    "linear",
    "pack_linear",
    "page_size",
    "rms_norm",
    "rms_norm_residual",
    "rotary",
    "silu_mul",
    "write_kv",
]


def page_size(device: str) -> int:
    """Tokens per page of the pool on this device.

    Raises:
        ValueError: a device that has no implementation.
    """
    if device != "cpu":
        raise ValueError(f"device is {device!r}: only 'cpu' is implemented")
    return cpu.PAGE_SIZE


def allocate_kv(config: KVConfig, num_pages: int) -> KVCache:
    """A pool for num_pages * page_size tokens. Its contents are undefined until written; attention never reads past num_keys.

    Raises:
        ValueError: num_pages below 1, or a device that has no implementation.
    """
    page_size(config.device)
    if num_pages < 1:
        raise ValueError(f"num_pages is {num_pages}: it must be at least 1")
    return cpu.KVCache(config, num_pages)


def write_kv(kv: KVCache, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """Store keys and values of T tokens in one layer.

    Arguments: k, v [T, kv_heads, head_dim] in the pool's dtype, keys already turned; slots int64 [T], all different,
        slot = page * page_size + offset.
    Changes those slots and nothing else. All of a step's tokens are written before `attend` of the same layer.
    """
    cpu.write_kv(kv, layer, k, v, slots)


def copy_kv(kv: KVCache, source_slots: torch.Tensor, target_slots: torch.Tensor) -> None:
    """Copy keys and values of tokens in all layers; slots int64 [T]. Sources are read before any target is written."""
    cpu.copy_kv(kv, source_slots, target_slots)
