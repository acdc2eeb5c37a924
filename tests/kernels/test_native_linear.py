"""The compiled kernel's linear layers, against float64 sums and bit by bit against themselves."""

from collections.abc import Callable

import pytest
import torch

from batchrun.kernels import native_linear, ops
from batchrun.kernels.targets import processor, runnable

SHAPES = [(1, 2), (10, 100), (63, 576), (64, 64), (65, 30), (960, 576), (576, 1536), (200, 6000)]
"""(outputs, inputs): fewer and more than a panel, parts of a panel, long sums."""
ROWS = (1, 5, 6, 7, 23, 64, 300)
"""Less than a tile, one, several, and more than a chunk of rows."""


WAYS = [("native", 1), ("native", 3), *((target.name, 2) for target in runnable(processor()))]
"""(kernel, threads)"""


@pytest.fixture(params=WAYS, ids=str, autouse=True)
def threads(request: pytest.FixtureRequest, compute_with: Callable[[str], None], threads_as_before: None) -> int:
    choice, count = request.param
    compute_with(choice)
    torch.set_num_threads(count)
    return int(count)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def packed(weight: torch.Tensor) -> native_linear.NativeLinear:
    result = ops.pack_linear(weight)
    assert isinstance(result, native_linear.NativeLinear)
    return result


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_each_output_is_its_float32_sum_rounded(outputs: int, inputs: int, rows: int) -> None:
    x, weight = draw(rows, inputs), draw(outputs, inputs, seed=1)
    exact = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    out = ops.linear(x, packed(weight))
    assert out.dtype == torch.bfloat16
    assert out.shape == (rows, outputs)
    # Half a unit in the last place of the result, and float32 rounding of every addition.
    assert bool(((out.double() - exact).abs() <= 2.0**-8 * exact.abs() + 2.0**-24 * inputs * size).all())


@pytest.mark.parametrize(("outputs", "inputs"), [(960, 576), (65, 30)])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(outputs: int, inputs: int) -> None:
    x, weight = draw(300, inputs), packed(draw(outputs, inputs, seed=1))
    together = ops.linear(x, weight)
    for low, high in ((0, 1), (7, 8), (0, 5), (100, 177), (299, 300), (1, 300)):
        assert torch.equal(ops.linear(x[low:high], weight), together[low:high])


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 2), (31, 30), (32, 64), (33, 64), (1536, 576)])
@pytest.mark.parametrize("rows", [1, 6, 70])
def test_the_gated_layer_is_the_gate_of_the_plain_one_bit_by_bit(outputs: int, inputs: int, rows: int) -> None:
    x, gate_up = draw(rows, inputs), draw(2 * outputs, inputs, seed=1)
    x[0, 0] = 60.0  # a gate that silu takes far out
    expected = ops.silu_mul(ops.linear(x, packed(gate_up)))
    assert torch.equal(ops.gated_linear(x, ops.pack_gated_linear(gate_up)), expected)


def test_rows_may_lie_apart_and_have_any_leading_dimensions() -> None:
    weight = packed(draw(70, 64, seed=1))
    wide = draw(10, 3, 200)
    expected = ops.linear(wide[:, :, 8:72].contiguous(), weight)
    assert torch.equal(ops.linear(wide[:, :, 8:72], weight), expected)
    assert torch.equal(ops.linear(wide[:, 1, 8:72], weight), expected[:, 1])
    across = draw(64, 10)
    assert torch.equal(ops.linear(across.T, weight), ops.linear(across.T.contiguous(), weight))
    assert ops.linear(wide[:0, :, :64], weight).shape == (0, 3, 70)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_row_spoils_no_other(bad: float) -> None:
    x, weight = draw(20, 64), packed(draw(70, 64, seed=1))
    expected = ops.linear(x, weight)
    x[7, 3] = bad
    out = ops.linear(x, weight)
    others = [row for row in range(20) if row != 7]
    assert torch.equal(out[others], expected[others])
    assert not bool(out[7].isfinite().any())


def test_nothing_outside_the_output_is_written() -> None:
    # The output is torch's own memory: a canary behind it is a canary in the same storage.
    x, weight = draw(13, 64), packed(draw(70, 64, seed=1))
    storage = torch.full((13 * 70 + 512,), 7.0, dtype=torch.bfloat16)
    arguments = native_linear._Arguments(
        x.data_ptr(), 64, 13, 64, weight.panels.data_ptr(), storage[256:].data_ptr(), 70, 0, torch.get_num_threads()
    )
    weight.native.library.batchrun_linear(native_linear.ctypes.byref(arguments))
    assert torch.equal(storage[256 : 256 + 13 * 70].view(13, 70), ops.linear(x, weight))
    assert bool((storage[:256] == 7.0).all())
    assert bool((storage[256 + 13 * 70 :] == 7.0).all())


def test_what_the_kernel_does_not_take_goes_to_torch(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_choice", "auto")
    odd = draw(8, 63)
    assert not isinstance(ops.pack_linear(odd), native_linear.NativeLinear)
    x = draw(4, 63)
    torch.testing.assert_close(ops.linear(x, ops.pack_linear(odd)), torch.nn.functional.linear(x, odd))
    gate_up = draw(16, 63)
    expected = ops.silu_mul(torch.nn.functional.linear(x, gate_up))
    torch.testing.assert_close(ops.gated_linear(x, ops.pack_gated_linear(gate_up)), expected)


def test_a_wrong_width_or_dtype_is_refused() -> None:
    weight = packed(draw(70, 64))
    with pytest.raises(AssertionError, match="expected"):
        ops.linear(draw(3, 62), weight)
    with pytest.raises(AssertionError, match="expected bfloat16"):
        ops.linear(draw(3, 64).float(), weight)
