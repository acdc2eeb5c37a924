"""Which tokens the next step computes. Plain Python over counts, pages and tree nodes; no tensors.

Each step:
1. *admit* rows in order while their keys fit: lock the path in the tree, give pages to nodes that have none, reserve
   the row's own pages (for its whole output unless told otherwise);
2. *decode*: every running sequence whose prompt is there catches up with its output;
3. *prefill*: running sequences, in order, fill the nodes of their paths within the budget. A node is computed once, by the
   first row that needs it; a row below a node that this step completes goes on below it in the same step.

All rows that end at a node take their first token from the step that computes the node's last token, admitted or not.
"""

import heapq
from bisect import insort
from collections import deque
from collections.abc import Callable

import numpy as np

from batchrun.engine.config import EngineConfig
from batchrun.engine.kv_pool import KVPool
from batchrun.engine.outputs import EngineStats, PromptSet
from batchrun.engine.sampling_params import SamplingParams
from batchrun.engine.sequence import RowState, Sequence, Status
from batchrun.engine.step import QueryRun, StepPlan, build_segments, slot_array, slots_between
from batchrun.engine.stopping import StopChecker
from batchrun.prefix_cache.order import RowOrder
from batchrun.prefix_cache.radix import Node, RadixTree
from batchrun.prefix_cache.trie import Trie


