"""The CPU's pool and the operations around attention, in torch operations only."""

import functools
from dataclasses import dataclass

import torch
from torch.nn import functional

from batchrun.kernels.spec import PAGE_SIZE, KVConfig


class KVCache:
    """Keys and values of all layers. Opaque outside this folder.

    Memory past the slots written so far is never touched, so the system need not back it.
    """

    def __init__(self, config: KVConfig, num_pages: int) -> None:
        self.config = config
        self.num_slots = num_pages * PAGE_SIZE
        self.zero_slot = self.num_slots
        """A slot of zeros that nothing writes: what padded reads find instead of another row's leftovers."""
        self.data = torch.empty(
            config.num_layers, 2, config.num_kv_heads, self.num_slots + PAGE_SIZE, config.head_dim, dtype=config.dtype
        )
        self.data[:, :, :, self.zero_slot :] = 0
        self._scratch: dict[str, torch.Tensor] = {}

    def scratch(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """An uninitialised tensor whose memory is used again by the next call with this name.

        Fresh temporaries of megabytes cost a page fault per 4 KiB in every layer.
        """
        dtype = dtype or self.config.dtype
        size = functools.reduce(lambda a, b: a * b, shape)
        held = self._scratch.get(name)
        if held is None or held.numel() < size or held.dtype != dtype:
            held = self._scratch[name] = torch.empty(size, dtype=dtype)
        return held[:size].view(shape)


def write_kv(kv: KVCache, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """Store the keys and values of T tokens; the contract is in `ops.write_kv`."""
    keys, values = kv.data[layer].unbind(0)
    keys.index_copy_(1, slots, k.transpose(0, 1))
    values.index_copy_(1, slots, v.transpose(0, 1))


def copy_kv(kv: KVCache, source_slots: torch.Tensor, target_slots: torch.Tensor) -> None:
    """Copy tokens in all layers; the contract is in `ops.copy_kv`."""
    kv.data.index_copy_(3, target_slots, kv.data.index_select(3, source_slots))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; statistics in float32, result in x's dtype."""
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def rms_norm_residual(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add and normalise: (rms_norm(x + residual), x + residual), the sum rounded to the model's dtype first.

    Neither argument is changed.
    """
    residual = residual + x
    return rms_norm(residual, weight, eps), residual


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half] -= x[..., half:] * sin[..., :half]
    out[..., half:] += x[..., :half] * sin[..., half:]
    return out


def rotary(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embedding in the rotate-half form (Su et al., RoFormer; element i turns with element i + head_dim / 2).

    Arguments: q [T, heads, head_dim], k [T, kv_heads, head_dim]; cos, sin [T, head_dim] in float32 or q's dtype.
    Returns: the turned q and k in their dtype; computed in the wider of the two dtypes. The arguments are not changed.
    """
    cos, sin = cos[:, None], sin[:, None]
    return _rotate(q, cos, sin).to(q.dtype), _rotate(k, cos, sin).to(k.dtype)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of gate_up [..., 2 * I], gate first -> [..., I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


@dataclass(frozen=True)
class PackedLinear:
    """A weight [out, in] in the blocked layout that oneDNN chose for it."""

    blocked: torch.Tensor
    shape: tuple[int, int]


@functools.cache
def can_pack() -> bool:
    """Whether this torch has the packing operations."""
    ops = torch.ops.mkldnn
    return torch.backends.mkldnn.is_available() and all(  # type: ignore[no-untyped-call]
        hasattr(ops, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    )


_PACK_BATCH = 64
"""Batch size that the packing is told; at 64 and 512 the layouts measured alike."""


def pack_linear(weight: torch.Tensor) -> "PackedLinear | torch.Tensor":
    """Prepare a weight [out, in] for `linear`.

    bfloat16 is packed once into oneDNN's layout (results are the same bits as unpacked; 1.5 times as fast at few rows, 1.1
    times at many, for it saves the reorder in each call). The packed copy replaces the weight: drop the original. Other
    dtypes, builds of torch without the packing operations (they are private) and processors for which oneDNN has no bfloat16
    get the weight back as it is.
    """
    if weight.dtype != torch.bfloat16 or not can_pack():
        return weight
    try:
        blocked = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_BATCH)
    except RuntimeError:  # oneDNN has no bfloat16 for this processor
        return weight
    return PackedLinear(blocked, (weight.shape[0], weight.shape[1]))


def linear(x: torch.Tensor, weight: "PackedLinear | torch.Tensor") -> torch.Tensor:
    """The contract is in `ops.linear`."""
    if isinstance(weight, torch.Tensor):
        return functional.linear(x, weight)
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight.blocked, None, "none", [], "")
    return out
