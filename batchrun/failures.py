"""Why rows failed: the most frequent reasons, for the last lines of a run."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import pyarrow as pa

from batchrun.ledger import WorkFolder

MOST_KINDS = 1000
"""Kinds told apart; what comes after so many different ones is not counted, so that memory does not grow with the file."""
SHOWN_KINDS = 3
SHOWN_CHARACTERS = 300
_ROW_INDEX, _ERROR = 0, 4  # places in RESULT_FIELDS


class Failure(NamedTuple):
    """A row that failed."""

    row_index: int
    message: str


def kind_of(message: str) -> str:
    """Messages that differ only in numbers are of one kind."""
    return re.sub(r"\d+", "0", message)


def failure_lines(work: WorkFolder) -> list[str]:
    """One line for each of the most frequent reasons in all finished parts, those of earlier processes included."""
    return describe(_failures(work))


def describe(failures: Iterable[Failure]) -> list[str]:
    """One line for each of the most frequent kinds: how many rows, and the first one's number and message."""
    counts: Counter[str] = Counter()
    first: dict[str, Failure] = {}
    for failure in failures:
        kind = kind_of(failure.message)
        if kind in first or len(first) < MOST_KINDS:
            counts[kind] += 1
            first[kind] = min(first.get(kind, failure), failure)
    # The same lines whatever the order in which the rows were finished.
    kinds = sorted(counts, key=lambda kind: (-counts[kind], first[kind]))
    return [_line(counts[kind], first[kind]) for kind in kinds[:SHOWN_KINDS]]


def _failures(work: WorkFolder) -> Iterable[Failure]:
    for part in work.parts:
        table = work.read_part(part, [_ROW_INDEX, _ERROR])
        table = table.filter(table.column(1).is_valid())
        # A part is sorted by row: a row whose samples all failed is one row.
        last = None
        for row_index, message in zip(*(_values(column) for column in table.columns), strict=True):
            if row_index != last:
                yield Failure(row_index, message)
            last = row_index


def _values(column: pa.ChunkedArray) -> list[object]:
    values: list[object] = column.to_pylist()
    return values


def _line(count: int, example: Failure) -> str:
    message = example.message if len(example.message) <= SHOWN_CHARACTERS else example.message[:SHOWN_CHARACTERS] + "..."
    return (
        f"{count} failed, such as row {example.row_index}: {message}"
        if count > 1
        else f"row {example.row_index} failed: {message}"
    )
