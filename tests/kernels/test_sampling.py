"""The largest logit and the drawn token: compiled and in torch, against definitions written out."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from batchrun.kernels import ops
from batchrun.kernels.sampling import invert, weight_scale, whole_weights
from batchrun.kernels.targets import processor, runnable

VOCAB = 1003  # not a multiple of any vector width
TARGETS = [target.name for target in runnable(processor())]
CHOICES = ["torch", *TARGETS]


@pytest.fixture(params=CHOICES)
def choice(request: pytest.FixtureRequest, compute_with: Callable[[str], None]) -> str:
    """Which implementation computes."""
    compute_with(request.param)
    return str(request.param)


def random_logits(rows: int, vocab: int = VOCAB, spread: float = 3.0, seed: int = 0) -> torch.Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread).bfloat16()


def drawn(logits: torch.Tensor, uniform: torch.Tensor, temperature: float = 1.0, min_p: float = 0.0) -> list[int]:
    """One draw per number of `uniform` from a single row."""
    count = len(uniform)
    which = torch.zeros(count, dtype=torch.int64)
    settings = torch.full((count,), temperature), torch.full((count,), min_p)
    tokens: list[int] = ops.draw(logits[None], ops.Draws(which, ops.best(logits[None])[0][which], *settings, uniform)).tolist()
    return tokens


@pytest.mark.parametrize("width", [1, 15, 16, 17, 64, VOCAB])
def test_best_is_the_lowest_place_of_the_largest_logit(choice: str, width: int) -> None:
    logits = random_logits(40, width).round().clamp(-1, 1)  # three numbers: equals in every row, register and lane
    place, finite = ops.best(logits)
    for row, at in zip(logits.float().numpy(), place.tolist(), strict=True):
        assert at == int(np.flatnonzero(row == row.max())[0])
    assert bool(finite.all())


@pytest.mark.parametrize("at", [0, 17, VOCAB - 1])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_best_tells_the_rows_that_are_not_finite(choice: str, at: int, bad: float) -> None:
    logits = random_logits(4)
    logits[1, at] = bad
    logits[2] = -float("inf")
    logits[3] = -float("inf")
    logits[3, at] = -2.0
    place, finite = ops.best(logits)
    assert finite.tolist() == [True, False, False, True]
    assert place[3] == at


@pytest.mark.parametrize("temperature", [0.1, 0.8, 5.0])
@pytest.mark.parametrize("min_p", [0.0, 0.05])
@pytest.mark.parametrize("width", [5, 64, VOCAB, 70_000])  # the last has blocks of more than 64 places
def test_each_token_gets_the_share_of_its_probability(choice: str, width: int, temperature: float, min_p: float) -> None:
    logits = random_logits(1, width)[0]
    probability = np.exp((logits.double().numpy() - logits.double().max().item()) / temperature)
    probability[probability < min_p] = 0.0
    bounds = np.cumsum(probability) / probability.sum()
    uniform = (np.arange(5000) + 0.5) / 5000
    tokens = np.array(drawn(logits, torch.from_numpy(uniform), temperature, min_p))
    low, high = bounds[tokens] - probability[tokens] / probability.sum(), bounds[tokens]
    assert np.all((low - 1e-6 <= uniform) & (uniform <= high + 1e-6))
    assert np.all(probability[tokens] > 0.0)


def test_the_ends_of_the_unit_interval_take_the_first_and_the_last_likely_token(choice: str) -> None:
    logits = torch.full((VOCAB,), -float("inf")).bfloat16()
    logits[3], logits[700] = 1.0, 1.0
    assert drawn(logits, torch.tensor([0.0, 0.4999, 0.5, 0.5001, 1.0 - 2.0**-53], dtype=torch.float64)) == [3, 3, 700, 700, 700]


def test_a_draw_depends_on_its_own_row_alone(choice: str) -> None:
    logits, generator = random_logits(50), torch.Generator().manual_seed(1)
    uniform = torch.rand(50, generator=generator, dtype=torch.float64)
    temperature, min_p = torch.rand(50, generator=generator) + 0.1, torch.rand(50, generator=generator) * 0.1
    place = ops.best(logits)[0]
    which = torch.randperm(50, generator=generator)
    together = ops.draw(logits, ops.Draws(which, place[which], temperature[which], min_p[which], uniform[which]))
    for row, token in zip(which.tolist(), together.tolist(), strict=True):
        one = slice(row, row + 1)
        alone = ops.draw(logits[one], ops.Draws(torch.tensor([0]), place[one], temperature[one], min_p[one], uniform[one]))
        assert alone.item() == token


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("threads", [1, 2])
def test_compiled_draws_equal_those_in_torch(
    compute_with: Callable[[str], None], threads_as_before: None, threads: int, name: str
) -> None:
    logits, generator = random_logits(2000), torch.Generator().manual_seed(2)
    rest = torch.rand(2000, generator=generator) + 0.1, torch.rand(2000, generator=generator) * 0.1
    uniform = torch.rand(2000, generator=generator, dtype=torch.float64)
    tokens: dict[str, list[int]] = {}
    torch.set_num_threads(threads)
    for choice in ("torch", name):
        compute_with(choice)
        place, _ = ops.best(logits)
        tokens[choice] = ops.draw(logits, ops.Draws(torch.arange(2000), place, *rest, uniform)).tolist()
    assert sum(a != b for a, b in zip(tokens["torch"], tokens[name], strict=True)) <= 1


def test_rows_outside_the_logits_are_refused(choice: str) -> None:
    one = torch.ones(1)
    with pytest.raises((AssertionError, IndexError)):
        ops.draw(random_logits(2), ops.Draws(torch.tensor([2]), torch.tensor([0]), one, one, one.double()))


def test_weights_are_bit_identical_whatever_place_a_row_has_in_the_batch() -> None:
    # What the test above rests on: the exponential must not depend on a value's place in a vector register.
    logits = random_logits(1)[0].float()
    alone = torch.exp(logits.clone())
    for before in range(20):
        padded = torch.cat([torch.zeros(before), logits, torch.zeros(9)])
        assert torch.equal(torch.exp(padded)[before : before + VOCAB], alone)


def test_sums_of_weights_are_exact_in_any_order() -> None:
    # The other thing that it rests on: whole numbers below 2^53 have one sum.
    logits = random_logits(1, spread=8.0)[0].float()
    weights = whole_weights(logits - logits.max(), weight_scale(VOCAB))
    assert int(weights.max()) * VOCAB <= 2**53
    exact = sum(int(weight) for weight in weights.tolist())
    assert [weight % 1 for weight in weights.tolist()] == [0.0] * VOCAB
    assert int(weights.sum(dtype=torch.float64)) == int(weights.flip(0).cumsum(0, dtype=torch.float64)[-1]) == exact


@pytest.mark.parametrize("width", [4, 64, 65, 130, 200])
def test_inversion_gives_each_token_exactly_its_share(width: int) -> None:
    # 0, 1, 2, 0, 1, 2, ... whole weights and as many evenly spaced numbers as their sum: each token its weight's times.
    weights = (torch.arange(width) % 3).float()
    total = int(weights.sum())
    uniform = torch.arange(total, dtype=torch.float64) / total
    tokens = invert(weights.expand(total, -1), uniform + 1e-12)
    assert tokens.tolist() == [i for i in range(width) for _ in range(i % 3)]
    last = invert(weights[None], torch.tensor([1.0 - 2.0**-53], dtype=torch.float64))
    assert last.item() == max(i for i in range(width) if i % 3)
