"""Keys and values in int8: what the pool holds, and that nothing outside an item's keys is read. Attention: test_attention.py."""

import pytest
import torch

from batchrun.kernels import cpu, native, native_plan, native_pool, ops, reference
from batchrun.kernels.ops import AttentionItem, KVConfig
from batchrun.kernels.targets import processor, runnable

PAGE = ops.page_size("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")
each_target = pytest.mark.parametrize("target", runnable(processor()), ids=lambda target: target.name, indirect=True)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def make_pool(heads: tuple[int, int] = (6, 2), dim: int = 64, pages: int = 4, layers: int = 1) -> native_pool.NativeKVCache:
    """Full of bytes of -1, which are scales of NaN too."""
    kv = ops.allocate_kv(KVConfig(layers, *heads, dim, torch.bfloat16, kv_dtype=torch.int8), pages)
    assert isinstance(kv, native_pool.NativeKVCache)
    kv.data.fill_(-1)
    return kv


def elements(kv: native_pool.NativeKVCache, layer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers [2, slots, kv heads, dim] and scales [2, slots, kv heads] of keys and values, by the layout in csrc/pool.h."""
    dim, data = kv.config.head_dim, kv.data[layer]
    keys, values = data[..., : PAGE * dim], data[..., PAGE * dim : 2 * PAGE * dim]
    heads, pages = data.shape[:2]
    k = keys.reshape(heads, pages, dim // 2, PAGE, 2).permute(1, 3, 0, 2, 4).reshape(-1, heads, dim)
    v = values.reshape(heads, pages, PAGE // 2, dim, 2).permute(1, 2, 4, 0, 3).reshape(-1, heads, dim)
    scales = data[..., 2 * PAGE * dim :].contiguous().view(torch.float32).reshape(heads, pages, 2, PAGE)
    return torch.stack((k, v)), scales.permute(2, 1, 3, 0).reshape(2, -1, heads)


def attend(kv: ops.KVCache, q: torch.Tensor, items: list[AttentionItem]) -> torch.Tensor:
    return ops.attend(kv, 0, q, ops.build_plan(kv, items, len(q)))


@each_target
@pytest.mark.parametrize("dim", [16, 48, 64, 80, 256])
@pytest.mark.parametrize("threads", [1, 2])
def test_what_is_written_comes_back_within_half_a_scale(dim: int, threads: int) -> None:
    torch.set_num_threads(threads)
    kv = make_pool(dim=dim, pages=8)
    slots = torch.cat((torch.tensor([5, 127]), torch.arange(17, 49).flip(0)))
    wide = draw(len(slots), 8, dim) * torch.logspace(-30, 30, len(slots))[:, None, None].bfloat16()
    k, v = wide[:, 1:3], wide[:, 4:6]  # strided, as slices of one product are
    ops.write_kv(kv, 0, k, v, slots)
    numbers, scales = elements(kv)
    written = torch.stack((k, v)).float()
    assert torch.equal(scales[:, slots], written.abs().amax(-1) / 127)
    error = (numbers[:, slots] * scales[:, slots, :, None] - written).abs()
    assert bool((error <= 0.50001 * scales[:, slots, :, None]).all())
    assert torch.equal(numbers[:, slots].float(), (written / scales[:, slots, :, None]).round())
    read = (numbers[:, slots] * scales[:, slots, :, None]).bfloat16()
    assert torch.equal(read, reference.through_int8(written))
    others = torch.ones(kv.num_slots, dtype=torch.bool)
    others[slots] = False
    assert bool((numbers[:, others] == -1).all())
    assert bool(scales[:, others].isnan().all())


@each_target
def test_ties_go_to_the_even_number() -> None:
    kv = make_pool((1, 1), 16, pages=1)
    x = torch.tensor([127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.375, -0.75, 64.5, 0, 3, 126, 125, -126, -127]).bfloat16()
    ops.write_kv(kv, 0, x.view(1, 1, 16), x.flip(0).view(1, 1, 16), torch.tensor([3]))
    numbers, scales = elements(kv)
    assert bool((scales[:, 3] == 1).all())
    assert torch.equal(numbers[0, 3, 0].float(), x.float().round())
    assert torch.equal(numbers[1, 3, 0].float(), x.flip(0).float().round())


@each_target
def test_zeros_and_the_smallest_numbers_become_zero() -> None:
    kv = make_pool((2, 2), 16, pages=1)
    k, v = torch.zeros(1, 2, 16).bfloat16(), torch.full((1, 2, 16), -1e-38).bfloat16()
    ops.write_kv(kv, 0, k, v, torch.tensor([0]))
    numbers, scales = elements(kv)
    assert bool((scales[:, 0] == 0).all())
    assert bool((numbers[:, 0] == 0).all())
    out = attend(kv, draw(1, 2, 16), [AttentionItem(0, 1, [(0, 1)], 1, True)])
    assert bool((out == 0).all())


@each_target
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 37, 63])
def test_a_token_with_a_number_that_is_not_finite_spoils_itself_alone(number: float, place: int) -> None:
    q, k, v = draw(4, 6, 64, seed=1), draw(40, 2, 64, seed=2), draw(40, 2, 64, seed=3)
    whole, spoilt = make_pool(), make_pool()
    ops.write_kv(whole, 0, k, v, torch.arange(40))
    bad_k, bad_v = k.clone(), v.clone()
    bad_k[6, 0, place], bad_v[21, 1, place] = number, number
    ops.write_kv(spoilt, 0, bad_k, bad_v, torch.arange(40))
    scales, expected = elements(spoilt)[1][:, :40], elements(whole)[1][:, :40]
    assert scales.isnan().nonzero().tolist() == [[0, 6, 0], [1, 21, 1]]
    assert torch.equal(scales[~scales.isnan()], expected[~scales.isnan()])
    # Tokens 0 and 1 see neither of the two, 2 sees the key, 3 both; the spoilt heads are 0 to 2 and 3 to 5.
    items = [AttentionItem(0, 1, [(0, 6)], 6, True), AttentionItem(1, 1, [(7, 14)], 14, True)]
    items += [AttentionItem(2, 1, [(0, 20)], 20, True), AttentionItem(3, 1, [(0, 40)], 40, True)]
    out, undisturbed = attend(spoilt, q, items), attend(whole, q, items)
    assert torch.equal(out.isnan().any(-1).nonzero(), torch.tensor([[2, 0], [2, 1], [2, 2], *([3, h] for h in range(6))]))
    fine = ~out.isnan().any(-1)
    assert torch.equal(out[fine], undisturbed[fine])


@each_target
@pytest.mark.parametrize("heads", [(6, 2), (24, 1)])
def test_memory_outside_the_keys_reaches_nothing(heads: tuple[int, int]) -> None:
    """Partial pages at both ends of an item, in pools of zeros, of NaN and of large scales."""
    k, v, q = draw(200, heads[1], 64), draw(200, heads[1], 64, seed=1), draw(60, *heads[:1], 64, seed=2)
    items = [AttentionItem(0, 1, [(3, 1)], 1, True), AttentionItem(1, 1, [(21, 14)], 13, True)]
    items += [AttentionItem(2, 30, [(37, 45), (85, 30)], 70, True), AttentionItem(32, 28, [(117, 80)], 79, False)]
    used = torch.cat([torch.tensor(reference.item_slots(item)) for item in items])
    results = []
    for byte in (0, -1, 0x7F):  # 0x7f7f7f7f is 3e38
        kv = make_pool(heads, pages=13)
        kv.data.fill_(byte)
        ops.write_kv(kv, 0, k[used], v[used], used)
        results.append(attend(kv, q, items))
    expected = reference.attend(q, reference.through_int8(k), reference.through_int8(v), items)
    torch.testing.assert_close(results[0].float(), expected, atol=8e-3, rtol=1.6e-2)
    assert torch.equal(results[1], results[0])
    assert torch.equal(results[2], results[0])


@each_target
def test_turned_keys_are_rounded_as_written_ones_are() -> None:
    qkv, angles, slots = draw(150, 15, 64), draw(150, 64, seed=1), torch.arange(150).flip(0) + 5
    fused, composed = make_pool((9, 3), pages=10), make_pool((9, 3), pages=10)
    cos, sin = angles.cos(), angles.sin()
    q = ops.rotate_and_write(fused, 0, qkv, cos, sin, slots)
    expected, k = cpu.rotary(qkv[:, :9], qkv[:, 9:12], cos, sin)
    ops.write_kv(composed, 0, k, qkv[:, 12:], slots)
    assert torch.equal(q, expected)
    assert torch.equal(fused.data, composed.data)


@each_target
@pytest.mark.parametrize("dim", [16, 80])
def test_copy_moves_numbers_and_scales_of_all_layers_and_reads_before_it_writes(dim: int) -> None:
    kv = make_pool(dim=dim, layers=3)
    generator = torch.Generator().manual_seed(0)
    kv.data.copy_(torch.randint(-128, 128, kv.data.shape, generator=generator))
    before = [elements(kv, layer) for layer in range(3)]
    sources, targets = torch.tensor([3, 4, 5, 63]), torch.tensor([4, 5, 40, 0])
    ops.copy_kv(kv, sources, targets)
    for layer in range(3):
        for now, old in zip(elements(kv, layer), before[layer], strict=True):
            expected = old.clone()
            expected[:, targets] = old[:, sources]
            assert torch.equal(_bits(now), _bits(expected))


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32) if x.is_floating_point() else x


@each_target
@pytest.mark.parametrize("slot", [-1, 4 * PAGE])
def test_slots_outside_the_pool_are_refused_and_nothing_is_written(slot: int) -> None:
    kv = make_pool()
    slots, rows = torch.tensor([3, slot]), draw(2, 2, 64)
    message = f"slot {slot} at position 1: the pool has 64 slots"
    with pytest.raises(IndexError, match=message):
        ops.write_kv(kv, 0, rows, rows, slots)
    for source, target in ((slots, slots.abs() % 8), (slots.abs() % 8, slots)):
        with pytest.raises(IndexError, match=message):
            ops.copy_kv(kv, source, target)
    assert bool((kv.data == -1).all())


@each_target
def test_keys_of_many_tasks_give_the_same_bits_on_any_number_of_threads() -> None:
    keys = native_plan.MANY_ROWS_PAGES * PAGE + 70
    kv = make_pool((9, 3), pages=keys // PAGE + 2)
    k, v, q = draw(keys, 3, 64), draw(keys, 3, 64, seed=1), draw(40, 9, 64, seed=2)
    ops.write_kv(kv, 0, k, v, torch.arange(3, keys + 3))
    items = [AttentionItem(0, 40, [(3, keys)], keys, False), AttentionItem(0, 1, [(9, 2000)], 2000, False)]
    items.append(AttentionItem(1, 39, [(5, 1)], 1, False))
    out = attend(kv, q, items)
    moved = [item._replace(runs=[(first - 3, count) for first, count in item.runs]) for item in items]
    expected = reference.attend(q[:3], reference.through_int8(k), reference.through_int8(v), _first_queries(moved, 3))
    torch.testing.assert_close(out[:3].float(), expected, atol=8e-3, rtol=1.6e-2)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(attend(kv, q, items), out)


def _first_queries(items: list[AttentionItem], count: int) -> list[AttentionItem]:
    """The items without causality as the first queries see them."""
    return [item._replace(query_count=min(item.query_count, count - item.query_start)) for item in items]


def test_a_token_takes_about_half_the_memory_of_bfloat16() -> None:
    shape = (30, 9, 3, 64, torch.bfloat16)
    assert KVConfig(*shape, kv_dtype=torch.int8).bytes_per_token == 2 * 30 * 3 * (64 + 4) == 12_240
    assert KVConfig(*shape, kv_dtype=torch.bfloat16).bytes_per_token == KVConfig(*shape).bytes_per_token == 23_040


@each_target
def test_the_pool_has_the_bytes_that_its_shape_says_and_pages_of_whole_cache_lines() -> None:
    for dim in (16, 48, 64, 256):
        kv = make_pool((6, 2), dim, pages=5, layers=3)
        assert kv.data.nbytes == kv.num_slots * kv.config.bytes_per_token
        assert {page.data_ptr() % 64 for head in kv.data[1] for page in head} == {0}


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "message"),
    [
        (torch.float32, torch.int8, "kv_dtype is torch.int8 and dtype torch.float32: it goes with torch.bfloat16 only"),
        (torch.float16, torch.int8, "kv_dtype is torch.int8 and dtype torch.float16"),
        (torch.bfloat16, torch.float16, "kv_dtype is torch.float16: it must be torch.bfloat16, as dtype is, or torch.int8"),
    ],
)
def test_other_dtypes_are_refused(dtype: torch.dtype, kv_dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVConfig(1, 4, 1, 64, dtype, kv_dtype=kv_dtype)


class TestWithoutTheCompiledKernel:
    def refused(self, dim: int, message: str) -> None:
        with pytest.raises(ValueError, match=f"kv_dtype is torch.int8, which {message}"):
            ops.allocate_kv(KVConfig(1, 4, 1, dim, torch.bfloat16, kv_dtype=torch.int8), 1)

    @pytest.mark.parametrize("dim", [8, 72, 272])
    def test_head_sizes_that_it_does_not_compute(self, dim: int) -> None:
        self.refused(dim, f"needs heads of a multiple of 16 dimensions up to 256, and this model's have {dim}")
        assert ops.missing_for_int8(dim, here=False) == ops.missing_for_int8(dim)

    def test_no_compiler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native, "load", lambda _: native.NotAvailable("no C compiler found: install gcc or clang"))
        self.refused(64, r"needs the compiled kernel, and there is none \(no C compiler found: install gcc or clang\)")
        assert ops.missing_for_int8(64, here=False) is None

    def test_torch_by_choice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ops, "_choice", "torch")
        self.refused(64, "needs the compiled kernel, and torch was chosen")
