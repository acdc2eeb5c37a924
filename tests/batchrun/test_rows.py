"""What a row says, and what is wrong with it."""

import json
import re
from datetime import datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from batchrun.engine.sampling_params import SamplingParams
from batchrun.errors import Refused
from batchrun.options import PromptOptions
from batchrun.results import output_schema
from batchrun.rows import RowError, RowInput, RowReader, check_input_columns

HI = [{"role": "user", "content": "hi"}]


def bad_text(*cells: bytes, kind: pa.DataType | None = None) -> pa.Array:
    offsets = np.cumsum([0, *map(len, cells)]).astype(np.int32)
    array = pa.Array.from_buffers(pa.string(), len(cells), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(cells))])
    return array if kind is None else array.cast(kind)


def read(columns: dict, prompt: PromptOptions = PromptOptions(), defaults: SamplingParams = SamplingParams(), **options):  # noqa: B008
    batch = pa.RecordBatch.from_pydict(columns)
    reader = RowReader(batch.schema, prompt, defaults, **options)
    return reader.read(batch.select(reader.columns), 100)


def fault(columns: dict, *options) -> str:
    (row,) = read(columns, *options)
    assert isinstance(row, RowError), row
    assert row.row_index == 100
    return row.message


# --- which columns ---------------------------------------------------------------------------------------------------------


def test_the_default_columns_are_found():
    assert read({"prompt": ["a"], "x": [1]}) == [RowInput(100, "a", None, None, None, SamplingParams())]
    assert read({"messages": [HI], "tools": ['[{"type": "function"}]']}) == [
        RowInput(100, None, HI, [{"type": "function"}], None, SamplingParams())
    ]


@pytest.mark.parametrize(
    ("columns", "prompt", "words"),
    [
        ({"prompt": ["a"], "messages": [HI]}, PromptOptions(), "--prompt-column prompt or --messages-column messages"),
        ({"question": ["a"], "id": [1]}, PromptOptions(), "columns: question, id"),
        ({"question": ["a"]}, PromptOptions(prompt_column="qestion"), "--prompt-column.*'qestion'.*did you mean 'question'"),
        ({"question": ["a"]}, PromptOptions(messages_column="chat"), "--messages-column.*'chat'.*columns: question"),
        ({"prompt": ["a"]}, PromptOptions(tools_column="tols"), "--tools-column.*'tols'"),
        ({"messages": [HI]}, PromptOptions(raw=True), "--raw needs prompts that are text"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(columns, prompt, words):
    with pytest.raises(Refused, match=words):
        read(columns, prompt)


def test_one_of_prompt_and_messages_can_be_chosen():
    columns = {"prompt": ["a"], "messages": [HI]}
    assert read(columns, PromptOptions(prompt_column="prompt"))[0].prompt == "a"
    assert read(columns, PromptOptions(messages_column="messages"))[0].messages == HI


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        (pa.array([b"a"]), "binary"),
        (pa.array([float("nan")]), "double"),
        (pa.array([1]), "int64"),
        (pa.array([True]), "bool"),
        (pa.array([HI]), "list<item: struct<"),
        (pa.array([1]).dictionary_encode(), "dictionary<values=int64"),
    ],
)
def test_a_prompt_column_of_a_wrong_kind_is_refused_by_name(column, kind):
    with pytest.raises(Refused, match=f"column 'prompt' is {kind}"):
        read({"prompt": column})


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(1)], ids=str)
@pytest.mark.parametrize("name", ["prompt", "messages", "tools"])
def test_a_column_of_bytes_is_refused_with_the_way_to_make_text_of_it(name, kind):
    columns = {"prompt": ["a"], name: pa.array([b"a"], kind)}
    prompt = PromptOptions(messages_column="messages") if name == "messages" else PromptOptions()
    with pytest.raises(
        Refused, match=re.escape(f"in DuckDB by decode(\"{name}\"), in pyarrow by table['{name}'].cast('string')")
    ):
        read(columns, prompt)


