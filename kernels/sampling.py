"""Choosing tokens from logits in torch operations, and the arithmetic of whole-number weights that sampling is made of.

Weights are rounded to whole numbers, at most 2^53 in all, so that every sum of them is exact in float64 and thus the same for
any batch, number of threads or order of summation.
"""

import torch

from batchrun.kernels.spec import Draws

_BLOCK = 64
"""Width of the first level of the search in the cumulative weights."""


def weight_scale(vocab_size: int) -> float:
    """The weight of a row's most likely token: as much as leaves the sum of `vocab_size` of them at most 2^53."""
    return float(2.0 ** (53 - (vocab_size - 1).bit_length()))


def whole_weights(scores: torch.Tensor, scale: float) -> torch.Tensor:
    """round(scale * e^score), in place; scores float32 <= 0, 0 for the most likely token."""
    return scores.exp_().mul_(scale).round_()


def best(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract is in `ops.best`."""
    place = logits.argmax(dim=-1)
    # argmax takes NaN for the largest, so the value there tells all three kinds of bad row.
    return place, logits.gather(1, place[:, None]).isfinite().flatten()


def draw(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """The contract is in `ops.draw`."""
    scores = logits[draws.which].float()
    scale = weight_scale(scores.shape[1])
    # The maximum is taken off before the division, so that no temperature can overflow.
    scores.sub_(scores.gather(1, draws.place[:, None])).div_(draws.temperature[:, None])
    weights = whole_weights(scores, scale)
    weights.masked_fill_(weights < (draws.min_p * scale)[:, None], 0.0)
    return invert(weights, draws.uniform)


def block_sums(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [N, W] in blocks of 64 [N, B, 64], the last one filled up with zeros; running sums of blocks, float64 [N, B]."""
    rows, width = weights.shape
    if width % _BLOCK:
        weights = torch.nn.functional.pad(weights, (0, _BLOCK - width % _BLOCK))
    blocks = weights.view(rows, -1, _BLOCK)
    return blocks, blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)


def invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """int64 [N]: where `uniform`, float64 [N], of the mass of whole-number weights, float32 [N, W], lies."""
    # Two levels, since a running sum over the whole vocabulary costs many times the sums of blocks.
    blocks, bounds = block_sums(weights)
    # Never the total itself: the largest uniform number is 1 - 2^-53, and that times any float64 rounds to less than it.
    target = (uniform[:, None] * bounds[:, -1:]).floor()
    block = torch.searchsorted(bounds, target, right=True)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK)).squeeze(1).cumsum(dim=-1, dtype=torch.float64)
    before = torch.where(block > 0, bounds.gather(1, (block - 1).clamp(min=0)), 0.0)
    offset = torch.searchsorted(inside, target - before, right=True)
    return (block * _BLOCK + offset).flatten()
