"""Memory for packed weights that the system may back with huge pages.

A step reads all weights once. With 4 KiB pages every one of them costs a walk through the page tables, which in a virtual
machine goes through two sets of tables; huge pages make decoding's linear layers 4 to 14 % faster (docs/benchmarks.md). They
suit weights, written once and kept, and not the KV pool, where clearing them costs more than they save.
"""

import ctypes
import math
import mmap
import sys

import torch

HUGE_PAGE = 1 << 21
CHUNK = 32 * HUGE_PAGE


class Arena:
    """Hands out tensors from large stretches of memory, one beside the other. A stretch is freed with the last of its tensors."""

    def __init__(self) -> None:
        self._rest = torch.zeros(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor at an address of a whole cache line."""
        size = -(-math.prod(shape) * dtype.itemsize // 64) * 64
        if size > len(self._rest):
            self._rest = _advised(-(-max(size, CHUNK) // HUGE_PAGE) * HUGE_PAGE)
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _advised(size: int) -> torch.Tensor:
    """`size` bytes that begin at a huge page."""
    memory = torch.empty(size + HUGE_PAGE, dtype=torch.uint8)
    first = -memory.data_ptr() % HUGE_PAGE
    memory = memory[first : first + size]
    if sys.platform == "linux":  # advice: a system that does not take it gives small pages
        ctypes.CDLL(None).madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)
    return memory