@pytest.mark.parametrize("name", ["messages", "tools"])
@pytest.mark.parametrize("column", [pa.array([1]), pa.array([[1]]), pa.array([b"[]"]), pa.array([{"role": "user"}])])
def test_messages_and_tools_of_a_wrong_kind_are_refused_by_name(name, column):
    columns = {"messages": [HI], name: column}
    with pytest.raises(Refused, match=f"column '{name}' is {column.type}".split("<", maxsplit=1)[0]):
        read(columns)


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.dictionary(pa.int32(), pa.string()),
        pa.dictionary(pa.int8(), pa.large_string()),
    ],
    ids=str,
)
def test_every_kind_of_text_gives_the_same_prompts(kind):
    column = pa.array(["a", "b", None, "a"]).cast(kind)
    rows = read({"prompt": column})
    assert [getattr(row, "prompt", None) for row in rows] == ["a", "b", None, "a"]
    assert isinstance(rows[2], RowError)


# --- row errors ------------------------------------------------------------------------------------------------------------


def test_bad_prompts_cost_their_rows_only_and_say_why():
    rows = read({"prompt": ["ok", None, "", "a\u0000b", "nan"]})
    assert [type(row).__name__ for row in rows] == ["RowInput", "RowError", "RowError", "RowInput", "RowInput"]
    assert [row.row_index for row in rows] == [100, 101, 102, 103, 104]
    assert "'prompt' is null" in rows[1].message
    assert "'prompt' is empty" in rows[2].message
    assert rows[3].prompt == "a\u0000b"


@pytest.mark.parametrize("kind", [None, pa.large_string(), pa.string_view()])
def test_bytes_that_are_not_utf8_cost_their_row_only(kind):
    good, bad, last = read({"prompt": bad_text(b"ok", b"a\xffb", b"bye", kind=kind)})
    assert (good.prompt, last.prompt) == ("ok", "bye")
    assert bad.message.startswith("column 'prompt' is not valid UTF-8: byte 0xff at position 1")


def test_bytes_that_are_not_utf8_inside_messages_cost_their_row_only():
    role, content = pa.array(["user", "user"]), bad_text(b"ok", b"\xfe")
    column = pa.ListArray.from_arrays([0, 1, 2], pa.StructArray.from_arrays([role, content], ["role", "content"]))
    good, bad = read({"messages": column})
    assert good.messages == [{"role": "user", "content": "ok"}]
    assert "'messages' is not valid UTF-8" in bad.message


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (None, "'messages' is null"),
        ("", "'messages' is empty"),
        ("[]", "'messages' is empty"),
        ("null", "'messages' is null"),
        ("[{", "not valid JSON: .*line 1"),
        ('{"role": "user"}', "'messages' is an object"),
        ('"hi"', "'messages' is a string"),
        ("7", "'messages' is a number"),
        ('["hi"]', "message 0 is a string"),
        ('[{"role": "user", "content": "x"}, {"content": "x"}]', "message 1 has no role"),
        ('[{"role": "user", "content": 7}]', "message 0 has content that is a number"),
        ('[{"role": "user", "content": ["x"]}]', "content part that is a string"),
        ('[{"role": "user", "content": NaN}]', "NaN is not JSON"),
        ('[{"role": "user", "content": "\\ud800"}]', "half a character"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_messages_that_cannot_be_cost_their_row(cell, words):
    assert re.search(words, fault({"messages": pa.array([cell], pa.string())}))


def test_messages_of_structs_can_be_null_or_empty_or_hold_a_null():
    rows = read({"messages": pa.array([None, [], [None], HI])})
    words = ["'messages' is null", "'messages' is empty", "message 0 is null"]
    assert all(word in row.message for word, row in zip(words, rows, strict=False))
    assert rows[3].messages == HI


# --- messages --------------------------------------------------------------------------------------------------------------

CONVERSATION = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "function": {"name": "get", "arguments": {"city": "Ulm"}}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "sun"},
]
SAID = [{key: value for key, value in message.items() if value is not None} for message in CONVERSATION]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([HI, CONVERSATION]),
        pa.array([json.dumps(HI), json.dumps(CONVERSATION)]),
        pa.array([json.dumps(HI), json.dumps(CONVERSATION)], pa.large_string()),
        pa.array([HI, CONVERSATION], pa.large_list(pa.array([HI, CONVERSATION]).type.value_type)),
        pa.array([HI, CONVERSATION], pa.list_view(pa.array([HI, CONVERSATION]).type.value_type)),
        pa.array([json.dumps(HI), json.dumps(CONVERSATION)], pa.json_()),
    ],
    ids=lambda column: str(column.type)[:12],
)
def test_messages_are_the_same_in_every_form_and_nulls_are_absent(column):
    assert [row.messages for row in read({"messages": column})] == [HI, SAID]


