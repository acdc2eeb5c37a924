"""The scheduler's steps, checked key by key without a model.

A symbolic runner stands in for the device: it stores in each slot which token at which position was written there, and
checks that every query of a step sees exactly the keys of its own history. Its "logits" are a function of that history, so
that outputs can be compared with each row computed alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchrun.engine import engine as engine_module
from batchrun.engine import step as step_module
from batchrun.engine.config import EngineConfig
from batchrun.engine.engine import Engine
from batchrun.engine.outputs import Completion, PromptSet
from batchrun.engine.sampler import Sampler, SampleRow
from batchrun.engine.sampling_params import SamplingParams
from batchrun.engine.step import KeySegment, StepPlan
from batchrun.prefix_cache.order import order_rows
from batchrun.prefix_cache.trie import build_trie

VOCAB = 13


def next_token(history: tuple[int, ...]) -> int:
    """A stand-in for a model: some function of the whole history."""
    state = 7
    for token in history:
        state = (state * 31 + token + 1) % 1_000_003
    return state % VOCAB


class SymbolicRunner:
    """Checks visibility; see the module's docstring."""

    def __init__(self, model: object, num_pages: int, kv_dtype: str) -> None:
        self.written: dict[int, tuple[int, int]] = {}
        self.segments: list[KeySegment] = []

    def execute(self, step: StepPlan) -> torch.Tensor:
        if step.segments is None:
            self.segments = [s._replace(num_keys=s.num_keys + 1) if s.causal and s.query_count == 1 else s for s in self.segments]
        else:
            self.segments = step.segments
            shared = [tuple(segment.runs) for segment in step.segments if not segment.causal]
            assert len(set(shared)) == len(shared), "the keys of a node are read more than once"
        for slot, position, token in zip(step.slots, step.positions, step.token_ids, strict=True):
            self.written[int(slot)] = (int(position), int(token))
        seen: list[list[tuple[int, int]]] = [[] for _ in step.token_ids]
        assert all(len(run.token_ids) for run in step.runs), "a run of no tokens"
        for segment in self.segments:
            slots = [slot for first, size in segment.runs for slot in range(first, first + size)]
            for query in range(segment.query_count):
                num_keys = segment.num_keys - (segment.query_count - 1 - query if segment.causal else 0)
                seen[segment.query_start + query].extend(self.written[slot] for slot in slots[:num_keys])
        histories = []
        for keys, position, token in zip(seen, step.positions, step.token_ids, strict=True):
            keys.sort()
            assert [at for at, _ in keys] == list(range(position + 1)), (
                f"query at {position} sees positions {[at for at, _ in keys]}"
            )
            assert keys[-1][1] == token
            histories.append(tuple(token for _, token in keys))
        logits = torch.zeros(len(step.logit_rows), VOCAB)
        for row, index in enumerate(step.logit_rows):
            logits[row, next_token(histories[index])] = 1.0
        return logits


@dataclass
class Outcome:
    engine: Engine
    completions: dict[tuple[int, int], Completion]


def run(monkeypatch: pytest.MonkeyPatch, prompts: list[list[int]], max_tokens: list[int], **options: object) -> Outcome:
    settings_ = {
        "num_pages": 64,
        "page_size": 4,
        "max_running": 8,
        "chunk_tokens": 8,
        "max_context": 10_000,
        "check_integrity": True,
    }
    order = options.pop("order", "plan")
    shared = options.pop("shared", True)
    samples = options.pop("n", 1)
    config = EngineConfig(**{**settings_, **options})  # type: ignore[arg-type]
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    begin = np.cumsum([0, *lengths[:-1]]).astype(np.int64)
    tokens = np.array([token for prompt in prompts for token in prompt], np.int32)
    table = [SamplingParams(max_tokens=count, n=samples) for count in max_tokens]  # type: ignore[arg-type]
    ids = np.arange(len(prompts))
    prompt_set = PromptSet(tokens, begin, lengths, ids + 100, ids.astype(np.int32), table)
    trie = build_trie(tokens, begin, lengths, shared=bool(shared))
    row_order = order_rows(trie, np.array(max_tokens, np.float64), str(order))
    monkeypatch.setattr(engine_module, "Runner", SymbolicRunner)
    model = SimpleNamespace(
        config=SimpleNamespace(vocab_size=VOCAB, eos_ids=(0,)),
        tokenizer=SimpleNamespace(decode=lambda ids, skip_special=True: ""),
    )
    engine = Engine(model, config)  # type: ignore[arg-type]
    completions: dict[tuple[int, int], Completion] = {}
    for finished in engine.run(prompt_set, trie, row_order):
        for completion in finished:
            key = (completion.row - 100, completion.sample)
            assert key not in completions
            completions[key] = completion
    return Outcome(engine, completions)


