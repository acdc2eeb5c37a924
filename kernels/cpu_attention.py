"""Attention over segments of keys on the CPU, in torch operations, by the plan of `cpu_plan.py`.

Two ways to attend rows to keys, each giving `(out, logsumexp)`:

    flash   torch's flash operation. On CPUs without matrix tiles it runs at float32 speed in every dtype.
    GEMM    bfloat16 matrix products of oneDNN around a float32 softmax. A bfloat16 product rounds the scores to 8 bits, an
            error of several per cent in the weights of large scores; a second product yields what the first one lost
            (it accumulates in float32 from minus the first): hi + lo carry 16 bits, and the pair still costs less.
"""

import functools

import torch

from batchrun.kernels.cpu import KVCache
from batchrun.kernels.cpu_plan import AttentionPlan, Batch, Direct, uses_gemm

BLOCK_ROWS = 384
"""Packed query rows of one block of a large item."""
BLOCK_SCORES = 3 << 18
"""Scores of one call; beyond, key-value heads are taken one by one, and then fewer rows."""


def attend(kv: KVCache, layer: int, q: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    """Attention of the step's tokens in one layer; scale 1/sqrt(head_dim), partial results merged in float32.

    Arguments: q [T, heads, head_dim], turned, in the pool's dtype; the step's keys and values have been written.
    Returns: [T, heads, head_dim] in q's dtype, a tensor of its own; 0 for a token all of whose items have no keys.
    """
    assert plan.kv is kv, "the plan was built for another pool"
    config = kv.config
    tokens, heads, dim = plan.num_tokens, config.num_heads, config.head_dim
    assert q.shape == (tokens, heads, dim), f"q is {tuple(q.shape)}, the plan is for {(tokens, heads, dim)}"
    q = q.contiguous()
    out, lse = plan.out, plan.lse
    if out is None:
        make = torch.empty if plan.covered else torch.zeros
        out = make(tokens + 1, heads, dim, dtype=q.dtype)
    for batch in plan.batches:
        _attend_batch(kv, layer, q, batch, out, lse)
    if plan.directs:
        packed = q.view(tokens, config.num_kv_heads, config.group, dim).transpose(0, 1).contiguous().flatten(1, 2)
        for part in plan.directs:
            _attend_direct(kv, layer, q, packed, part, out, lse)
    if lse is None:
        return out[:tokens]
    return _merge(out, lse, plan.levels, tokens)


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, is_causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, logsumexp in float32) of [batch, heads, rows, dim] on keys [batch, heads, keys, dim], at least one key."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, attn_mask=mask)
    return out, lse


