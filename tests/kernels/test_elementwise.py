"""Norms, rotary embedding, gates and linear layers against the reference and against transformers' Llama modules."""

import os
import platform
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from batchrun.kernels import cpu, ops, reference
from batchrun.kernels.targets import processor, runnable

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = (1, 15, 17, 111)
TOLERANCE = {torch.float32: (1e-6, 1e-6), torch.bfloat16: (8e-3, 1.6e-2), torch.float16: (1e-3, 2e-3)}


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def angles(rows: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    frequency = 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    angle = torch.arange(rows)[:, None] * torch.cat((frequency, frequency))
    return angle.cos(), angle.sin()


def assert_close(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert out.dtype == dtype
    atol, rtol = TOLERANCE[dtype]
    torch.testing.assert_close(out.float(), expected, atol=atol, rtol=rtol)


WAYS = [(dtype, "torch") for dtype in DTYPES] + [(torch.bfloat16, target.name) for target in runnable(processor())]


@pytest.mark.parametrize(("dtype", "choice"), WAYS)
@pytest.mark.parametrize("rows", ROWS)
def test_operations_match_the_reference_and_leave_their_arguments(
    dtype: torch.dtype, choice: str, rows: int, compute_with: Callable[[str], None]
) -> None:
    compute_with(choice)
    x, weight = draw(rows, 576, dtype=dtype), draw(576, dtype=dtype, seed=1)
    residual = draw(rows, 576, dtype=dtype, seed=2)
    qkv = draw(rows, 15, 64, dtype=dtype, seed=3)
    q, k = qkv[:, :9], qkv[:, 9:12]
    gate_up = draw(rows, 3072, dtype=dtype, seed=4)
    cos, sin = angles(rows, 64)
    before = [t.clone() for t in (x, weight, residual, qkv, gate_up, cos, sin)]

    assert_close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), dtype)
    normed, total = ops.rms_norm_residual(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert_close(normed, reference.rms_norm(total, weight, 1e-5), dtype)
    for turned, original in zip(ops.rotary(q, k, cos, sin), (q, k), strict=True):
        assert_close(turned, reference.rotary(original, cos, sin), dtype)
    assert_close(ops.silu_mul(gate_up), reference.silu_mul(gate_up), dtype)

    for tensor, copy in zip((x, weight, residual, qkv, gate_up, cos, sin), before, strict=True):
        assert torch.equal(tensor, copy)


@pytest.mark.parametrize(("dtype", "choice"), WAYS)
def test_turned_queries_keys_and_values_match_the_reference_through_attention(
    dtype: torch.dtype, choice: str, compute_with: Callable[[str], None]
) -> None:
    compute_with(choice)
    qkv, slots = draw(111, 15, 64, dtype=dtype), torch.randperm(128, generator=torch.Generator().manual_seed(1))[:111]
    cos, sin = (t.to(dtype) for t in angles(111, 64))
    kv = ops.allocate_kv(ops.KVConfig(2, 9, 3, 64, dtype), 8)
    before = qkv.clone()
    q = ops.rotate_and_write(kv, 1, qkv, cos, sin, slots)
    assert torch.equal(qkv, before)
    expected_q, k = (reference.rotary(x, cos, sin) for x in (qkv[:, :9], qkv[:, 9:12]))
    assert_close(q, expected_q, dtype)
    item = ops.AttentionItem(0, 111, [(slot, 1) for slot in slots.tolist()], 111, True)
    out = ops.attend(kv, 1, q, ops.build_plan(kv, [item], 111))
    in_order = ops.AttentionItem(0, 111, [(0, 111)], 111, True)
    atol = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(out.float(), reference.attend(expected_q, k, qkv[:, 12:], [in_order]), atol=atol, rtol=1e-2)


def test_float32_equals_transformers_llama_modules() -> None:
    from transformers.models.llama import modeling_llama

    x, weight = draw(33, 576), draw(576, seed=1)
    norm = modeling_llama.LlamaRMSNorm(576, 1e-5)
    norm.weight.data.copy_(weight)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), norm(x).detach(), atol=1e-6, rtol=5e-7)
    q, k = draw(33, 9, 64, seed=2), draw(33, 3, 64, seed=3)
    cos, sin = angles(33, 64)
    theirs = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    for ours, expected in zip(ops.rotary(q, k, cos, sin), theirs, strict=True):
        assert torch.equal(ours, expected)
    gate_up = draw(33, 3072, seed=4)
    assert torch.equal(ops.silu_mul(gate_up), functional.silu(gate_up[:, :1536]) * gate_up[:, 1536:])


def test_rotary_takes_angles_in_the_models_dtype() -> None:
    from transformers.models.llama import modeling_llama

    q, k = draw(17, 9, 64, dtype=torch.bfloat16), draw(17, 3, 64, dtype=torch.bfloat16, seed=1)
    cos, sin = (t.bfloat16() for t in angles(17, 64))
    theirs = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    for ours, expected in zip(ops.rotary(q, k, cos, sin), theirs, strict=True):
        torch.testing.assert_close(ours, expected, atol=1.6e-2, rtol=1.6e-2)


@pytest.mark.parametrize(("dtype", "choice"), WAYS)
def test_packed_linear_matches_the_reference(dtype: torch.dtype, choice: str, compute_with: Callable[[str], None]) -> None:
    compute_with(choice)
    weight = draw(960, 576, dtype=dtype) * 0.05
    packed = ops.pack_linear(weight)
    for rows in ROWS:
        x = draw(rows, 576, dtype=dtype, seed=rows)
        out = ops.linear(x, packed)
        assert torch.equal(out, ops.linear(x, packed)), "the same input gives the same bits"
        torch.testing.assert_close(out, functional.linear(x, weight), atol=0 if dtype == torch.float32 else 1e-2, rtol=1e-2)
        atol = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(out.float(), reference.linear(x, weight), atol=atol, rtol=1e-2)


def test_without_the_kernel_only_bfloat16_is_packed_and_only_where_torch_can(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = draw(8, 16)
    assert ops.pack_linear(weight) is weight
    half = weight.bfloat16()
    monkeypatch.setattr(ops, "_choice", "torch")
    monkeypatch.setattr(cpu, "can_pack", lambda: True)
    packed = ops.pack_linear(half)
    assert isinstance(packed, cpu.PackedLinear)
    assert packed.shape == (8, 16)
    monkeypatch.setattr(cpu, "can_pack", lambda: False)
    assert ops.pack_linear(half) is half


def test_this_torch_has_the_packing_operations() -> None:
    """They are private: a torch that drops them would silently run slower."""
    assert cpu.can_pack()


PACK = """
import torch
from batchrun.kernels import ops
ops._choice = "torch"
weight, x = torch.randn(8, 16).bfloat16(), torch.randn(3, 16).bfloat16()
packed = ops.pack_linear(weight)
assert packed is weight, "this processor is not restricted"
torch.testing.assert_close(ops.linear(x, packed).float(), x.float() @ weight.float().T, atol=2e-2, rtol=1e-2)
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="ONEDNN_MAX_CPU_ISA takes away instructions of x86-64 alone")
def test_where_onednn_has_no_bfloat16_the_weight_stays_as_it_is() -> None:
    # As on processors without AVX-512, where torch's packing raises.
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", PACK], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
