"""The columns that a run adds: their names, order and Arrow types, fixed before the first row.

An error row has a null `output`, finish_reason 'error', its reason in `error`, null times, 0 cached and output tokens, and
the prompt's tokens where they are known (else 0).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches

import pyarrow as pa

from batchrun.errors import Refused

RESULT_FIELDS: tuple[tuple[str, pa.DataType], ...] = (
    ("row_index", pa.int64()),
    ("sample", pa.int32()),
    ("output", pa.string()),
    ("finish_reason", pa.string()),
    ("error", pa.string()),
    ("prompt_tokens", pa.int64()),
    ("cached_tokens", pa.int64()),
    ("output_tokens", pa.int64()),
    ("queue_ms", pa.float64()),
    ("prefill_ms", pa.float64()),
    ("ttft_ms", pa.float64()),
    ("tpot_ms", pa.float64()),
    ("itl_p50_ms", pa.float64()),
    ("itl_p99_ms", pa.float64()),
    ("itl_max_ms", pa.float64()),
    ("latency_ms", pa.float64()),
    ("started_at", pa.timestamp("us", "UTC")),
    ("run_id", pa.int32()),
)
OUTPUT_IDS_FIELD = ("output_ids", pa.list_(pa.int32()))


@dataclass(slots=True)
class ResultRow:
    """One sample of one input row, as it is written; the fields are the columns of RESULT_FIELDS in order."""

    row_index: int
    sample: int
    output: str | None
    finish_reason: str
    error: str | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_ms: float | None = None
    prefill_ms: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    itl_p50_ms: float | None = None
    itl_p99_ms: float | None = None
    itl_max_ms: float | None = None
    latency_ms: float | None = None
    started_at: datetime | None = None
    """With a time zone."""
    run_id: int = 0
    output_ids: Sequence[int] | None = None
    """Written only with --return-token-ids."""


def error_row(row_index: int, message: str, run_id: int, *, sample: int = 0, prompt_tokens: int = 0) -> ResultRow:
    """The result of a row that failed."""
    return ResultRow(row_index, sample, None, "error", message, prompt_tokens, 0, 0, run_id=run_id)


def result_schema(prefix: str = "", return_token_ids: bool = False) -> pa.Schema:
    """The added columns alone, `prefix` before each name."""
    fields = (*RESULT_FIELDS, OUTPUT_IDS_FIELD) if return_token_ids else RESULT_FIELDS
    return pa.schema([(prefix + name, kind) for name, kind in fields])


def kept_columns(schema: pa.Schema, keep: Iterable[str] | None) -> list[str]:
    """The input columns to carry over, in the input's order; None keeps all.

    Raises:
        Refused: --keep-columns names a column that there is not.
    """
    if keep is None:
        return list(schema.names)
    wanted = set(keep)
    for name in sorted(wanted):
        if name not in schema.names:
            raise Refused(f"--keep-columns: {no_such_column(name, schema.names)}")
    return [name for name in schema.names if name in wanted]


def no_such_column(name: str, names: Sequence[str]) -> str:
    """The words for a column that is not there: the nearest name, and the names there are."""
    near = get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"there is no column {name!r}: {hint}columns: {', '.join(names)}"


def output_schema(
    schema: pa.Schema, keep: Iterable[str] | None = None, prefix: str = "", return_token_ids: bool = False
) -> pa.Schema:
    """The output's schema: the kept input columns unchanged, then the added ones."""
    kept = [schema.field(name) for name in kept_columns(schema, keep)]
    return pa.schema([*kept, *result_schema(prefix, return_token_ids)])


def to_batch(rows: Sequence[ResultRow], schema: pa.Schema) -> pa.RecordBatch:
    """The rows as a batch of `schema` (a result_schema; its length says whether output_ids belong to it).

    Lone surrogates in texts become U+FFFD.
    """
    names = [name for name, _ in (*RESULT_FIELDS, OUTPUT_IDS_FIELD)[: len(schema)]]
    arrays = [_column([getattr(row, name) for row in rows], item.type) for name, item in zip(names, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _column(values: list[object], kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:
        return pa.array([_encodable(value) if isinstance(value, str) else value for value in values], kind)


def _encodable(text: str) -> str:
    """Pairs of surrogates become their character, lone ones U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
