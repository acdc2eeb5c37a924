"""Linear layers by the compiled kernel, for bfloat16 on the CPU; the weights' layout is in csrc/linear.c."""

import ctypes
from dataclasses import dataclass

import torch
from torch.nn import functional

from batchrun.kernels.native import Native

PANEL = 64


class _Arguments(ctypes.Structure):
    """`Linear` of csrc/linear.c."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("x_row", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("panels", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("gated", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    ]


@dataclass(frozen=True)
class NativeLinear:
    """A weight in panels."""

    native: Native
    panels: torch.Tensor
    """[panels, inputs / 2, 64, 2]"""
    outputs: int
    gated: bool
    """A panel has 32 outputs of the gate, then the same 32 of the other half; `outputs` counts the gate's alone."""


def suits(weight: torch.Tensor) -> bool:
    """Whether the kernel computes with this weight [out, in]."""
    return weight.dtype == torch.bfloat16 and weight.is_cpu and weight.shape[1] % 2 == 0 and weight.numel() > 0


def pack(native: Native, weight: torch.Tensor) -> NativeLinear:
    """From weight [out, in]. It is copied: drop the original."""
    outputs = weight.shape[0]
    return NativeLinear(native, _panels(native, _pad_rows(weight, PANEL)), outputs, gated=False)


def pack_gated(native: Native, gate_up: torch.Tensor) -> NativeLinear:
    """From gate_up [2 * I, in], the gate's rows first. It is copied: drop the original."""
    outputs, inputs = gate_up.shape[0] // 2, gate_up.shape[1]
    halves = [_pad_rows(half, PANEL // 2).view(-1, PANEL // 2, inputs) for half in (gate_up[:outputs], gate_up[outputs:])]
    return NativeLinear(native, _panels(native, torch.stack(halves, dim=1).view(-1, inputs)), outputs, gated=True)


def _pad_rows(weight: torch.Tensor, multiple: int) -> torch.Tensor:
    return functional.pad(weight, (0, 0, 0, -len(weight) % multiple))


def _panels(native: Native, weight: torch.Tensor) -> torch.Tensor:
    ordered = weight.view(-1, PANEL, weight.shape[1] // 2, 2).permute(0, 2, 1, 3)
    return native.arena.empty(ordered.shape, ordered.dtype).copy_(ordered)


def linear(x: torch.Tensor, weight: NativeLinear) -> torch.Tensor:
    """x [..., in] -> [..., outputs]; the contracts are in `ops.linear` and `ops.gated_linear`."""
    inputs = 2 * weight.panels.shape[1]
    assert x.shape[-1] == inputs, f"x is {tuple(x.shape)}: expected [..., {inputs}]"
    assert x.dtype == torch.bfloat16, f"x is {x.dtype}: expected bfloat16"
    rows = x if x.dim() == 2 else x.reshape(-1, inputs)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = torch.empty((*x.shape[:-1], weight.outputs), dtype=x.dtype)
    arguments = _Arguments(
        *(rows.data_ptr(), rows.stride(0), len(rows), inputs, weight.panels.data_ptr()),
        *(out.data_ptr(), weight.outputs, weight.gated, torch.get_num_threads()),
    )
    weight.native.library.batchrun_linear(ctypes.byref(arguments))
    return out