def test_content_in_parts_is_kept_as_it_is():
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert read({"messages": [parts]})[0].messages == parts


def test_a_null_inside_a_call_written_as_json_stays():
    call = [{"role": "assistant", "content": None, "arguments": {"limit": None}}]
    assert read({"messages": [json.dumps(call)]})[0].messages == [{"role": "assistant", "arguments": {"limit": None}}]


def test_tools_hold_no_null_members_and_come_as_structs_or_json():
    one = {"type": "function", "function": {"name": "a", "parameters": {"x": "string"}}}
    two = {"type": "function", "function": {"name": "b", "parameters": {"y": "integer"}}}
    forms = [
        pa.array([[one], [two], None, []]),
        pa.array([json.dumps([one]), json.dumps([two]), None, "[]"]),
        pa.array([[json.dumps(one)], [json.dumps(two)], None, []]),
    ]
    for column in forms:
        assert [row.tools for row in read({"messages": [HI] * 4, "tools": column})] == [[one], [two], None, None]
    assert "'tools' is not valid JSON" in fault({"messages": [HI], "tools": ["get_weather"]})


@pytest.mark.parametrize(("cell", "kind"), [("{}", "an object"), ("0", "a number"), ("false", "a boolean"), ('""', "a string")])
def test_tools_of_json_that_is_no_list_cost_their_row(cell, kind):
    assert f"column 'tools' is {kind}: tools are a list of objects" in fault({"messages": [HI], "tools": [cell]})


def test_a_null_and_an_empty_list_are_no_tools():
    assert [row.tools for row in read({"messages": [HI] * 4, "tools": ["null", "[]", "", None]})] == [None] * 4


# --- templates -------------------------------------------------------------------------------------------------------------


def test_a_template_reads_its_columns_and_decides_the_rest():
    columns = {"prompt": ["p"], "messages": [HI], "x": [7], "when": pa.array([1001], pa.timestamp("ns")), "none": [None]}
    prompt = PromptOptions(template="{{ x }}")
    assert read(columns, prompt)[0].values == {
        "prompt": "p",
        "messages": HI,
        "x": 7,
        "when": datetime(1970, 1, 1, 0, 0, 0, 1),
        "none": None,
    }
    assert read(columns, prompt, template_columns=frozenset({"x", "gone"}))[0].values == {"x": 7}


# --- settings per row ------------------------------------------------------------------------------------------------------


def test_columns_override_settings_and_null_takes_the_default():
    defaults = SamplingParams(max_tokens=9, temperature=0.5, stop=("x",))
    rows = read(
        {
            "prompt": ["a", "b", "c"],
            "max_tokens": pa.array([3.0, None, 4], pa.float64()),
            "temperature": pa.array([Decimal("0.7"), None, Decimal("0.1")]),
            "seed": pa.array([2**63 - 1, None, 0], pa.uint64()),
            "stop": [["\n", "."], None, []],
            "ignore_eos": [True, None, False],
        },
        defaults=defaults,
    )
    assert rows[0].params == SamplingParams(max_tokens=3, temperature=0.7, seed=2**63 - 1, stop=("\n", "."), ignore_eos=True)
    assert type(rows[0].params.max_tokens) is int
    assert rows[1].params is defaults
    assert rows[2].params == SamplingParams(max_tokens=4, temperature=0.1, seed=0, stop=())


