"""The share of a run that its last tenth of rows takes."""

from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pytest
from tail import finish_times, tail_share, with_lengths


def test_tail_is_the_time_after_nine_rows_in_ten() -> None:
    assert tail_share(np.arange(1.0, 11.0)) == pytest.approx(0.1)
    assert tail_share(np.array([1.0] * 9 + [4.0])) == pytest.approx(0.75)
    assert tail_share(np.full(20, 3.0)) == 0.0


def test_rows_end_when_they_started_plus_their_latency_without_the_queue() -> None:
    zero = datetime(2026, 1, 1, tzinfo=UTC)
    output = pa.table(
        {
            "started_at": pa.array([zero + timedelta(seconds=2), zero], pa.timestamp("us", "UTC")),
            "queue_ms": [2000.0, 0.0],
            "latency_ms": [5000.0, 1500.0],
        }
    )
    assert finish_times(output).tolist() == [1.5, 5.0]


def test_lengths_are_lognormal_and_the_same_every_time() -> None:
    table = pa.table({"prompt": ["x"] * 20_000, "max_tokens": [7] * 20_000, "n": [3] * 20_000})
    made = with_lengths(table, mean=64, sigma=1.0, most=100_000)
    assert made.column_names == ["prompt", "max_tokens"]
    lengths = made["max_tokens"].to_numpy()
    assert lengths.min() >= 1
    assert lengths.mean() == pytest.approx(64, rel=0.05)
    assert np.log(lengths).std() == pytest.approx(1.0, rel=0.05)
    assert with_lengths(table, 64, 1.0, 100_000).equals(made)
    assert with_lengths(table, 64, 1.0, 50)["max_tokens"].to_numpy().max() == 50
