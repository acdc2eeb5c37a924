"""Fixtures of the kernels' tests: which implementation computes, and on how many threads."""

from collections.abc import Callable, Iterator

import pytest
import torch

from batchrun.kernels import native, ops
from batchrun.kernels.targets import Target


@pytest.fixture
def compute_with(monkeypatch: pytest.MonkeyPatch, kernel_of: Callable[[str | None], native.Native]) -> Callable[[str], None]:
    """Makes `ops` compute with "torch", "native" or the compiled kernel of a target."""

    def choose(choice: str) -> None:
        if choice != "torch":
            kernel_of(None if choice == "native" else choice)
        monkeypatch.setattr(ops, "_choice", choice)

    return choose


@pytest.fixture(autouse=True)
def target(request: pytest.FixtureRequest, compute_with: Callable[[str], None]) -> Target | None:
    """In tests that are parametrized with it, indirectly: the target whose kernel `ops` computes with."""
    found: Target | None = getattr(request, "param", None)
    if found:
        compute_with(found.name)
    return found


@pytest.fixture
def threads_as_before() -> Iterator[None]:
    """torch's number of threads comes back after the test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_thread(threads_as_before: None) -> None:
    torch.set_num_threads(1)
