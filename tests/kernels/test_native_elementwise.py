"""The compiled kernel's norms, gates and rotary embedding, against torch's operations, bit by bit where they round alike."""

import math
from collections.abc import Callable

import pytest
import torch

from batchrun.kernels import cpu, native_pool, ops
from batchrun.kernels.ops import KVConfig
from batchrun.kernels.targets import processor, runnable

ROWS = (1, 15, 17, 111)
WIDTHS = (1, 31, 64, 576, 1536)
GUARD = 64
EPS = 1e-5

Operation = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(params=[target.name for target in runnable(processor())], autouse=True)
def native_on_one_thread(request: pytest.FixtureRequest, compute_with: Callable[[str], None], one_thread: None) -> None:
    compute_with(request.param)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return (2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16).int()


def assert_rounded_alike(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Sums in another order move few results, and those to a neighbour."""
    apart = (bits(ours) - bits(theirs)).abs()
    assert int(apart.max()) <= 1
    assert int((apart > 0).sum()) <= 1 + ours.numel() // 10000


class GuardedEmpty:
    """Stands in for `torch.empty`: memory full of NaN between guards, so that what is left out or written beside shows."""

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []

    def __call__(self, *shape: int | torch.Size, dtype: torch.dtype) -> torch.Tensor:
        sizes = torch.Size(shape[0]) if not isinstance(shape[0], int) else torch.Size(shape)  # type: ignore[arg-type]
        buffer = torch.full((math.prod(sizes) + 2 * GUARD,), torch.nan, dtype=dtype)
        buffer[:GUARD] = buffer[-GUARD:] = 7
        self.buffers.append(buffer)
        return buffer[GUARD:-GUARD].view(sizes)

    def check(self, count: int) -> None:
        assert len(self.buffers) == count
        for buffer in self.buffers:
            assert bool((buffer[:GUARD] == 7).all() & (buffer[-GUARD:] == 7).all())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
def test_norms_and_gates_round_as_torch_does_and_fill_their_output_only(
    rows: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, residual, weight = draw(rows, width), draw(rows, width, seed=1), draw(width, seed=2)
    gate_up = draw(rows, 2 * width, seed=3)
    empty = GuardedEmpty()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        plain = ops.rms_norm(x, weight, EPS)
        normed, total = ops.rms_norm_residual(x, residual, weight, EPS)
        gated = ops.silu_mul(gate_up)
    empty.check(4)
    expected, expected_total = cpu.rms_norm_residual(x, residual, weight, EPS)
    assert torch.equal(total, expected_total)
    assert_rounded_alike(normed, expected)
    assert_rounded_alike(plain, cpu.rms_norm(x, weight, EPS))
    assert_rounded_alike(gated, cpu.silu_mul(gate_up))


def test_every_gate_comes_out_as_torch_computes_it() -> None:
    gates = torch.arange(-(1 << 15), 1 << 15).short().view(torch.bfloat16)
    for factor in (1.0, -3.140625):
        gate_up = torch.stack((gates, torch.full_like(gates, factor)), dim=1)
        ours, theirs = ops.silu_mul(gate_up), cpu.silu_mul(gate_up)
        tiny = torch.finfo(torch.bfloat16).tiny  # below it, the kernel's results are 0
        torch.testing.assert_close(ours, theirs, rtol=0, atol=4 * tiny, equal_nan=True)
        assert_rounded_alike(ours[theirs.abs() > 4 * tiny], theirs[theirs.abs() > 4 * tiny])


OPERATIONS: dict[str, Operation] = {
    "rms_norm": lambda x: ops.rms_norm(x, draw(x.shape[-1], seed=5), EPS),
    "rms_norm_residual": lambda x: torch.cat(ops.rms_norm_residual(x, x.flip(-1), draw(x.shape[-1], seed=5), EPS), dim=-1),
    "residual is strided": lambda x: ops.rms_norm_residual(x.contiguous(), x, draw(x.shape[-1], seed=5), EPS)[0],
    "silu_mul": ops.silu_mul,
}
each_operation = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=list(OPERATIONS))


@each_operation
def test_strided_inputs_give_the_same_bits_as_dense_ones(operation: Operation) -> None:
    wide = draw(34, 3 * 64 + 5)
    strided = {
        "columns": wide[:, 7 : 7 + 64],
        "rows": wide[::2, :64],
        "last dimension": wide[:, :128:2],
        "transposed": wide[:, :64].t(),
        "more dimensions": wide[:, :128].view(2, 17, 128)[:, 3:11],
    }
    for name, x in strided.items():
        assert torch.equal(operation(x), operation(x.clone(memory_format=torch.contiguous_format))), name
        assert operation(x).shape[:-1] == x.shape[:-1], name


@each_operation
def test_a_row_of_nan_stays_alone(operation: Operation) -> None:
    x = draw(17, 576)
    clean = operation(x)
    x[3], x[11, 500] = torch.nan, torch.inf
    out = operation(x)
    rest = [i for i in range(17) if i not in (3, 11)]
    assert bool(out[3].isnan().all())
    assert torch.equal(out[rest], clean[rest])


@each_operation
def test_a_row_has_the_same_bits_alone_and_on_any_number_of_threads(operation: Operation) -> None:
    x = draw(500, 576)
    alone = torch.cat([operation(x[i : i + 1]) for i in range(500)])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(operation(x), alone)


def test_other_dtypes_are_left_to_torch() -> None:
    x, weight = draw(3, 64), draw(64)
    for other in (x.float(), x.half()):
        assert torch.equal(ops.rms_norm(other, weight.to(other.dtype), EPS), cpu.rms_norm(other, weight.to(other.dtype), EPS))
        assert torch.equal(ops.silu_mul(other), cpu.silu_mul(other))


def make_pool(heads: tuple[int, int], dim: int) -> native_pool.NativeKVCache:
    kv = ops.allocate_kv(KVConfig(2, *heads, dim, torch.bfloat16), 10)
    assert isinstance(kv, native_pool.NativeKVCache)
    kv.data.copy_(draw(*kv.data.shape, seed=1))
    return kv


def angles(rows: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    frequency = 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    angle = 37 * torch.arange(rows)[:, None] * torch.cat((frequency, frequency))
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("heads", "dim"), [((9, 3), 64), ((4, 4), 48), ((14, 2), 80), ((3, 1), 16), ((2, 2), 256)])
def test_turning_and_writing_at_once_equals_one_after_the_other(
    heads: tuple[int, int], dim: int, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused, composed = make_pool(heads, dim), make_pool(heads, dim)
    width = heads[0] + 2 * heads[1]
    qkv = draw(rows, width + 2, dim)[:, 1:-1]
    cos, sin = (t.to(dtype) for t in angles(rows, dim))
    slots = torch.randperm(160, generator=torch.Generator().manual_seed(2))[:rows]
    before = [t.clone() for t in (qkv, cos, sin, slots)]
    empty = GuardedEmpty()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        q = ops.rotate_and_write(fused, 1, qkv, cos, sin, slots)
    empty.check(1 if dtype == torch.bfloat16 else 0)
    expected_q, k = cpu.rotary(qkv[:, : heads[0]], qkv[:, heads[0] : sum(heads)], cos, sin)
    ops.write_kv(composed, 1, k, qkv[:, sum(heads) :], slots)
    assert torch.equal(q, expected_q)
    assert torch.equal(bits(fused.data), bits(composed.data))
    assert all(torch.equal(t, copy) for t, copy in zip((qkv, cos, sin, slots), before, strict=True))


def test_turning_halves_apart_uses_each_halves_angles() -> None:
    """Models' tables have both halves alike; the contract does not say so."""
    kv = make_pool((3, 1), 64)
    qkv, cos, sin = draw(17, 5, 64), draw(17, 64, seed=1), draw(17, 64, seed=2)
    q = ops.rotate_and_write(kv, 0, qkv, cos, sin, torch.arange(17))
    assert torch.equal(q, cpu.rotary(qkv[:, :3], qkv[:, 3:4], cos, sin)[0])


@pytest.mark.parametrize("layout", ["heads apart", "dims apart"])
def test_turning_takes_any_strides(layout: str) -> None:
    wide = draw(17, 10, 128)
    qkv = wide[:, ::2, :64] if layout == "heads apart" else wide[:, :5, ::2]
    cos, sin = (t.bfloat16().repeat(1, 2)[:, :64] for t in angles(17, 64))
    dense, strided = make_pool((3, 1), 64), make_pool((3, 1), 64)
    expected = ops.rotate_and_write(dense, 0, qkv.contiguous(), cos.contiguous(), sin.contiguous(), torch.arange(17))
    out = ops.rotate_and_write(strided, 0, qkv, cos, sin, torch.arange(17).repeat_interleave(2)[::2])
    assert torch.equal(out, expected)
    assert torch.equal(bits(strided.data), bits(dense.data))


def test_turning_gives_the_same_bits_on_any_number_of_threads_and_keeps_nan_in_its_row() -> None:
    qkv, slots = draw(150, 15, 64), torch.arange(150).flip(0)
    cos, sin = (t.bfloat16() for t in angles(150, 64))
    reference_pool = make_pool((9, 3), 64)
    expected = ops.rotate_and_write(reference_pool, 0, qkv, cos, sin, slots)
    for threads in (2, 3) * 5:
        torch.set_num_threads(threads)
        kv = make_pool((9, 3), 64)
        assert torch.equal(ops.rotate_and_write(kv, 0, qkv, cos, sin, slots), expected)
        assert torch.equal(bits(kv.data), bits(reference_pool.data))
    qkv[7] = torch.nan
    out = ops.rotate_and_write(kv, 0, qkv, cos, sin, slots)
    rest = [i for i in range(150) if i != 7]
    assert bool(out[7].isnan().all())
    assert torch.equal(out[rest], expected[rest])
    differs = bits(kv.data) != bits(reference_pool.data)
    assert int(differs.sum()) == 2 * 3 * 64
    assert bool(kv.data[differs].isnan().all())


@pytest.mark.parametrize("slot", [-1, 160])
def test_turning_into_a_slot_outside_the_pool_is_refused_and_nothing_is_written(slot: int) -> None:
    kv = make_pool((3, 1), 64)
    before = kv.data.clone()
    cos, sin = (t.bfloat16() for t in angles(2, 64))
    with pytest.raises(IndexError, match=f"slot {slot} at position 1: the pool has 160 slots"):
        ops.rotate_and_write(kv, 0, draw(2, 5, 64), cos, sin, torch.tensor([3, slot]))
    assert torch.equal(bits(kv.data), bits(before))
