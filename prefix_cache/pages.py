"""What the trees need to know of KV memory: runs of pages, and a pool that hands them out.

A page is a fixed number of token slots. Slot `s` of page `p` holds one token's keys and values in every layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol


class PageRun(NamedTuple):
    """Pages start, start + 1, ... start + count - 1: consecutive in memory and in token order."""

    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls on a run


class PagePool(Protocol):
    """The pool as the trees see it; `batchrun.engine.kv_pool.KVPool` is one."""

    @property
    def page_size(self) -> int:
        """Token slots per page."""

    @property
    def free_pages(self) -> int:
        """Pages that nobody owns."""

    def allocate(self, count: int) -> list[PageRun] | None:
        """Take `count` free pages with one owner each, or None (nothing changed) when fewer are free."""

    def share(self, runs: Sequence[PageRun]) -> None:
        """Add an owner to each page."""

    def release(self, runs: Sequence[PageRun]) -> None:
        """Take an owner from each page; a page without owners is free."""

    def check_integrity(self, owners: Iterable[Sequence[PageRun]]) -> None:
        """Raise AssertionError unless `owners` are exactly who holds the used pages."""


def pages_for(num_tokens: int, page_size: int) -> int:
    """Whole pages that hold `num_tokens` from a page boundary on."""
    return -(-num_tokens // page_size)
