"""The lines that say why rows failed."""

import random

from batchrun.failures import MOST_KINDS, SHOWN_CHARACTERS, Failure, describe


def test_the_most_frequent_kinds_come_first_with_their_first_row_in_whatever_order_rows_were_finished() -> None:
    failures = [Failure(row, f"the prompt has {row} tokens") for row in (4, 5, 6)]
    failures += [Failure(row, "null") for row in (2, 7)] + [Failure(row, "empty") for row in (1, 3)] + [Failure(0, "once")]
    wanted = [
        "3 failed, such as row 4: the prompt has 4 tokens",
        "2 failed, such as row 1: empty",
        "2 failed, such as row 2: null",
    ]
    for seed in range(5):
        random.Random(seed).shuffle(failures)
        assert describe(failures) == wanted
    assert describe([]) == []


def test_very_many_kinds_and_a_very_long_message_stay_within_bounds() -> None:
    kinds = (Failure(row, f"no {chr(0x4E00 + row)}") for row in range(10 * MOST_KINDS))
    assert describe(kinds) == [f"row {row} failed: no {chr(0x4E00 + row)}" for row in range(3)]
    (line,) = describe([Failure(7, "x" * 10_000)])
    assert line == f"row 7 failed: {'x' * SHOWN_CHARACTERS}..."
