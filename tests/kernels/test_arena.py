"""Memory for weights: no two tensors share any, and it goes with the last of them."""

import gc
import weakref

import torch

from batchrun.kernels.arena import CHUNK, Arena


def test_tensors_lie_beside_each_other_at_whole_lines_and_share_nothing() -> None:
    arena = Arena()
    shapes = [(3, 5), (1,), (64, 64), (7, 2, 3), (CHUNK // 4 + 1,), (2 * CHUNK // 2,), (4, 4)]
    tensors = [arena.empty(shape, torch.bfloat16) for shape in shapes]
    for number, tensor in enumerate(tensors):
        assert tensor.shape == shapes[number]
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(number)
    for number, tensor in enumerate(tensors):
        assert bool((tensor == number).all())
    assert tensors[1].data_ptr() - tensors[0].data_ptr() == 64


def test_memory_goes_with_the_last_of_its_tensors() -> None:
    arena = Arena()
    first = arena.empty((CHUNK,), torch.uint8)
    gone = weakref.ref(first.untyped_storage())
    address = first.untyped_storage().data_ptr()
    second = arena.empty((CHUNK,), torch.uint8)
    assert second.untyped_storage().data_ptr() != address, "the first stretch is full"
    del first
    gc.collect()
    assert gone() is None