def _gemm(
    kv: KVCache, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, with_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, logsumexp) of bfloat16 [heads, rows, dim] on keys [heads, keys, dim].

    The mask is added to the scores' last columns: float32 [items, 1 or rows, columns], heads a multiple of items with the
    item running fastest. Every row sees a key.
    """
    shape = (q.shape[0], q.shape[1], k.shape[1])
    hi, lo = kv.scratch("hi", *shape), kv.scratch("lo", *shape)
    scores = kv.scratch("scores", *shape, dtype=torch.float32)
    scale, transposed = q.shape[-1] ** -0.5, k.transpose(1, 2)
    torch.baddbmm(hi, q, transposed, beta=0, alpha=scale, out=hi)
    torch.baddbmm(hi, q, transposed, beta=-1, alpha=scale, out=lo)
    scores.copy_(hi).add_(lo)
    if mask is not None:
        masked = scores.view(-1, mask.shape[0], *shape[1:])[..., shape[2] - mask.shape[2] :]
        masked.add_(mask)
    top = scores.amax(-1) if with_lse else None
    torch.softmax(scores, -1, out=scores)
    lse = None if top is None else top.sub_(scores.amax(-1).log_())  # the largest weight is exp(top - lse)
    weights = hi.copy_(scores)
    return torch.bmm(weights, v), lse


def _attend_batch(kv: KVCache, layer: int, q: torch.Tensor, batch: Batch, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    config = kv.config
    groups, group, dim, queries = config.num_kv_heads, config.group, config.head_dim, batch.queries
    keys = kv.scratch("keys", 2 * groups, batch.slots.numel(), dim)
    torch.index_select(kv.data[layer].flatten(0, 1), 1, batch.slots, out=keys)
    k, v = keys.view(2, groups, -1, batch.num_keys, dim).unbind(0)
    rows = q[batch.tokens].view(-1, queries, groups, group, dim).permute(2, 0, 1, 3, 4).reshape(groups, -1, queries * group, dim)
    part_lse: torch.Tensor | None
    if uses_gemm(config.dtype):
        part, part_lse = _gemm(kv, rows.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), batch.mask, lse is not None)
    else:
        part, part_lse = _flash(rows, k, v, batch.mask if batch.mask is None else batch.mask[None].to(q.dtype))
    part = part.reshape(groups, -1, queries, group, dim).permute(1, 2, 0, 3, 4)
    out.index_copy_(0, batch.targets, part.reshape(-1, groups * group, dim))
    if lse is not None and part_lse is not None:
        part_lse = part_lse.reshape(groups, -1, queries, group).permute(1, 2, 0, 3)
        lse.index_copy_(0, batch.targets, part_lse.reshape(-1, groups * group))


def _attend_direct(
    kv: KVCache, layer: int, q: torch.Tensor, packed: torch.Tensor, part: Direct, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    config, keys, start, count = kv.config, part.keys, part.start, part.count
    groups, group, dim = config.num_kv_heads, config.group, config.head_dim
    pool = kv.data[layer]
    if keys.index is None:
        segment = pool[:, :, keys.first : keys.first + keys.count]
    else:
        segment = kv.scratch("keys", 2 * groups, keys.count, dim)
        torch.index_select(pool.flatten(0, 1), 1, keys.index[: keys.count], out=segment)
        segment = segment.view(2, groups, keys.count, dim)
    k, v = segment.unbind(0)
    base = part.level * len(q) + start
    target = out[base : base + count].view(count, groups, group, dim)
    target_lse = None if lse is None else lse[base : base + count].view(count, groups, group)
    query = packed[:, start * group : (start + count) * group]
    if part.gemm:
        _attend_blocks(kv, query, k, v, part.causal, target, target_lse)
        return
    if part.causal:  # packed rows of a token would need one mask row each: heads apart, keys repeated by stride 0
        heads = query.view(groups, count, group, dim).transpose(1, 2)
        shape = (groups, group, count, dim)
        part_out, part_lse = _flash(heads, k[:, None].expand(shape), v[:, None].expand(shape), is_causal=True)
        part_out, part_lse = part_out.permute(2, 0, 1, 3), part_lse.permute(2, 0, 1)
    else:
        part_out, part_lse = _flash(query[None], k[None], v[None])
        part_out = part_out.reshape(groups, count, group, dim).transpose(0, 1)
        part_lse = part_lse.reshape(groups, count, group).transpose(0, 1)
    target.copy_(part_out)
    if target_lse is not None:
        target_lse.copy_(part_lse)


@functools.cache
def _diagonal_mask(queries: int, group: int) -> torch.Tensor:
    """[1, queries * group, queries]: query i sees its own key and those before."""
    mask = torch.full((queries, queries), -torch.inf).triu_(1)
    return mask.repeat_interleave(group, dim=0)[None]


def _attend_blocks(
    kv: KVCache,
    query: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    target: torch.Tensor,
    target_lse: torch.Tensor | None,
) -> None:
    """Blocks of packed query rows [kv heads, rows, dim] on keys [kv heads, keys, dim] by matrix products."""
    groups, keys = k.shape[0], k.shape[1]
    count, _, group, dim = target.shape
    rows = max(BLOCK_ROWS // 8, min(BLOCK_ROWS, BLOCK_SCORES // keys))
    block = max(1, rows // group)
    heads = max(1, min(groups, BLOCK_SCORES // (block * group * keys)))
    for low in range(0, count, block):
        size = min(block, count - low)
        seen = keys - count + low + size if causal else keys
        mask = _diagonal_mask(size, group) if causal else None
        for head in range(0, groups, heads):
            at = slice(head, head + heads)
            part, lse = _gemm(
                kv, query[at, low * group : (low + size) * group], k[at, :seen], v[at, :seen], mask, target_lse is not None
            )
            target[low : low + size, at].copy_(part.view(-1, size, group, dim).transpose(0, 1))
            if target_lse is not None and lse is not None:
                target_lse[low : low + size, at].copy_(lse.view(-1, size, group).transpose(0, 1))


def _merge(out: torch.Tensor, lse: torch.Tensor, levels: int, tokens: int) -> torch.Tensor:
    """Merge the partial results of all levels: [levels * tokens + 1, heads, dim] -> [tokens, heads, dim]."""
    rows = levels * tokens
    partial = out[:rows].view(levels, tokens, *out.shape[1:])
    weights = lse[:rows].view(levels, tokens, -1)
    # The clamps only bite where every level is absent: -inf - -inf and 0 / 0 would be NaN. A NaN passes through them.
    weights = (weights - weights.amax(0).clamp_min_(torch.finfo(torch.float32).min)).exp_()
    weights /= weights.sum(0).clamp_min_(1.0)
    merged = partial[0] * weights[0, :, :, None]
    for level in range(1, levels):
        merged.addcmul_(partial[level], weights[level, :, :, None])
    return merged.to(out.dtype)