def alone(prompt: list[int], max_tokens: int) -> list[int]:
    history, output = tuple(prompt), []
    while len(output) < max_tokens:
        output.append(next_token((*history, *output)))
        if output[-1] == 0:
            break
    return output


PROMPTS = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=24), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(
    prompts=PROMPTS,
    lengths=st.lists(st.integers(1, 9), min_size=12, max_size=12),
    order=st.sampled_from(["plan", "given"]),
    reserve=st.booleans(),
    shared=st.booleans(),
    n=st.sampled_from([1, 3]),
    pool=st.sampled_from([(33, 1), (40, 1), (300, 1), (20, 4), (64, 4)]),
    chunk=st.sampled_from([1, 5, 64]),
    running=st.sampled_from([1, 3, 50]),
    long_run=st.sampled_from([1, 3, 32]),
)
@example(  # a row is preempted, and finishes while it waits to run again
    prompts=[*[[1]] * 3, [2, 1, 1, 1], *[[2, 1, 1, 2, 2, 1, 2, 1, 1, 1, 1]] * 2, [1, 1, 2, *[1] * 14], [2, 1, 1, 1, 1], [1] * 16],
    lengths=[1, 1, 1, 1, 2, 2, 6, 2, 3, 1, 1, 1],
    order="plan",
    reserve=False,
    shared=True,
    n=1,
    pool=(20, 4),
    chunk=5,
    running=50,
    long_run=1,
)
def test_every_row_equals_itself_alone_whatever_the_batch(
    prompts: list[list[int]],
    lengths: list[int],
    order: str,
    reserve: bool,
    shared: bool,
    n: int,
    pool: tuple[int, int],
    chunk: int,
    running: int,
    long_run: int,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_module, "LONG_RUN", long_run)
        outcome = run(
            patch, prompts, lengths[: len(prompts)], order=order, shared=shared, n=n, num_pages=pool[0], page_size=pool[1],
            chunk_tokens=chunk, max_running=running, reserve_output=reserve,
        )  # fmt: skip
    assert sorted(outcome.completions) == [(row, sample) for row in range(len(prompts)) for sample in range(n)]
    for (row, _), completion in outcome.completions.items():
        assert completion.output_ids == alone(prompts[row], lengths[row])
        assert completion.error is None
    stats = outcome.engine.stats
    distinct = build_trie_tokens(prompts) if shared else sum(map(len, prompts))
    assert stats.computed_prompt_tokens - stats.recomputed_tokens == distinct
    cached = {row: completion.cached_tokens for (row, _), completion in outcome.completions.items()}
    assert sum(len(prompts[row]) - cached[row] for row in cached) == distinct
    if order == "plan" and reserve and pool in {(300, 1), (64, 4)}:
        assert stats.recomputed_tokens == stats.recomputed_output_tokens == stats.preemptions == 0


def build_trie_tokens(prompts: list[list[int]]) -> int:
    return len({tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)})


