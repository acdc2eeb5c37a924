"""Latency columns against hand-computed values, and their order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrun.engine.outputs import Completion
from batchrun.metrics import Latency, latency_columns, percentile
from batchrun.results import RESULT_FIELDS, ResultRow


def completion(started: float | None, token_times: list[float], reason: str = "stop") -> Completion:
    return Completion(
        row=0,
        sample=0,
        output_ids=[1] * len(token_times),
        text="",
        finish_reason=reason,
        error="bad" if reason == "error" else None,
        prompt_tokens=1,
        cached_tokens=0,
        started=started,
        token_times=token_times,
    )


def test_columns_of_five_tokens_by_hand() -> None:
    # Gaps of 10, 20, 30 and 100 ms. The 99th percentile lies 0.97 of the way from 30 to 100: 97.9.
    latency = latency_columns(completion(2.0, [2.5, 2.51, 2.53, 2.56, 2.66]))
    assert latency == pytest.approx(
        Latency(
            queue_ms=2000.0,
            prefill_ms=500.0,
            ttft_ms=2500.0,
            tpot_ms=40.0,
            itl_p50_ms=25.0,
            itl_p99_ms=97.9,
            itl_max_ms=100.0,
            latency_ms=2660.0,
        )
    )


def test_two_tokens_have_one_gap_for_all() -> None:
    latency = latency_columns(completion(0.0, [0.25, 0.375], "length"))
    assert latency == (0.0, 250.0, 250.0, 125.0, 125.0, 125.0, 125.0, 375.0)


def test_one_token_has_no_gaps() -> None:
    assert latency_columns(completion(1.0, [1.5])) == (1000.0, 500.0, 1500.0, None, None, None, None, 1500.0)


def test_an_error_row_has_no_times_even_after_some_tokens() -> None:
    assert latency_columns(completion(None, [], "error")) == (None,) * 8
    assert latency_columns(completion(1.0, [1.5, 2.0], "error")) == (None,) * 8


def test_a_row_that_timed_out_before_its_first_token_has_its_queue_time_alone() -> None:
    assert latency_columns(completion(1.0, [], "timeout")) == Latency(queue_ms=1000.0)
    assert latency_columns(completion(None, [], "timeout")) == Latency()


def test_names_and_order_are_those_of_the_output_columns() -> None:
    columns = [name for name, _ in RESULT_FIELDS if name.endswith("_ms")]
    assert list(Latency._fields) == columns
    row = ResultRow(0, 0, "", "stop", None, 1, 0, 1, **latency_columns(completion(1.0, [1.5]))._asdict())
    assert row.ttft_ms == 1500.0


@given(st.lists(st.floats(0, 1e5), min_size=2, max_size=40).map(sorted))
def test_times_are_ordered_whatever_the_clock_said(times: list[float]) -> None:
    latency = latency_columns(completion(times[0], times[1:]))
    assert latency.queue_ms is not None
    assert latency.prefill_ms is not None
    assert latency.ttft_ms is not None
    assert latency.latency_ms is not None
    assert 0 <= latency.queue_ms <= latency.ttft_ms <= latency.latency_ms
    assert latency.prefill_ms >= 0
    assert latency.queue_ms + latency.prefill_ms == pytest.approx(latency.ttft_ms)
    if len(times) > 2:
        assert latency.tpot_ms is not None
        assert latency.itl_p50_ms is not None
        assert latency.itl_p99_ms is not None
        assert latency.itl_max_ms is not None
        assert 0 <= latency.itl_p50_ms <= latency.itl_p99_ms <= latency.itl_max_ms
        assert latency.tpot_ms <= latency.itl_max_ms * (1 + 1e-9) + 1e-6


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300), st.integers(0, 100))
def test_percentile_is_that_of_numpy(values: list[float], percent: int) -> None:
    assert percentile(sorted(values), percent) == pytest.approx(np.percentile(values, percent), rel=1e-12, abs=1e-9)
