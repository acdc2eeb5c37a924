"""The loop: schedule, run, sample, collect."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch

from batchrun.engine.config import EngineConfig
from batchrun.engine.loader import LoadedModel
from batchrun.engine.outputs import Completion, EngineStats, PromptSet, StepRecord
from batchrun.engine.runner import Runner
from batchrun.engine.sampler import Sampler, SampleRow
from batchrun.engine.sampling_params import SamplingParams
from batchrun.engine.scheduler import Scheduler
from batchrun.engine.sequence import Sequence, Status
from batchrun.engine.step import StepPlan
from batchrun.engine.step_profile import StepProfiler
from batchrun.engine.stopping import StopChecker
from batchrun.prefix_cache.order import RowOrder
from batchrun.prefix_cache.radix import Node
from batchrun.prefix_cache.trie import Trie

SAMPLED_AT_ONCE = 512
"""Rows of logits given to the sampler in one call: at a vocabulary of 50,000 and in bfloat16 they take 50 MB."""


class Engine:
    """Runs a planned set of prompts to the end; token ids in, completions out.

    Args:
        model: a loaded model.
        config: pool and limits; `config.num_pages` pages are allocated here.
        clock: seconds, monotonic.
    """

    def __init__(self, model: LoadedModel, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.model = model
        self.config = config
        self.stats = EngineStats()
        self.running = 0
        """Sequences that hold pages now."""
        self.kv_used_share = 0.0
        self._clock = clock
        self._runner = Runner(model, config.num_pages, config.kv_dtype)
        self._sampler = Sampler(config.job_seed, model.config.vocab_size)
        self._eos_ids = frozenset(model.config.eos_ids)

    def run(
        self, prompts: PromptSet, trie: Trie, order: RowOrder, on_step: Callable[[StepRecord], None] | None = None
    ) -> Iterator[list[Completion]]:
        """Yield after every step what it finished (maybe nothing). Greedy rows give the same tokens in any batch up to
        rounding; sampled rows draw from (seed, row, sample, position) alone.

        Stopping early is closing the iterator. A row that cannot fit is a Completion with an error. `on_step` gets the
        profile of each step, which is measured only then.
        """
        self.stats = EngineStats()

        def new_checker(params: SamplingParams) -> StopChecker:
            return StopChecker(params, self._eos_ids, self.model.tokenizer)

        scheduler = Scheduler(prompts, trie, order, self.config, new_checker, self.stats)
        zero = self._clock()
        profiler = StepProfiler(on_step) if on_step else None
        part = profiler.part if profiler else _unmeasured
        while True:
            now = self._clock() - zero
            if profiler:
                profiler.begin(self.stats.steps, now)
            with part("schedule"):
                unfit = scheduler.admit()
                step = None if unfit else scheduler.schedule(now)
            if unfit:
                yield self._refuse(scheduler, unfit)
                continue
            if step is None:
                return
            if profiler:
                profiler.count(step, len(scheduler.running), scheduler.pool.used_pages * self.config.page_size)
            with profiler.forward() if profiler else nullcontext():
                logits = self._runner.execute(step)
            with part("sample"):
                takers = _takers(scheduler, step)
                tokens = self._sample(logits, takers)
            with part("collect"):
                finished = self._collect(scheduler, takers, tokens, now, self._clock() - zero)
            self.running = len(scheduler.running)
            self.kv_used_share = scheduler.pool.used_pages / self.config.num_pages
            if self.config.check_integrity:
                scheduler.check_integrity()
            with part("write"):
                yield finished
            if profiler:
                profiler.end()

    def _sample(self, logits: torch.Tensor, takers: list[tuple[int, Sequence]]) -> list[int | None]:
        """The takers' tokens. Many samples can take theirs from one row of logits: that row is not copied for all at once."""
        tokens: list[int | None] = []
        for low in range(0, len(takers), SAMPLED_AT_ONCE):
            part = takers[low : low + SAMPLED_AT_ONCE]
            index = [row for row, _ in part]
            own = logits if index == list(range(len(logits))) else logits[index]
            tokens += self._sampler.sample(own, [_sample_row(sequence) for _, sequence in part])
        return tokens

    def _collect(
        self, scheduler: Scheduler, takers: list[tuple[int, Sequence]], tokens: list[int | None], began: float, ended: float
    ) -> list[Completion]:
        finished = []
        for (_, sequence), token in zip(takers, tokens, strict=True):
            if token is None:
                finished.append(_failed(sequence, "the model gave logits that are not finite for this row"))
                scheduler.finish(sequence)
                continue
            if sequence.state.started is None:
                sequence.state.started = began
            sequence.output_ids.append(token)
            sequence.token_times.append(ended)
            self.stats.output_tokens += 1
            reason = sequence.stopping.push(token, len(sequence.output_ids))
            if reason is not None:
                finished.append(_completed(sequence, reason))
                scheduler.finish(sequence)
        return finished

    def _refuse(self, scheduler: Scheduler, sequence: Sequence) -> list[Completion]:
        needed = scheduler.pages_needed(sequence) * self.config.page_size
        available = self.config.num_pages * self.config.page_size
        message = f"the row needs {needed} KV tokens and the pool has {available}: raise --kv-tokens or lower --max-tokens"
        unfinished = [sample for sample in sequence.state.sequences if sample.status is not Status.FINISHED]
        for sample in unfinished:
            scheduler.finish(sample)
        return [_failed(sample, message) for sample in unfinished]


def _unmeasured(_: str) -> AbstractContextManager[None]:
    return nullcontext()


def _takers(scheduler: Scheduler, step: StepPlan) -> list[tuple[int, Sequence]]:
    """(row of the logits, sequence that takes a token from it): one per decoding row, all samples of all rows that end at a
    node whose last token was computed."""
    takers: list[tuple[int, Sequence]] = []
    index = 0
    for run in step.runs:
        if run.wants_logits:
            if isinstance(run.source, Node):
                for state in scheduler.rows_ending_at(run.source):
                    takers.extend((index, sequence) for sequence in state.sequences)
            else:
                takers.append((index, run.source))
            index += 1
    return takers


def _sample_row(sequence: Sequence) -> SampleRow:
    state = sequence.state
    return SampleRow(
        params=state.params,
        row_index=state.row_index,
        sample=sequence.sample,
        position=len(sequence.output_ids),
        prompt_ids=state.prompt_ids,
        output_ids=sequence.output_ids,
    )


def _completed(sequence: Sequence, reason: str) -> Completion:
    state = sequence.state
    return Completion(
        row=state.row_index,
        sample=sequence.sample,
        output_ids=sequence.output_ids,
        text=sequence.stopping.final_text(sequence.output_ids),
        finish_reason=reason,
        error=None,
        prompt_tokens=len(state.prompt_ids),
        cached_tokens=state.cached_tokens,
        started=state.started,
        token_times=sequence.token_times,
    )


def _failed(sequence: Sequence, message: str) -> Completion:
    state = sequence.state
    return Completion(
        row=state.row_index,
        sample=sequence.sample,
        output_ids=[],
        text="",
        finish_reason="error",
        error=message,
        prompt_tokens=len(state.prompt_ids),
        cached_tokens=0,
    )
