"""The compiled kernel's pool: pages laid out for dot products of pairs (see csrc/pool.h), written and copied by it."""

import torch

from batchrun.kernels.native import Native
from batchrun.kernels.spec import PAGE_SIZE, KVConfig


class NativeKVCache:
    """Keys and values of all layers. Opaque outside this folder.

    Memory past the slots written so far is read by whole pages of 16 and ignored.
    """

    def __init__(self, config: KVConfig, num_pages: int, native: Native, amx_rows: int = 0) -> None:
        self.config = config
        self.native = native
        self.amx_rows = amx_rows
        """Tasks of attention with at least so many query rows use matrix tiles; 0: none does."""
        self.num_pages = num_pages
        self.num_slots = num_pages * PAGE_SIZE
        dtype = torch.int8 if config.is_int8 else config.dtype
        elements = PAGE_SIZE * config.head_bytes // dtype.itemsize
        self.data = torch.empty(config.num_layers, config.num_kv_heads, num_pages, elements, dtype=dtype)
        self.layers = [self.data[layer].data_ptr() for layer in range(config.num_layers)]
        self._scratch: dict[str, torch.Tensor] = {}

    def scratch(self, name: str, size: int) -> int:
        """The address of `size` uninitialised floats, whose memory is used again by the next call with this name."""
        held = self._scratch.get(name)
        if held is None or held.numel() < size:
            held = self._scratch[name] = torch.empty(size, dtype=torch.float32)
        return held.data_ptr()


def _dense_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def write_kv(kv: NativeKVCache, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """Store the keys and values of T tokens; the contract is in `ops.write_kv`."""
    config = kv.config
    assert slots.dtype == torch.int64, f"slots are {slots.dtype}: expected int64"
    shape = (len(slots), config.num_kv_heads, config.head_dim)
    assert k.shape == v.shape == shape, f"k is {tuple(k.shape)}, v {tuple(v.shape)}: expected {shape}"
    assert k.dtype == v.dtype == config.dtype, f"k is {k.dtype}, v {v.dtype}: expected {config.dtype}"
    k, v, slots = _dense_rows(k), _dense_rows(v), slots.contiguous()
    bad = kv.native.library.batchrun_write_kv(
        *(kv.layers[layer], kv.num_pages, config.num_kv_heads, config.head_dim, config.is_int8),
        *(k.data_ptr(), k.stride(0), k.stride(1)),
        *(v.data_ptr(), v.stride(0), v.stride(1)),
        *(slots.data_ptr(), len(slots), torch.get_num_threads()),
    )
    _refuse(kv, slots, bad)


def rotate_and_write(
    kv: NativeKVCache, layer: int, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """Turn and store T tokens; the contract is in `ops.rotate_and_write`. All tensors are bfloat16 but the slots."""
    config, dim = kv.config, kv.config.head_dim
    tokens, heads = len(slots), config.num_heads + 2 * config.num_kv_heads
    assert slots.dtype == torch.int64, f"slots are {slots.dtype}: expected int64"
    assert qkv.shape == (tokens, heads, dim), f"qkv is {tuple(qkv.shape)}: expected {(tokens, heads, dim)}"
    assert cos.shape == sin.shape == (tokens, dim), f"cos is {tuple(cos.shape)}, sin {tuple(sin.shape)}: {(tokens, dim)} expected"
    if qkv.stride()[1:] != (dim, 1):
        qkv = qkv.contiguous()
    cos, sin, slots = cos.contiguous(), sin.contiguous(), slots.contiguous()
    q = torch.empty(tokens, config.num_heads, dim, dtype=config.dtype)
    bad = kv.native.library.batchrun_rotate_and_write(
        *(kv.layers[layer], kv.num_pages, config.num_heads, config.num_kv_heads, dim, config.is_int8),
        *(qkv.data_ptr(), qkv.stride(0)),
        *(cos.data_ptr(), sin.data_ptr(), slots.data_ptr(), tokens),
        *(q.data_ptr(), torch.get_num_threads()),
    )
    _refuse(kv, slots, bad)
    return q


def copy_kv(kv: NativeKVCache, source_slots: torch.Tensor, target_slots: torch.Tensor) -> None:
    """Copy tokens in all layers; the contract is in `ops.copy_kv`."""
    config = kv.config
    assert len(source_slots) == len(target_slots), f"{len(source_slots)} sources for {len(target_slots)} targets"
    assert source_slots.dtype == target_slots.dtype == torch.int64, f"slots are {source_slots.dtype}: expected int64"
    regions = config.num_layers * config.num_kv_heads
    staging = torch.empty(regions, len(source_slots), config.head_bytes, dtype=torch.uint8)
    for slots, into_pool in ((source_slots.contiguous(), 0), (target_slots.contiguous(), 1)):
        bad = kv.native.library.batchrun_move_kv(
            *(kv.data.data_ptr(), kv.num_pages, regions, config.head_dim, config.is_int8),
            *(slots.data_ptr(), len(slots), staging.data_ptr(), into_pool),
        )
        _refuse(kv, slots, bad)


def _refuse(kv: NativeKVCache, slots: torch.Tensor, bad: int) -> None:
    """Raise for the slot at position `bad` if that is no -1: nothing has been written."""
    if bad >= 0:
        raise IndexError(f"slot {slots[bad]} at position {bad}: the pool has {kv.num_slots} slots")
