"""The time left against engines whose speed is known."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest

from batchrun.time_left import OutputsLeft, TimeLeft

MOST = 256


class Seen(NamedTuple):
    gone: float
    told: float | None


def outputs_of(num_rows: int) -> OutputsLeft:
    ones = np.ones(num_rows, np.int64)
    return OutputsLeft(3 * np.arange(num_rows), MOST * ones, ones)


def played(lengths: list[int], prompt: int, side_by_side: int, step_s: float = 0.03) -> Iterator[Seen]:
    """An engine that prefills 512 tokens a step beside the rows that decode; a step costs by what is in it."""
    outputs, left = outputs_of(len(lengths)), TimeLeft()
    now, started, prefilled, generated = 0.0, 0, 0, 0
    running: dict[int, int] = {}
    left.add(now, 0, 0)
    while started < len(lengths) or running:
        room = min(512, (side_by_side - len(running)) * prompt - prefilled % prompt, len(lengths) * prompt - prefilled)
        prefilled += room
        now += step_s + 0.0005 * room + 0.0008 * len(running)
        for row in range(started, prefilled // prompt):
            running[row] = 0
        started = prefilled // prompt
        for row in list(running):
            running[row] += 1
            generated += 1
            if running[row] == lengths[row]:
                outputs.end(3 * row, running.pop(row))
        left.add(now, prefilled, generated)
        yield Seen(now, left.seconds(len(lengths) * prompt - prefilled, outputs.tokens(generated)))


RANDOM = np.random.default_rng(0)
ENGINES = {
    "all at once, all as long as they may be": ([MOST] * 200, 300, 256),
    "short answers of many lengths": (np.minimum(MOST, RANDOM.geometric(1 / 80, 1000)).tolist(), 300, 64),
    "long prompts": ([8] * 1000, 1000, 64),
    "all the same": ([64] * 1000, 50, 64),
}


@pytest.mark.parametrize("name", ENGINES)
def test_the_time_left_is_about_right_from_a_fifth_of_the_run_on(name: str) -> None:
    seen = list(played(*ENGINES[name]))
    total = seen[-1].gone
    for at in seen:
        if at.told is not None:
            assert at.gone > 2.9, "told from nothing"
        if 0.2 * total < at.gone < 0.95 * total:
            assert at.told is not None, f"nothing told after {at.gone:.0f} of {total:.0f} s"
            assert at.told == pytest.approx(total - at.gone, rel=0.5, abs=5)


def test_before_two_hundredths_of_the_run_nothing_is_told() -> None:
    left = TimeLeft()
    for second in range(10):
        left.add(float(second), 0, 10 * second)
    assert left.seconds(0, 10_000) is None
    assert left.seconds(0, 400) == pytest.approx(40)


def test_costs_that_cannot_be_told_apart_tell_only_of_more_of_the_same() -> None:
    left = TimeLeft()
    for second in range(100):
        left.add(float(second), 100 * second, 10 * second)
    assert left.seconds(1000, 100) == pytest.approx(10)
    assert left.seconds(0, 100) is None
    assert left.seconds(1000, 0) is None


def test_outputs_are_expected_to_be_like_those_that_ended_and_no_longer_than_they_may_be() -> None:
    outputs = outputs_of(4)
    assert outputs.tokens(0) == 4 * MOST
    assert outputs.tokens(40) == 4 * MOST - 40
    outputs.end(3, 10)
    assert outputs.tokens(40) == 3 * 40
    assert outputs.tokens(3 * MOST) == 3 * MOST - (3 * MOST - 10)
    for row in (0, 6, 9):
        outputs.end(row, 10)
    assert outputs.tokens(40) == 0
