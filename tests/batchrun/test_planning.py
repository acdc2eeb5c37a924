"""From tokenised rows to what the engine runs: dedupe and fan-out, context, pool size, rows that never fit."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from batchrun.engine.config import ModelConfig
from batchrun.engine.outputs import PromptSet
from batchrun.engine.sampling_params import SamplingParams
from batchrun.errors import Refused
from batchrun.planning import JobPlan, KVSize, ParamsTable, Target, make_plan, prompt_set, rows_side_by_side, useful_pages

PAGE = 16
KV = KVSize(page_size=PAGE, bytes_per_token=100, memory=100 * PAGE * 1000)
GREEDY = SamplingParams(max_tokens=8)
DRAWN = SamplingParams(max_tokens=8, temperature=1.0)


@dataclass(frozen=True)
class Limits:
    kv_tokens: int | None = None
    kv_memory: int | None = None
    chunk_tokens: int | None = None
    max_running: int | None = None
    order: str = "plan"
    dedupe: bool = True
    prefix_cache: bool = True
    seed: int = 0


def prompts_of(rows: list[list[int]], params: list[SamplingParams] | SamplingParams) -> PromptSet:
    table = ParamsTable()
    chosen = [params] * len(rows) if isinstance(params, SamplingParams) else params
    ids = np.array([table.add(item) for item in chosen], np.int32)
    length = np.array([len(row) for row in rows], np.int32)
    begin = np.cumsum(length, dtype=np.int64) - length
    tokens = np.array([token for row in rows for token in row], np.int32)
    return prompt_set(tokens, begin, length, np.arange(len(rows), dtype=np.int64), table, ids)


def model(max_context: int = 512) -> ModelConfig:
    return ModelConfig("LlamaForCausalLM", 2, 64, 128, 4, 2, 16, 300, 1e-5, 1e4, None, max_context, True, (2,), 1)


def planned(
    rows: list[list[int]],
    params: list[SamplingParams] | SamplingParams = GREEDY,
    limits: Limits | None = None,
    max_context: int = 512,
) -> JobPlan:
    return make_plan(prompts_of(rows, params), model(max_context), limits or Limits(), KV)


# --- dedupe and fan-out ---------------------------------------------------------------------------------------------------


def test_identical_greedy_rows_are_computed_once_and_fanned_out_in_row_order() -> None:
    rows = [[1, 2], [3], [1, 2], [1, 2], [1, 2, 3]]
    plan = planned(rows, [GREEDY, GREEDY, GREEDY, replace(GREEDY, max_tokens=9), GREEDY])
    assert plan.prompts.row_index.tolist() == [0, 1, 3, 4]
    assert plan.fan_out(0) == [Target(0, 1), Target(2, 1)]
    assert [plan.fan_out(row) for row in (1, 3, 4)] == [[Target(1, 1)], [Target(3, 1)], [Target(4, 1)]]
    assert plan.prompt_tokens == 10
    assert plan.trie.trie_tokens == 4


def test_rows_that_draw_are_never_merged_and_keep_n_and_seed() -> None:
    plan = planned([[1, 2]] * 3, [replace(DRAWN, n=3, seed=7)] * 2 + [DRAWN])
    assert len(plan.prompts) == 3
    assert plan.prompts.params(0) == replace(DRAWN, n=3, seed=7)
    assert plan.fan_out(1) == [Target(1, 1)]
    assert plan.warnings == []


def test_greedy_samples_are_computed_once_and_written_n_times_with_one_warning() -> None:
    plan = planned([[1, 2], [1, 2], [5]], [replace(GREEDY, n=4), replace(GREEDY, n=2, seed=3), GREEDY])
    assert plan.prompts.row_index.tolist() == [0, 2]
    assert plan.prompts.params(0) == GREEDY, "a greedy row's seed changes nothing"
    assert plan.fan_out(0) == [Target(0, 4), Target(1, 2)]
    assert plan.warnings == ["2 rows are greedy with n > 1: computed once, its one output written n times"]


@pytest.mark.parametrize("limits", [Limits(dedupe=False), Limits(prefix_cache=False)])
def test_without_dedupe_every_row_is_computed(limits: Limits) -> None:
    plan = planned([[1, 2]] * 3, replace(GREEDY, n=2), limits)
    assert plan.prompts.row_index.tolist() == [0, 1, 2]
    assert plan.fan_out(2) == [Target(2, 2)]
    assert plan.trie.trie_tokens == (2 if limits.prefix_cache else 6)


def test_rows_without_tokens_are_left_out_and_row_numbers_stay_the_inputs() -> None:
    plan = planned([[], [1], [], [2], []])
    assert plan.prompts.row_index.tolist() == [1, 3]
    assert plan.prompts.token_ids(1).tolist() == [2]


def test_a_job_without_rows_has_a_plan() -> None:
    plan = planned([])
    assert (len(plan.prompts), plan.prompt_tokens, plan.config.num_pages) == (0, 0, 1)
    assert rows_side_by_side(plan, 10, depth_first=True) == 0


# --- context --------------------------------------------------------------------------------------------------------------


def test_prompts_that_leave_no_room_are_errors_that_name_both_lengths() -> None:
    plan = planned([[1] * 63, [1] * 64, [1] * 65, [1] * 60], replace(GREEDY, max_tokens=8), max_context=64)
    assert [(error.row_index, error.message) for error in plan.errors] == [
        (1, "the prompt has 64 tokens, which leaves no room for output in the model's context of 64: shorten it"),
        (2, "the prompt has 65 tokens, more than the model's context of 64: shorten it"),
    ]
    assert plan.prompts.row_index.tolist() == [0, 3]
    assert [plan.prompts.params(row).max_tokens for row in range(2)] == [1, 4], "max_tokens ends at the context"


# --- the pool -------------------------------------------------------------------------------------------------------------


def test_a_row_that_never_fits_is_an_error_with_needed_and_available_tokens() -> None:
    plan = planned([[1] * 40, [2] * 100, [2] * 100, [3] * 40], limits=Limits(kv_tokens=64))
    assert [error.row_index for error in plan.errors] == [1, 2], "the duplicate is in error as well"
    needed = -(-100 // PAGE) * PAGE + PAGE
    assert f"needs {needed} tokens of KV memory (100 prompt and up to 8 output" in plan.errors[0].message
    assert "the pool has 64" in plan.errors[0].message
    assert plan.prompts.row_index.tolist() == [0, 3]
    assert plan.fan_out(3) == [Target(3, 1)]
    assert plan.config.kv_tokens == 64


def test_rows_that_fit_in_one_piece_only_share_nothing_and_run() -> None:
    # 48 tokens take 3 pages in one piece, 4 when the path is cut after 17 tokens, where the rows part.
    rows = [[1] * 17 + [2] * 31, [1] * 48, [1] * 17, [5]]
    plan = planned(rows, SamplingParams(max_tokens=1), Limits(kv_tokens=3 * PAGE))
    assert plan.errors == []
    assert plan.layout.pages.tolist() == [3, 3, 2, 1]
    assert plan.trie.trie_tokens == 48 + 48 + 17 + 1
    assert plan.warnings == ["2 rows are computed without sharing: the KV pool is too small for a prompt in pieces"]
    assert planned(rows, SamplingParams(max_tokens=1), Limits(kv_tokens=4 * PAGE)).trie.trie_tokens == 17 + 31 + 31 + 1


def test_a_row_fits_again_when_the_one_that_split_its_path_is_gone() -> None:
    # Row 1 alone takes 3 pages; while row 0 shares its first 17 tokens, its path is cut there and takes 4.
    rows = [[1] * 17 + [2] * 200, [1] * 48]
    plan = planned(rows, SamplingParams(max_tokens=1), Limits(kv_tokens=4 * PAGE))
    assert plan.layout.pages.tolist() == [3]
    assert [error.row_index for error in plan.errors] == [0]


@pytest.mark.parametrize(
    ("limits", "pages"),
    [(Limits(kv_tokens=3 * PAGE + 15), 3), (Limits(kv_memory=2 * PAGE * 100 + 1), 2), (Limits(kv_tokens=10**6), 62500)],
)
def test_a_pool_that_is_asked_for_is_rounded_down_to_pages(limits: Limits, pages: int) -> None:
    assert planned([[1] * 8], limits=limits).config.num_pages == pages


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(kv_tokens=15), "--kv-tokens is 15, less than one page of the pool: give at least 16"),
        (Limits(kv_memory=1599), "--kv-memory is 1599 bytes, less than one page of the pool: give at least 1600"),
    ],
)
def test_a_pool_of_less_than_a_page_is_refused(limits: Limits, message: str) -> None:
    with pytest.raises(Refused, match=message):
        planned([[1]], limits=limits)


def test_the_default_pool_is_no_larger_than_the_job_can_fill() -> None:
    plan = planned([[1] * 32, [1] * 32 + [2], [3]])
    # Nodes of 2, 1 and 1 pages, an output of 7 slots for each row.
    assert plan.config.num_pages == 4 + 3


def test_the_default_pool_ends_at_the_machines_share_but_holds_one_long_row() -> None:
    rows = [[token] * 64 for token in range(1, 200)]
    plan = make_plan(prompts_of(rows, GREEDY), model(), Limits(), replace_memory(20))
    assert plan.config.num_pages == 20
    plan = make_plan(prompts_of([*rows, [500] * 400], GREEDY), model(), Limits(), replace_memory(20))
    assert (plan.config.num_pages, plan.errors) == (26, [])
    plan = make_plan(prompts_of([*rows, [500] * 400], GREEDY), model(), Limits(), replace_memory(5))
    assert [error.row_index for error in plan.errors] == [199], "four times the share is the end"
    assert "the pool has 320" in plan.errors[0].message
    assert plan.config.num_pages == 5, "without that row the share holds every other"


def replace_memory(pages: int) -> KVSize:
    return KV._replace(memory=pages * KV.page_bytes)


def test_a_pool_for_fewer_running_rows_is_smaller() -> None:
    rows = [[token] * 64 for token in range(1, 400)]
    small, large = (planned(rows, limits=Limits(max_running=count)).config for count in (4, 64))
    assert (small.num_pages, large.num_pages) == (4 * 5 * 3 // 2, 64 * 5 * 3 // 2)
    assert (small.max_running, large.max_running) == (4, 64)


def test_a_shared_path_counts_once_in_a_window_of_rows() -> None:
    rows = [[1] * 320 + [token] for token in range(2, 300)]
    plan = planned(rows, limits=Limits(max_running=10))
    assert plan.config.num_pages == (20 + 10 * 2) * 3 // 2
    given = planned(rows, limits=Limits(max_running=10, order="given"))
    assert given.config.num_pages == 10 * (21 + 1) * 3 // 2, "in the given order nothing is known to be shared"


def test_rows_side_by_side_counts_what_a_pool_holds_at_once() -> None:
    plan = planned([[1] * 320 + [token] for token in range(2, 300)])
    assert rows_side_by_side(plan, 20 + 2 * 10, depth_first=True) == 10
    assert rows_side_by_side(plan, 20 + 2 * 10 + 1, depth_first=True) == 10
    assert rows_side_by_side(plan, 10**6, depth_first=True) == 298
    assert rows_side_by_side(plan, 10, depth_first=True) == 0


def test_samples_count_with_their_own_outputs() -> None:
    plan = planned([[token] * 16 for token in range(1, 100)], replace(DRAWN, n=3), Limits(max_running=12))
    assert useful_pages(plan.layout, plan.order, True, 12) == 4 * (1 + 3) * 3 // 2
    assert plan.max_output_tokens == 99 * 3 * 8


def test_the_plan_does_not_depend_on_anything_but_its_arguments() -> None:
    rows = [[1] * (5 + token % 7) + [token] for token in range(100)]
    first, second = planned(rows), planned(rows)
    assert first.config == second.config
    assert first.order.rows.tolist() == second.order.rows.tolist()


def test_the_order_takes_the_longest_expected_output_first_and_the_seed_goes_to_the_engine() -> None:
    params = [GREEDY, replace(GREEDY, max_tokens=100), replace(DRAWN, max_tokens=40, n=4)]
    plan = planned([[1], [2], [3]], params, Limits(seed=5, chunk_tokens=64))
    assert plan.order.rows.tolist() == [2, 1, 0]
    assert (plan.config.job_seed, plan.config.chunk_tokens, plan.config.max_context) == (5, 64, 512)
    assert planned([[1], [2], [3]], params, Limits(order="given")).order.rows.tolist() == [0, 1, 2]
