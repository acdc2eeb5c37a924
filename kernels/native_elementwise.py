"""Norms, gates and the gathering of rows by the compiled kernel: each one pass over memory, for bfloat16 on the CPU."""

import torch

from batchrun.kernels.native import Native


def suits(*tensors: torch.Tensor) -> bool:
    """Whether the kernel computes these: the choice depends on nothing that differs between batches."""
    return all(t.dtype == torch.bfloat16 and t.is_cpu for t in tensors)


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """[..., width] as [rows, width] with dense rows."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def rms_norm(native: Native, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The contract is in `cpu.rms_norm`."""
    width = x.shape[-1]
    assert weight.shape == (width,), f"weight is {tuple(weight.shape)}: expected {(width,)}"
    rows, weight, out = _as_rows(x), weight.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    native.library.batchrun_rms_norm(
        *(rows.data_ptr(), rows.stride(0)),
        *(None, 0),
        *(weight.data_ptr(), eps),
        *(None, out.data_ptr(), len(rows), width, torch.get_num_threads()),
    )
    return out


def rms_norm_residual(
    native: Native, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract is in `cpu.rms_norm_residual`."""
    width = x.shape[-1]
    assert x.shape == residual.shape, f"x is {tuple(x.shape)}, residual {tuple(residual.shape)}"
    assert weight.shape == (width,), f"weight is {tuple(weight.shape)}: expected {(width,)}"
    rows, other, weight = _as_rows(x), _as_rows(residual), weight.contiguous()
    total, out = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape, dtype=x.dtype)
    native.library.batchrun_rms_norm(
        *(rows.data_ptr(), rows.stride(0)),
        *(other.data_ptr(), other.stride(0)),
        *(weight.data_ptr(), eps),
        *(total.data_ptr(), out.data_ptr(), len(rows), width, torch.get_num_threads()),
    )
    return out, total


def silu_mul(native: Native, gate_up: torch.Tensor) -> torch.Tensor:
    """The contract is in `cpu.silu_mul`."""
    width, odd = divmod(gate_up.shape[-1], 2)
    assert not odd, f"gate_up is {tuple(gate_up.shape)}: the last dimension must be even"
    rows, out = _as_rows(gate_up), torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype)
    native.library.batchrun_silu_mul(
        *(rows.data_ptr(), rows.stride(0)), *(out.data_ptr(), len(rows), width), torch.get_num_threads()
    )
    return out


def gather(native: Native, table: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """The contract is in `ops.gather`."""
    table, which = table.contiguous(), which.contiguous()
    out = torch.empty((len(which), table.shape[1]), dtype=table.dtype)
    bad = native.library.batchrun_gather(
        *(table.data_ptr(), table.shape[1] * table.element_size(), len(table)),
        *(which.data_ptr(), len(which), out.data_ptr(), torch.get_num_threads()),
    )
    if bad >= 0:
        raise IndexError(f"row {int(which[bad])} of a table of {len(table)}")
    return out
