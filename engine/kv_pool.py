"""Which pages of KV memory are free, and how many owners each used page has. Page numbers only, no tensors."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from batchrun.prefix_cache.pages import PageRun

__all__ = ["KVPool", "PageRun"]


class KVPool:
    """A fixed number of pages, handed out in runs that are as consecutive as the free space allows.

    Free space is kept as maximal runs, so two free neighbours are always one run:

        page    0   1   2   3   4   5   6   7
        owners  1   1   .   .   3   .   .   .        free runs: (2, 2), (5, 3)

    The same calls in the same order give the same pages: best fit first, the lowest address among equals.
    Attributes: num_pages, page_size (token slots per page), free_pages, peak_used_pages (the most ever in use).
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a KV pool needs at least one page of one slot, not {num_pages} pages of {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.free_pages = num_pages
        self.peak_used_pages = 0
        self._owners: npt.NDArray[np.int32] = np.zeros(num_pages, np.int32)
        self._free_count = {0: num_pages}  # first page of a free run -> its pages
        self._free_start = {num_pages: 0}  # page after a free run -> its first page
        self._by_size = [(num_pages, 0)]  # (pages, first page) of each free run, ascending

    @property
    def used_pages(self) -> int:
        return self.num_pages - self.free_pages

    def allocate(self, count: int) -> list[PageRun] | None:
        """Take `count` pages, one owner each: one run if a free run is long enough (the shortest such), else the
        longest free runs until the rest fits in one. None, and nothing changed, when fewer than `count` are free.
        """
        assert count >= 0, f"asked for {count} pages"
        if count > self.free_pages:
            return None
        runs: list[PageRun] = []
        remaining = count
        while remaining:
            place = bisect_left(self._by_size, (remaining, 0))
            if place == len(self._by_size):  # none is long enough: the longest, at the lowest address
                place = bisect_left(self._by_size, (self._by_size[-1][0], 0))
            size, start = self._by_size[place]
            taken = min(size, remaining)
            self._remove_free(start, size)
            if size > taken:
                self._add_free(start + taken, size - taken)
            self._owners[start : start + taken] = 1
            runs.append(PageRun(start, taken))
            remaining -= taken
        self.free_pages -= count
        self.peak_used_pages = max(self.peak_used_pages, self.used_pages)
        return runs

    def share(self, runs: Sequence[PageRun]) -> None:
        """Add an owner to each page of `runs`, all of them in use."""
        for start, count in runs:
            owners = self._owners_of(start, count)
            owners += 1

    def release(self, runs: Sequence[PageRun]) -> None:
        """Take an owner from each page of `runs`, all of them in use; those left without one are free."""
        for start, count in runs:
            owners = self._owners_of(start, count)
            owners -= 1
            if not owners.any():
                self._free(start, count)
                continue
            edges = np.flatnonzero(np.diff(owners == 0, prepend=False, append=False))
            for first, after in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
                self._free(start + first, after - first)

    def check_integrity(self, owners: Iterable[Sequence[PageRun]]) -> None:
        """Raise AssertionError, with values, unless free + used = total, the free runs are maximal and cover exactly
        the pages without owners, and each page has as many owners as `owners` (one list of runs each) name it.
        """
        expected = np.zeros(self.num_pages, np.int32)
        for runs in owners:
            for start, count in runs:
                expected[start : start + count] += 1
        wrong = np.flatnonzero(expected != self._owners)
        assert not wrong.size, (
            f"page {wrong[0]}: counted {self._owners[wrong[0]]} owners, there are {expected[wrong[0]]} ({wrong.size} such pages)"
        )
        free = int((self._owners == 0).sum())
        assert free == self.free_pages, f"{self.free_pages} pages said to be free, {free} have no owner"
        edges = np.flatnonzero(np.diff(self._owners == 0, prepend=False, append=False))
        runs_there = dict(zip(edges[::2].tolist(), (edges[1::2] - edges[::2]).tolist(), strict=True))
        assert self._free_count == runs_there, f"free runs {self._free_count}, should be {runs_there}"
        assert self._free_start == {start + size: start for start, size in runs_there.items()}, self._free_start
        assert self._by_size == sorted((size, start) for start, size in runs_there.items()), self._by_size

    def _owners_of(self, start: int, count: int) -> npt.NDArray[np.int32]:
        assert 0 <= start < start + count <= self.num_pages, f"no such run: {count} pages from {start}"
        owners = self._owners[start : start + count]
        assert owners.all(), f"page {start + int((owners == 0).argmax())} is free"
        return owners

    def _free(self, start: int, count: int) -> None:
        self.free_pages += count
        end = start + count
        before = self._free_start.get(start)
        if before is not None:
            self._remove_free(before, start - before)
            start = before
        after = self._free_count.get(end)
        if after is not None:
            self._remove_free(end, after)
            end += after
        self._add_free(start, end - start)

    def _add_free(self, start: int, count: int) -> None:
        self._free_count[start] = count
        self._free_start[start + count] = start
        insort(self._by_size, (count, start))

    def _remove_free(self, start: int, count: int) -> None:
        del self._free_count[start]
        del self._free_start[start + count]
        del self._by_size[bisect_left(self._by_size, (count, start))]