def test_equal_settings_share_one_object_across_batches():
    batch = pa.RecordBatch.from_pydict({"prompt": ["a"] * 4, "n": [2, 3, 2, 1], "stop": ["s", "s", "s", None]})
    defaults = SamplingParams()
    reader = RowReader(batch.schema, PromptOptions(), defaults)
    rows = reader.read(batch.select(reader.columns), 0) + reader.read(batch.select(reader.columns), 4)
    assert len({id(row.params) for row in rows}) == 3
    assert rows[0].params is rows[2].params is rows[4].params
    assert rows[3].params is rows[7].params is defaults


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("temperature", -1.0, "column 'temperature' is -1.0: it must be 0"),
        ("temperature", float("nan"), "column 'temperature' is nan"),
        ("max_tokens", 0, "column 'max_tokens' is 0: it must be between 1 and 2147483647"),
        ("max_tokens", 3.5, "column 'max_tokens' is 3.5: it must be a whole number"),
        ("max_tokens", float("nan"), "column 'max_tokens' is nan: it must be a whole number"),
        ("max_tokens", float("inf"), "column 'max_tokens' is inf: it must be a whole number"),
        ("n", 2**31, "column 'n' is 2147483648: it must be at most 2147483647"),
        ("top_p", 1.5, "column 'top_p' is 1.5"),
        ("seed", -1, "column 'seed' is -1"),
        ("stop", "", "column 'stop' is ''"),
        ("stop", ["a", None], "column 'stop' holds a null"),
    ],
)
def test_a_setting_that_cannot_be_costs_its_row_and_names_column_and_value(name, value, words):
    assert words in fault({"prompt": ["a"], name: [value]})


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("max_tokens", pa.array(["many"])),
        ("n", pa.array([True])),
        ("seed", pa.array([b"1"])),
        ("temperature", pa.array([[1.0]])),
        ("stop", pa.array([1])),
        ("stop", pa.array([[1]])),
        ("ignore_eos", pa.array([1])),
    ],
)
def test_a_setting_column_of_an_impossible_type_is_refused_up_front(name, column):
    with pytest.raises(Refused, match=f"column '{name}' is"):
        read({"prompt": ["a"], name: column})


def test_the_prompt_may_lie_in_a_column_with_the_name_of_a_setting():
    assert read({"stop": ["a"]}, PromptOptions(prompt_column="stop"))[0].prompt == "a"
    assert read({"stop": ["a"]}, PromptOptions(prompt_column="stop"))[0].params.stop == ()


# --- names that the output needs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["error", "output", "run_id", "Error"])
def test_an_input_column_with_the_name_of_an_added_one_is_refused(name):
    schema = pa.schema([("prompt", pa.string()), (name, pa.string())])
    with pytest.raises(Refused, match=f"'{name}'.*--output-prefix"):
        check_input_columns(schema)
    check_input_columns(schema, "x_")
    check_input_columns(schema, keep=("prompt",))


def test_output_ids_clash_only_when_asked_for():
    schema = pa.schema([("output_ids", pa.string())])
    check_input_columns(schema)
    with pytest.raises(Refused, match="output_ids"):
        check_input_columns(schema, return_token_ids=True)


def test_the_first_runs_output_can_be_the_next_runs_input_with_a_prefix():
    first = output_schema(pa.schema([("prompt", pa.string())]))
    with pytest.raises(Refused):
        check_input_columns(first)
    check_input_columns(first, "again_")