@pytest.mark.parametrize("chunk", [3, 8, 64])
def test_small_pool_without_reserved_output_evicts_and_preempts_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    # Chunks below the 20 output tokens make a preempted row catch up in several steps.
    prompts = [[1 + (row % 4) // 2, 1 + row % 2] * 10 + [1 + row % 7] * 3 for row in range(40)]
    lengths = [20] * 40
    small = run(
        monkeypatch, prompts, lengths, order="given", num_pages=32, max_running=16, chunk_tokens=chunk, reserve_output=False
    )
    assert small.engine.stats.evictions > 0
    assert small.engine.stats.preemptions > 0
    big = run(
        monkeypatch, prompts, lengths, order="given", num_pages=4096, max_running=16, chunk_tokens=chunk, reserve_output=False
    )
    assert big.engine.stats.evictions == big.engine.stats.preemptions == 0
    assert {key: c.output_ids for key, c in small.completions.items()} == {
        key: c.output_ids for key, c in big.completions.items()
    }
    stats = small.engine.stats
    assert stats.computed_prompt_tokens - stats.recomputed_tokens == build_trie_tokens(prompts)
    assert stats.steps <= 20 * big.engine.stats.steps


def test_plan_order_in_a_pool_of_one_path_computes_each_distinct_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[1] * 16 + [2 + row // 4] * 8 + [2 + row] * 4 for row in range(16)]
    outcome = run(monkeypatch, prompts, [4] * 16, num_pages=9, max_running=16)
    stats = outcome.engine.stats
    assert stats.computed_prompt_tokens == build_trie_tokens(prompts)
    assert stats.recomputed_tokens == stats.evictions == 0


def test_row_that_can_never_fit_fails_alone_and_names_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = run(monkeypatch, [[1, 2], [3] * 100, [1, 2, 3]], [4, 4, 4], num_pages=8)
    assert outcome.completions[1, 0].error is not None
    assert "104" in outcome.completions[1, 0].error
    assert "32" in outcome.completions[1, 0].error
    assert [outcome.completions[row, 0].output_ids for row in (0, 2)] == [alone([1, 2], 4), alone([1, 2, 3], 4)]


def test_rows_sharing_a_prefix_in_one_step_compute_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = run(monkeypatch, [[1] * 5 + [2 + row] for row in range(4)], [1] * 4, chunk_tokens=64)
    assert outcome.engine.stats.steps == 1
    assert outcome.engine.stats.computed_prompt_tokens == 9
    assert outcome.engine.stats.decode_steps == 0


def test_rows_of_equal_prompts_take_their_first_token_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = run(monkeypatch, [[1, 2, 3]] * 5, [3] * 5, max_running=1)
    assert len({completion.token_times[0] for completion in outcome.completions.values()}) == 1
    assert [outcome.completions[row, 0].cached_tokens for row in range(5)] == [0, 3, 3, 3, 3]


def test_keys_of_a_node_are_read_once_while_rows_decode_and_prefill_beneath_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nodes long enough to be read apart; few tokens per step, so that early rows decode while later ones are prefilled.
    prompts = [[1] * 300 + [2 + row // 3] * 60 + [9 + row % 3] * 2 for row in range(9)]
    outcome = run(monkeypatch, prompts, [12] * 9, num_pages=400, max_running=9, chunk_tokens=40)
    assert {key: c.output_ids for key, c in outcome.completions.items()} == {
        (row, 0): alone(prompt, 12) for row, prompt in enumerate(prompts)
    }


def test_a_long_run_has_one_segment_and_the_short_ones_share_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    segments: list[list[KeySegment]] = []

    class Recorder(SymbolicRunner):
        def execute(self, step: StepPlan) -> torch.Tensor:
            segments.append(step.segments or [])
            return super().execute(step)

    monkeypatch.setattr(f"{__name__}.SymbolicRunner", Recorder)
    prompts = [[1] * 64 + [2 + row % 2] * 40 + [4 + row] * 2 for row in range(4)]
    run(monkeypatch, prompts, [1] * 4, num_pages=400, chunk_tokens=400)
    (step,) = segments
    sizes = sorted((segment.query_count, segment.num_keys, segment.causal) for segment in step)
    ends, shared, long = [(2, 2, True)] * 4, [(4, 40, False)] * 2 + [(8, 64, False)], [(40, 104, True)] * 2 + [(64, 64, True)]
    assert sizes == sorted(ends + shared + long)


def test_many_samples_of_one_prompt_are_not_given_its_logits_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    class Recorder(Sampler):
        def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int | None]:
            sizes.append(len(logits))
            return super().sample(logits, rows)

    monkeypatch.setattr(engine_module, "Sampler", Recorder)
    monkeypatch.setattr(engine_module, "SAMPLED_AT_ONCE", 3)
    outcome = run(monkeypatch, [[1, 2], [1, 2], [2]], [4] * 3, n=5)
    assert max(sizes) == 3
    assert sum(sizes) == outcome.engine.stats.output_tokens == sum(len(c.output_ids) for c in outcome.completions.values())
    assert {key: c.output_ids for key, c in outcome.completions.items()} == {
        (row, sample): alone(prompt, 4) for row, prompt in enumerate([[1, 2], [1, 2], [2]]) for sample in range(5)
    }
