"""Choosing tokens by the compiled kernel: one pass over a row's bfloat16 logits for the best, one more for a draw."""

import torch

from batchrun.kernels.native import Native
from batchrun.kernels.sampling import weight_scale
from batchrun.kernels.spec import Draws


def best(native: Native, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract is in `ops.best`."""
    rows, width = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    place, finite = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.bool)
    native.library.batchrun_best(
        *(logits.data_ptr(), logits.stride(0), rows, width),
        *(place.data_ptr(), finite.data_ptr(), torch.get_num_threads()),
    )
    return place, finite


def draw(native: Native, logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """The contract is in `ops.draw`."""
    rows, width = logits.shape
    which, place = draws.which.contiguous(), draws.place.contiguous()
    assert which.dtype == place.dtype == torch.int64, f"rows are {which.dtype}, places {place.dtype}: expected int64"
    assert not len(which) or 0 <= int(which.min()) <= int(which.max()) < rows, f"rows {which.tolist()} of {rows}"
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    scale = weight_scale(width)
    temperature, uniform = draws.temperature.float().contiguous(), draws.uniform.double().contiguous()
    least = (draws.min_p.float() * scale).contiguous()
    token = torch.empty(len(which), dtype=torch.int64)
    native.library.batchrun_draw(
        *(logits.data_ptr(), logits.stride(0), width),
        *(which.data_ptr(), place.data_ptr(), temperature.data_ptr(), least.data_ptr(), uniform.data_ptr()),
        *(scale, len(which), token.data_ptr(), torch.get_num_threads()),
    )
    return token