class Scheduler:
    """Rows in, steps out.

    Args:
        prompts: the rows; every prompt has at least one token.
        trie: their prefix tree.
        order: the order to start them in, and the tree's depth-first ranks.
        config: pool size and limits.
        new_checker: makes the stop checker of one sample.
        stats: counted here as steps are scheduled.
    """

    def __init__(
        self,
        prompts: PromptSet,
        trie: Trie,
        order: RowOrder,
        config: EngineConfig,
        new_checker: Callable[[SamplingParams], StopChecker],
        stats: EngineStats,
    ) -> None:
        self.config = config
        self.stats = stats
        self.pool = KVPool(config.num_pages, config.page_size)
        self.tree = RadixTree(trie, order, self.pool)
        self.running: list[Sequence] = []
        """In order of admission, the most important first."""
        self._prompts = prompts
        self._order = order
        self._new_checker = new_checker
        self._end_node = trie.row_node
        self._ends = np.argsort(trie.row_node, kind="stable")
        self._ends_begin = np.searchsorted(trie.row_node[self._ends], np.arange(trie.num_nodes + 1))
        self._rows: dict[int, RowState] = {}
        self._row_done = np.zeros(len(prompts), bool)
        self._cursor = 0
        self._pending: deque[Sequence] = deque()
        self._requeued: list[tuple[tuple[int, int], Sequence]] = []
        self._membership = 0
        self._segments_of = -1

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _row(self, row: int) -> RowState:
        state = self._rows.get(row)
        if state is None:
            params = self._prompts.params(row)
            state = RowState(
                row=row,
                row_index=int(self._prompts.row_index[row]),
                position=int(self._order.position[row]),
                params=params,
                prompt_ids=self._prompts.token_ids(row),
                end_rank=int(self._order.node_rank[self._end_node[row]]),
                unfinished=params.n,
                waiting=params.n,
            )
            state.sequences = [Sequence(state, sample, self._new_checker(params)) for sample in range(params.n)]
            self._rows[row] = state
        return state

    def rows_ending_at(self, node: Node) -> list[RowState]:
        """Rows whose prompt ends at this node and that have no output yet, in row order."""
        low, high = self._ends_begin[node.node_id], self._ends_begin[node.node_id + 1]
        rows = (int(row) for row in self._ends[low:high] if not self._row_done[row])
        return [state for state in map(self._row, rows) if not state.sequences[0].output_ids and state.unfinished]

    def _next_waiting(self) -> Sequence | None:
        while self._requeued and self._requeued[0][1].status is Status.FINISHED:
            heapq.heappop(self._requeued)  # preempted without a token, it got its first and last one from another row's step
        if self._requeued:
            return self._requeued[0][1]
        while True:
            while self._pending and self._pending[0].status is Status.FINISHED:
                self._pending.popleft()
            if self._pending:
                return self._pending[0]
            if self._cursor == len(self._order.rows):
                return None
            row = int(self._order.rows[self._cursor])
            self._cursor += 1
            if not self._row_done[row]:
                self._pending.extend(self._row(row).sequences)

    # -- admission ----------------------------------------------------------------------------------------------------

    def admit(self) -> Sequence | None:
        """Start waiting sequences while they fit. Returns one that can never fit, when nothing else holds the pool."""
        while len(self.running) < self.config.max_running:
            sequence = self._next_waiting()
            if sequence is None:
                return None
            if not self._try_start(sequence):
                return None if self.running else sequence
            if self._requeued and self._requeued[0][1] is sequence:
                heapq.heappop(self._requeued)
            else:
                self._pending.popleft()
        return None

    def _try_start(self, sequence: Sequence) -> bool:
        state = sequence.state
        path = self.tree.path(state.row)
        self.tree.lock(path)
        own_pages = self._pages(self._own_tokens_wanted(sequence))
        evicted = self.tree.make_room(self.tree.missing_pages(path) + own_pages)
        if evicted is None:
            self.tree.release(path)
            return False
        self.stats.evictions = self.tree.evictions
        self.tree.allocate(path)
        sequence.path = path
        self._give_pages(sequence, own_pages)
        sequence.status = Status.RUNNING
        self._no_longer_waiting(state)
        insort(self.running, sequence, key=lambda s: s.order_key)
        self._membership += 1
        self.stats.peak_running = max(self.stats.peak_running, len(self.running))
        return True

    def pages_needed(self, sequence: Sequence) -> int:
        """Pages that the sequence holds with its longest output, its whole path counted as its own."""
        path = self.tree.path(sequence.state.row)
        return sum(self._pages(node.length) for node in path) + self._pages(sequence.max_own_tokens)

    def _no_longer_waiting(self, state: RowState) -> None:
        state.waiting -= 1
        if not state.waiting and state.unfinished:
            self.tree.row_started(state.row)

    def _own_tokens_wanted(self, sequence: Sequence) -> int:
        if self.config.reserve_output or sequence.preempted:
            return sequence.max_own_tokens
        return min(len(sequence.output_ids) + 1, sequence.max_own_tokens)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.config.page_size)

    def _give_pages(self, sequence: Sequence, pages: int) -> None:
        if pages:
            runs = self.pool.allocate(pages)
            assert runs is not None, f"{pages} pages promised, {self.pool.free_pages} free"
            sequence.runs = sequence.runs + runs
            sequence.slots = slot_array(sequence.runs, self.config.page_size)
            self._membership += 1

    # -- memory while running -----------------------------------------------------------------------------------------

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Own pages for `tokens` output tokens, evicting and then preempting later rows; False: it was preempted itself."""
        while (missing := self._pages(tokens) - self._pages(len(sequence.slots))) > 0:
            if self.tree.make_room(missing) is not None:
                self.stats.evictions = self.tree.evictions
                self._give_pages(sequence, missing)
                break
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.stats.preemptions += 1
        self._let_go(sequence)
        sequence.status = Status.WAITING
        sequence.preempted = True
        sequence.output_computed = 0
        heapq.heappush(self._requeued, (sequence.order_key, sequence))
        sequence.state.waiting += 1
        if sequence.state.waiting == 1:
            self.tree.row_requeued(sequence.state.row)

    def _let_go(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._membership += 1
        self.pool.release(sequence.runs)
        sequence.runs = []
        sequence.slots = sequence.slots[:0]
        self.tree.release(sequence.path)
        sequence.path = ()

    def finish(self, sequence: Sequence) -> None:
        """Free what the sequence holds; its row leaves the tree with its last sample."""
        state = sequence.state
        state.unfinished -= 1
        if sequence.status is Status.RUNNING:
            self._let_go(sequence)
        else:
            self._no_longer_waiting(state)
        sequence.status = Status.FINISHED
        if not state.unfinished:
            self._row_done[state.row] = True
            del self._rows[state.row]
            self.tree.row_finished(state.row)

    # -- the step -----------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None when no sequence is running and none waits. `now` stamps rows that start in it."""
        runs = self._decode_runs()
        prompt_tokens = self._prefill_runs(runs, now)
        if not runs:
            return None
        runs.sort(key=lambda run: run.step_order)
        self.stats.steps += 1
        self.stats.decode_steps += prompt_tokens == 0
        self.stats.peak_kv_tokens = max(self.stats.peak_kv_tokens, self.pool.peak_used_pages * self.config.page_size)
        return self._plan(runs, prompt_tokens)

    def _decode_runs(self) -> list[QueryRun]:
        runs: list[QueryRun] = []
        for sequence in list(self.running):
            if sequence.status is not Status.RUNNING or not sequence.output_ids or not sequence.prefilled:
                continue
            first, total = sequence.output_computed, len(sequence.output_ids)
            count = min(total - first, self.config.chunk_tokens)
            if not self._grow(sequence, first + count):
                continue
            self.stats.recomputed_output_tokens += min(count, total - 1 - first)
            sequence.output_computed += count
            runs.append(
                QueryRun(
                    tree_key=sequence.tree_key,
                    ancestors=sequence.path,
                    token_ids=np.array(sequence.output_ids[first : first + count], np.int32),
                    first_position=len(sequence.state.prompt_ids) + first,
                    slots=sequence.slots[first : first + count],
                    own_runs=sequence.runs,
                    first_own=first,
                    wants_logits=first + count == total,
                    source=sequence,
                )
            )
        return runs

    def _prefill_runs(self, runs: list[QueryRun], now: float) -> int:
        budget = self.config.chunk_tokens
        for sequence in self.running:
            if budget == 0:
                break
            for depth, node in enumerate(sequence.path):
                if node.computed == node.length:
                    continue
                count = min(node.length - node.computed, budget)
                runs.append(self._node_run(sequence, depth, count, now))
                budget -= count
                if budget == 0 or node.computed < node.length:
                    break
        return self.config.chunk_tokens - budget

    def _node_run(self, sequence: Sequence, depth: int, count: int, now: float) -> QueryRun:
        state, node = sequence.state, sequence.path[depth]
        first = node.computed
        again = max(0, min(node.high_water, first + count) - first)
        self.stats.computed_prompt_tokens += count
        self.stats.recomputed_tokens += again
        if again < count:
            state.first_computed += count - again
            if state.started is None:
                state.started = now
        node.computed = first + count
        node.high_water = max(node.high_water, node.computed)
        position = node.start + first
        return QueryRun(
            tree_key=(node.rank, -1, 0),
            ancestors=sequence.path[:depth],
            token_ids=state.prompt_ids[position : position + count],
            first_position=position,
            slots=slots_between(node.runs, self.config.page_size, first, count),
            own_runs=node.runs,
            first_own=first,
            wants_logits=node.computed == node.length and bool(self.rows_ending_at(node)),
            source=node,
        )

    def _plan(self, runs: list[QueryRun], prompt_tokens: int) -> StepPlan:
        counts = np.array([len(run.token_ids) for run in runs])
        ends = np.cumsum(counts)
        plain_decode = not prompt_tokens and int(counts.max()) == 1
        unchanged = plain_decode and self._segments_of == self._membership
        self._segments_of = self._membership if plain_decode else -1
        return StepPlan(
            runs=runs,
            token_ids=np.concatenate([run.token_ids for run in runs]).astype(np.int64),
            positions=np.concatenate([np.arange(run.first_position, run.first_position + len(run.slots)) for run in runs]),
            slots=np.concatenate([run.slots for run in runs]),
            logit_rows=np.array([end - 1 for run, end in zip(runs, ends, strict=True) if run.wants_logits], np.int64),
            segments=None if unchanged else build_segments(runs, self.config.page_size),
            prompt_tokens=prompt_tokens,
        )

    # -- tests --------------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Free + used = total, page counts = owners, nothing locked without a running sequence beneath."""
        self.tree.check_integrity([sequence.runs for sequence in self.running])
        locks: dict[int, int] = {}
        for sequence in self.running:
            for node in sequence.path:
                locks[id(node)] = locks.get(id(node), 0) + 1
        for node in self.tree.resident_nodes():
            assert node.locks == locks.get(id(node), 0), (
                f"node {node.node_id}: {node.locks} locks, {locks.get(id(node), 0)} owners"
            )
