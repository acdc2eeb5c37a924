"""The first four steps of a row's life: read, check, render, tokenize. What comes out lies on disk, not in memory."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from batchrun.engine.outputs import PromptSet
from batchrun.planning import ParamsTable, prompt_set
from batchrun.render import Renderer
from batchrun.rows import RowError, RowInput, RowReader
from batchrun.sources import Source
from batchrun.spool import TokenSpool


@dataclass(frozen=True, slots=True)
class Intake:
    """The rows of a source as token ids."""

    prompts: PromptSet
    """Rows that have tokens, ascending row_index; the ids are a memory map of the spool."""
    errors: list[RowError]
    """The others."""


def take_in(
    source: Source,
    reader: RowReader,
    renderer: Renderer,
    folder: Path,
    vocab_size: int,
    after_batch: Callable[[], None] = lambda: None,
) -> Intake:
    """Tokenise the whole source into a spool in `folder`, batch by batch; `after_batch` may raise to stop.

    vocab_size is the model's: a tokenizer may know more tokens than the model has embeddings.

    Raises:
        Refused: the input changed while it was read.
        Stopped: the disk is full or lost.
    """
    spool, params, errors = TokenSpool(folder), ParamsTable(), []
    params_id = np.zeros(source.num_rows, np.int32)
    first_row = 0
    for batch in source.batches(reader.columns):
        rows = reader.read(batch, first_row)
        encoded = iter(renderer.encode([row for row in rows if isinstance(row, RowInput)]))
        for row in rows:
            ids: npt.NDArray[np.int32] | RowError = row if isinstance(row, RowError) else next(encoded)
            if not isinstance(ids, RowError) and (highest := int(ids.max())) >= vocab_size:
                ids = RowError(row.row_index, f"the prompt has token {highest}: the model knows only tokens below {vocab_size}")
            if isinstance(row, RowInput):
                params_id[row.row_index] = params.add(row.params)
            if isinstance(ids, RowError):
                errors.append(ids)
                ids = np.empty(0, np.int32)
            spool.append(ids)
        first_row += batch.num_rows
        after_batch()
    row_index = np.arange(source.num_rows, dtype=np.int64)
    return Intake(prompt_set(*spool.close(), row_index, params, params_id), errors)
