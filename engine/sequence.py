"""One row's state, and one sample's: computed tokens catch up with all tokens.

Who owns which keys of a sequence (token positions from left to right):

    |<-- node -->|<-- node -->|<- end node ->|<------- own pages ------->|
    |      prompt, in pages of the prefix tree      | output[:computed] | output[computed:] |
    0                                               prompt length

The prompt lies in tree nodes, shared with every row beneath them; only the output is the sequence's own. The last
output token has been sampled but its keys are computed by the next step: `output_computed < len(output_ids)` while running.
"""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from batchrun.engine.kv_pool import PageRun
from batchrun.engine.sampling_params import SamplingParams
from batchrun.engine.stopping import StopChecker
from batchrun.prefix_cache.radix import Node


class Status(Enum):
    """WAITING holds no pages; RUNNING holds its path's locks and its own pages."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class RowState:
    """What the samples of one row share."""

    row: int
    """Local row of the prompt set."""
    row_index: int
    position: int
    """Place in the row order; lower starts earlier and is preempted later."""
    params: SamplingParams
    prompt_ids: npt.NDArray[np.int32]
    end_rank: int
    """Depth-first rank of the tree node at which the prompt ends."""
    sequences: list["Sequence"] = field(default_factory=list)
    started: float | None = None
    """Engine clock at the start of the first step that computed for this row."""
    first_computed: int = 0
    """Prompt tokens that this row was the first to have computed."""
    unfinished: int = 0
    """Samples not finished."""
    waiting: int = 0
    """Samples that hold no pages and still want to run; the tree keeps the row's next use while there are any."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that other rows had computed."""
        return len(self.prompt_ids) - self.first_computed


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of a row."""

    state: RowState
    sample: int
    stopping: StopChecker
    status: Status = Status.WAITING
    path: tuple[Node, ...] = ()
    """Tree nodes of the prompt, root first; locked while RUNNING."""
    runs: list[PageRun] = field(default_factory=list)
    """Own pages, for the output's keys."""
    slots: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Slot of each output position that `runs` covers."""
    output_ids: list[int] = field(default_factory=list)
    output_computed: int = 0
    token_times: list[float] = field(default_factory=list)
    preempted: bool = False
    """Was preempted before: comes back only with room for its whole output, so that it cannot thrash."""

    @property
    def order_key(self) -> tuple[int, int]:
        """Order of admission: earlier is more important."""
        return (self.state.position, self.sample)

    @property
    def tree_key(self) -> tuple[int, int, int]:
        """Depth-first place in a step: after the end node's own tokens, before that node's children."""
        return (self.state.end_rank, self.state.position, self.sample)

    @property
    def prefilled(self) -> bool:
        """Whether every key of the prompt is there. Nodes fill from the root down, but a shared node may lag: check all."""
        return all(node.computed == node.length for node in self.path)

    @property
    def max_own_tokens(self) -> int:
        """Most output tokens whose keys are ever needed: the last one is never fed back."""
        return self.state.params.max_tokens - 1
