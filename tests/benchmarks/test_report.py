"""Medians, ratios, the same-work check, and the table that is printed."""

from typing import Any

import pytest
from report import best, check_same_work, medians, ratios, report, table
from results import RunFailed


def run_of(engine: str, wall_s: float, order: str = "given", **more: Any) -> dict[str, Any]:
    values = {
        "file": "tools",
        "engine": engine,
        "order": order,
        "wall_s": wall_s,
        "rows": 12,
        "load_s": 1.0,
        "cached_tokens": 5,
        "peak_rss_bytes": 2**30,
        "others_cpu_share": 0.01,
        "temperature": 0.0,
        "prompt_tokens": 100,
        "output_tokens": 20,
        "distinct_tokens": 60,
        "floor_s": 2.0,
        "floor_prefill_s": 1.5,
        "floor_decode_s": 0.5,
        "overlapped_s": 1.75,
        "decode_bound": "memory",
        "gemm_flop_per_s": 9e11,
        "read_bytes_per_s": 2e10,
    }
    return values | more


def test_medians_are_by_engine_and_order() -> None:
    runs = [
        run_of("vllm", wall, order) for wall, order in ((9, "given"), (1, "sorted"), (4, "given"), (5, "given"), (3, "sorted"))
    ]
    assert [(median.order, median.wall_s, len(median.runs)) for median in medians(runs)] == [("given", 5, 3), ("sorted", 2, 2)]


def test_a_peer_is_judged_by_its_better_order() -> None:
    runs = [run_of("vllm", 9.0), run_of("vllm", 8.0, "sorted"), run_of("openvino", 8.5)]
    found = best(medians(runs))
    assert found is not None
    assert (found.engine, found.order) == ("vllm", "sorted")
    assert best([]) is None


def test_ratios_name_the_best_peer_and_what_sharing_brings() -> None:
    runs = [run_of("batchrun", 4.0), run_of("batchrun-unshared", 10.0), run_of("vllm", 9.0), run_of("vllm", 8.0, "sorted")]
    assert ratios(runs) == [
        "batchrun / vllm (sorted): 2.00 times the rows per second",
        "batchrun-unshared / vllm (sorted): 0.80 times the rows per second",
        "batchrun / batchrun-unshared: 2.50 times the rows per second",
    ]


def test_without_a_peer_there_is_no_ratio_to_one() -> None:
    assert ratios([run_of("batchrun", 4.0)]) == []
    assert ratios([run_of("vllm", 4.0)]) == []


@pytest.mark.parametrize(("prompt", "output"), [(101, 20), (100, 19)])
def test_other_work_than_the_file_asks_for_is_refused(prompt: int, output: int) -> None:
    check_same_work(run_of("vllm", 1.0), 100, 20)
    with pytest.raises(RunFailed, match=f"vllm did other work.*counted {prompt} prompt and {output} output tokens.* 100 and 20"):
        check_same_work(run_of("vllm", 1.0, prompt_tokens=prompt, output_tokens=output), 100, 20)


def test_the_table_has_rates_floors_and_what_an_engine_does_not_tell() -> None:
    lines = table([run_of("batchrun", 4.0), run_of("batchrun", 6.0), run_of("openvino", 8.0, cached_tokens=None)]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert cells == [
        ["batchrun", "given", "2", "5", "4.0-6.0", "2.4", "1", "1", "5", "0.4"],
        ["openvino", "given", "1", "8", "8.0-8.0", "1.5", "1", "1", "not told", "0.25"],
    ]


def test_the_report_says_what_was_run_and_at_which_rates() -> None:
    text = report([run_of("batchrun", 4.0)])
    assert "**tools**, first 12 rows, greedy: 100 prompt tokens of which 60 distinct, 20 output tokens" in text
    assert "floor 2 s: prefill 1.5, decode 0.5 (bound by memory) at 900 GFLOP/s and 20 GB/s" in text
    assert "sampled at 0.8" in report([run_of("batchrun", 4.0, temperature=0.8)])


def test_a_report_says_when_other_programs_ran() -> None:
    assert "disturbed" not in report([run_of("batchrun", 4.0)])
    runs = [run_of("batchrun", 4.0, others_cpu_share=0.02), run_of("batchrun", 5.0, others_cpu_share=0.31)]
    assert "**disturbed**: other programs took up to 31% of the processors" in report(runs)
