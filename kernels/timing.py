"""Seconds spent in the operations, by kind. Nothing is measured unless asked for."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_timings: list[dict[str, float]] = []
"""The seconds by kind while `timing` is on, else empty."""


def timed(kind: str) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Count a function's seconds under `kind` while `timing` is on. Timed functions do not call each other."""

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @functools.wraps(function)
        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            if not _timings:
                return function(*args, **kwargs)
            spent = _timings[0]
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[kind] = spent.get(kind, 0.0) + time.perf_counter() - began

        return call

    return decorate


@contextmanager
def timing() -> Iterator[dict[str, float]]:
    """Measure within the `with` block; yields the seconds by kind, which the caller reads and may clear at any time.

    One block at a time in a process.
    """
    assert not _timings, "the operations are being measured already"
    _timings.append({})
    try:
        yield _timings[0]
    finally:
        _timings.clear()
