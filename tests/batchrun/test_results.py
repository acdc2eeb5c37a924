"""The added columns."""

from datetime import UTC, datetime

import pyarrow as pa
import pytest

from batchrun.errors import Refused
from batchrun.results import RESULT_FIELDS, ResultRow, error_row, kept_columns, output_schema, result_schema, to_batch

FINE = ResultRow(0, 0, "yes", "stop", None, 5, 4, 2, *[1.5] * 8, datetime(2026, 1, 2, tzinfo=UTC), 1, [7, 2])


def test_the_columns_and_types_are_those_of_the_contract():
    expected = (
        "row_index: int64 sample: int32 output: string finish_reason: string error: string prompt_tokens: int64 "
        "cached_tokens: int64 output_tokens: int64 queue_ms: double prefill_ms: double ttft_ms: double tpot_ms: double "
        "itl_p50_ms: double itl_p99_ms: double itl_max_ms: double latency_ms: double started_at: timestamp[us, tz=UTC] "
        "run_id: int32"
    )
    assert " ".join(str(result_schema()).split("\n")) == expected
    assert result_schema(return_token_ids=True).field(-1) == pa.field("output_ids", pa.list_(pa.int32()))


def test_the_schema_is_the_same_whatever_the_rows_hold():
    for return_token_ids in (False, True):
        schema = result_schema(return_token_ids=return_token_ids)
        for rows in ([FINE], [error_row(1, "bad", 0)], []):
            assert to_batch(rows, schema).schema == schema


def test_values_land_in_their_columns():
    row = to_batch([FINE], result_schema(return_token_ids=True)).to_pylist()[0]
    assert row == {name: getattr(FINE, name) for name in (*(name for name, _ in RESULT_FIELDS), "output_ids")}


def test_an_error_row_has_no_output_no_times_and_its_reason():
    row = to_batch([error_row(3, "too long", 2, prompt_tokens=9)], result_schema()).to_pylist()[0]
    assert row.pop("row_index") == 3
    filled = {name: value for name, value in row.items() if value is not None}
    expected = {"sample": 0, "finish_reason": "error", "error": "too long", "run_id": 2}
    assert filled == {**expected, "prompt_tokens": 9, "cached_tokens": 0, "output_tokens": 0}


def test_a_lone_surrogate_becomes_a_replacement_character_and_a_pair_its_own():
    rows = [error_row(0, "fine", 0), error_row(1, "a\ud800b", 0)]
    rows[0].output = "\ud83d\ude00\udc00"
    table = to_batch(rows, result_schema())
    assert table["output"].to_pylist() == ["\U0001f600\ufffd", None]
    assert table["error"].to_pylist() == ["fine", "a\ufffdb"]


def test_the_output_has_the_input_columns_first_and_the_prefix_on_ours_only():
    schema = pa.schema([("prompt", pa.string()), ("id", pa.int32())])
    assert output_schema(schema, None, "r_", True).names[:3] == ["prompt", "id", "r_row_index"]
    assert output_schema(schema, None, "r_", True).names[-1] == "r_output_ids"
    assert output_schema(schema, ("id",)).field(0) == schema.field("id")
    assert output_schema(schema, ()).equals(result_schema())


def test_kept_columns_stay_in_input_order_and_a_misspelt_one_is_refused_with_the_nearest():
    schema = pa.schema([("prompt", pa.string()), ("domain", pa.string())])
    assert kept_columns(schema, ("domain", "prompt")) == ["prompt", "domain"]
    with pytest.raises(Refused, match=r"--keep-columns.*'domian'.*'domain'.*columns: prompt, domain"):
        kept_columns(schema, ("domian",))
