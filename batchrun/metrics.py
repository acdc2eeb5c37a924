"""What each latency column of the output means, computed from the times that the engine noted."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from batchrun.engine.outputs import Completion


class Latency(NamedTuple):
    """The latency columns of one output row, in milliseconds; None is null.

    All are None for an error row. A row that ended before its first token has `queue_ms` alone, if it was started.
    """

    queue_ms: float | None = None
    """From the engine's first step to the start of the first step that computed a token for this row."""
    prefill_ms: float | None = None
    """From there to its first output token."""
    ttft_ms: float | None = None
    """Time to first token: queue and prefill."""
    tpot_ms: float | None = None
    """Time per output token: the mean gap between tokens; None with one token, as the following three."""
    itl_p50_ms: float | None = None
    """Inter-token latency: the median of the gaps."""
    itl_p99_ms: float | None = None
    itl_max_ms: float | None = None
    latency_ms: float | None = None
    """From the engine's first step to the last token."""


def latency_columns(completion: Completion) -> Latency:
    """The latency columns of a completion, whose times are seconds since the engine's first step."""
    if completion.finish_reason == "error" or completion.started is None:
        return Latency()
    queue = completion.started * 1e3
    times = [time * 1e3 for time in completion.token_times]
    if not times:
        return Latency(queue_ms=queue)
    first, last = times[0], times[-1]
    latency = Latency(queue_ms=queue, prefill_ms=first - queue, ttft_ms=first, latency_ms=last)
    if len(times) == 1:
        return latency
    gaps = sorted(later - earlier for earlier, later in pairwise(times))
    return latency._replace(
        tpot_ms=(last - first) / len(gaps),
        itl_p50_ms=percentile(gaps, 50),
        itl_p99_ms=percentile(gaps, 99),
        itl_max_ms=gaps[-1],
    )


def percentile(ordered: Sequence[float], percent: int) -> float:
    """Percentile of ascending values (at least one), linear between the two nearest: numpy's default method.

    Plain Python: numpy's call overhead would cost a million short rows minutes.
    """
    below, rest = divmod((len(ordered) - 1) * percent, 100)
    if rest == 0:
        return ordered[below]
    step = ordered[below + 1] - ordered[below]
    # Rounding must not lift it over the larger neighbour.
    return min(ordered[below] + step * rest / 100, ordered[below + 1])
