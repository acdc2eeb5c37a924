"""The pool: what is written where, what is refused."""

import pytest
import torch

from batchrun.kernels import ops
from batchrun.kernels.ops import AttentionItem, KVConfig

PAGE = ops.page_size("cpu")


def make_pool(pages: int = 4) -> ops.KVCache:
    kv = ops.allocate_kv(KVConfig(3, 6, 2, 64, torch.float32), pages)
    kv.data.copy_(torch.randn(kv.data.shape, generator=torch.Generator().manual_seed(1)))
    return kv


def read_value(kv: ops.KVCache, layer: int, slot: int) -> torch.Tensor:
    """A token's value through the public door: attention to one key gives its value."""
    plan = ops.build_plan(kv, [AttentionItem(0, 1, [(slot, 1)], 1, True)], 1)
    return ops.attend(kv, layer, torch.zeros(1, 6, 64), plan)[0, ::3]


def test_write_changes_its_slots_of_its_layer_and_nothing_else() -> None:
    kv = make_pool()
    before = kv.data.clone()
    slots = torch.tensor([5, 63, 17, 18])
    k, v = torch.randn(4, 2, 64), torch.randn(4, 2, 64)
    ops.write_kv(kv, 1, k, v, slots)
    for i, slot in enumerate(slots.tolist()):
        assert torch.equal(read_value(kv, 1, slot), v[i])
    changed = (kv.data != before).flatten(1, 2).any(-1).any(1)
    assert changed.nonzero().tolist() == [[1, slot] for slot in sorted(slots.tolist())]


def test_copy_moves_all_layers_and_reads_before_it_writes() -> None:
    kv = make_pool()
    before = kv.data.clone()
    values = [[read_value(kv, layer, slot) for slot in (3, 4, 5)] for layer in range(3)]
    ops.copy_kv(kv, torch.tensor([3, 4, 5]), torch.tensor([4, 5, 40]))
    for layer in range(3):
        assert [torch.equal(read_value(kv, layer, slot), values[layer][i]) for i, slot in enumerate((4, 5, 40))] == [True] * 3
    changed = (kv.data != before).flatten(0, 2).any(-1).any(0)
    assert changed.nonzero().flatten().tolist() == [4, 5, 40]


def test_bytes_per_token_counts_keys_and_values_of_all_layers() -> None:
    assert KVConfig(30, 9, 3, 64, torch.bfloat16).bytes_per_token == 23_040


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((1, 33, 2, 64), r"num_heads is 33: it must be a multiple of num_kv_heads \(2\)"),
        ((1, 9, 3, 0), "head_dim is 0: it must be at least 1"),
        ((0, 9, 3, 64), "num_layers is 0"),
        ((1, 9, 0, 64), "num_kv_heads is 0"),
    ],
)
def test_impossible_shapes_are_refused(sizes: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVConfig(*sizes, torch.float32)


def test_unknown_dtype_device_and_empty_pool_are_refused() -> None:
    with pytest.raises(ValueError, match=r"dtype is torch.int8"):
        KVConfig(1, 9, 3, 64, torch.int8)
    with pytest.raises(ValueError, match="device is 'tpu'"):
        ops.page_size("tpu")
    with pytest.raises(ValueError, match="device is 'cuda'"):
        ops.allocate_kv(KVConfig(1, 9, 3, 64, torch.float32, "cuda"), 1)
    with pytest.raises(ValueError, match="num_pages is 0"):
        ops.allocate_kv(KVConfig(1, 9, 3, 64, torch.float32), 0)
