"""The operations in plain float32 torch, one query at a time: the truth that every other path is tested against."""

import torch

from batchrun.kernels.spec import AttentionItem


def item_slots(item: AttentionItem) -> list[int]:
    """The slots of the item's keys, in key order; reserved slots past num_keys are left out."""
    slots = [slot for first, count in item.runs for slot in range(first, first + count)]
    return slots[: item.num_keys]


def attend(q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, items: list[AttentionItem]) -> torch.Tensor:
    """Attention of every token over the union of its items' keys; scale 1/sqrt(head_dim).

    Arguments: q [T, heads, head_dim]; k_pool, v_pool [slots, kv_heads, head_dim]; any dtype, computed in float32.
    Returns: float32 [T, heads, head_dim]; 0 for a token that sees no key.
    """
    num_tokens, num_heads, head_dim = q.shape
    group = num_heads // k_pool.shape[1]
    visible: list[list[int]] = [[] for _ in range(num_tokens)]
    for item in items:
        slots = item_slots(item)
        for i in range(item.query_count):
            hidden = item.query_count - 1 - i if item.causal else 0
            visible[item.query_start + i] += slots[: max(0, len(slots) - hidden)]
    out = torch.zeros(num_tokens, num_heads, head_dim)
    for t, slots in enumerate(visible):
        if not slots:
            continue
        k = k_pool[slots].float().repeat_interleave(group, dim=1)
        v = v_pool[slots].float().repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,nhd->hn", q[t].float(), k) * head_dim**-0.5
        out[t] = torch.einsum("hn,nhd->hd", scores.softmax(-1), v)
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate-half embedding of x [T, heads, head_dim] with cos, sin [T, head_dim], in float32."""
    x = x.float()
    first, second = x.chunk(2, dim=-1)
    return x * cos.float()[:, None] + torch.cat((-second, first), dim=-1) * sin.float()[:, None]


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [T, 2 * I] (gate first), in float32."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T in float32."""
    return x.float() @ weight.float().T


def through_int8(x: torch.Tensor) -> torch.Tensor:
    """What attention reads of keys or values [..., head_dim] in an int8 pool, bfloat16: NaN where one of a head is not finite."""
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale == 0, 0, (x / scale).round() * scale).bfloat16()
