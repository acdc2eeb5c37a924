"""What one input row says: where its prompt is, its own settings, and what is wrong with it.

Wrong columns are refused before anything runs; a wrong value costs its row only. A null inside structs is an absent field:
Arrow adds null members to every struct that lacks a key which another row has.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import pyarrow as pa

from batchrun.engine.sampling_params import SamplingParams
from batchrun.errors import Refused
from batchrun.options import PromptOptions
from batchrun.overrides import Overrides, lookalikes
from batchrun.results import kept_columns, no_such_column, result_schema
from batchrun.sources import text_type


@dataclass(slots=True)
class RowInput:
    """One row that can be rendered: exactly one of prompt, messages and values is set."""

    row_index: int
    prompt: str | None
    messages: list[dict[str, Any]] | None
    """Each has a `role`; absent fields were null."""
    tools: list[Any] | None
    values: dict[str, Any] | None
    """With --template: the row's columns as Python values, None where null."""
    params: SamplingParams
    """Rows with equal settings share one object."""


@dataclass(slots=True)
class RowError:
    """One row that cannot be run, and why."""

    row_index: int
    message: str


class Choice(NamedTuple):
    """The column that prompts come from; the other is None."""

    prompt_column: str | None
    messages_column: str | None


class CellError(ValueError):
    """A value that costs its row; the message names the column."""


class RowReader:
    """Turns batches of the chosen columns into rows.

    Args:
        schema: the input's.
        prompt: where prompts come from.
        defaults: settings of rows that say nothing else.
        template_columns: the names that --template uses; None reads every column. Ignored without a template.

    Raises:
        Refused: no prompt column, two without a choice, a name that is not there, or a column of a wrong type.
    """

    def __init__(
        self, schema: pa.Schema, prompt: PromptOptions, defaults: SamplingParams, template_columns: frozenset[str] | None = None
    ) -> None:
        self.template_columns: list[str] = []
        if prompt.template is None:
            self.prompt_column, self.messages_column = _choose(schema, prompt)
        else:
            self.prompt_column, self.messages_column = Choice(None, None)
            self.template_columns = [name for name in schema.names if template_columns is None or name in template_columns]
        self.tools_column = _choose_tools(schema, prompt)
        _check_types(schema, self.prompt_column, self.messages_column, self.tools_column)
        chosen = {self.prompt_column, self.messages_column, self.tools_column}
        self._overrides = Overrides(schema, defaults, ignore=frozenset(name for name in chosen if name is not None))
        self.warnings = lookalikes([name for name in schema.names if name not in self.columns])
        """Columns that may have been meant for something and are only carried over, one line each."""
        if prompt.raw and prompt.template is None and "tools" in schema.names and "tools" not in self.columns:
            self.warnings.append("the column 'tools' is not used: --raw takes prompts as plain text without turns or tools")

    @property
    def columns(self) -> list[str]:
        """The columns to read; `read` wants a batch of these."""
        chosen = [self.prompt_column, self.messages_column, self.tools_column, *self.template_columns, *self._overrides.columns]
        return list(dict.fromkeys(name for name in chosen if name is not None))

    def read(self, batch: pa.RecordBatch, first_row: int) -> list[RowInput | RowError]:
        """One entry per row of the batch, in order; row i has row_index first_row + i."""
        cells = {name: column_values(batch.column(batch.schema.get_field_index(name)), name) for name in self.columns}
        return [self._row(cells, i, first_row + i) for i in range(batch.num_rows)]

    def _row(self, cells: dict[str, list[Any]], i: int, row_index: int) -> RowInput | RowError:
        try:
            prompt = messages = values = None
            if self.prompt_column is not None:
                prompt = _prompt(_cell(cells, self.prompt_column, i), self.prompt_column)
            elif self.messages_column is not None:
                messages = _messages(_cell(cells, self.messages_column, i), self.messages_column)
            else:
                values = {name: _cell(cells, name, i) for name in self.template_columns}
            tools = None
            if self.tools_column is not None:
                tools = _tools(_cell(cells, self.tools_column, i), self.tools_column)
            params = self._overrides.params({name: _cell(cells, name, i) for name in self._overrides.columns})
        except ValueError as error:
            return RowError(row_index, str(error))
        return RowInput(row_index, prompt, messages, tools, values, params)


def check_input_columns(
    schema: pa.Schema, prefix: str = "", return_token_ids: bool = False, keep: Iterable[str] | None = None
) -> None:
    """Check that the kept input columns and the added ones do not share a name, upper and lower case being the same (as in SQL).

    Raises:
        Refused: they do, or `keep` names a column that there is not.
    """
    added = {name.lower() for name in result_schema(prefix, return_token_ids).names}
    for name in kept_columns(schema, keep):
        if name.lower() in added:
            raise Refused(
                f"input column {name!r} has the name of a column that the output adds: "
                f"give the added ones another beginning with --output-prefix, e.g. --output-prefix {prefix}new_"
            )


# --- which columns --------------------------------------------------------------------------------------------------------


def _choose(schema: pa.Schema, prompt: PromptOptions) -> Choice:
    for option, name in (("--prompt-column", prompt.prompt_column), ("--messages-column", prompt.messages_column)):
        if name is not None and name not in schema.names:
            raise Refused(f"{option}: {no_such_column(name, schema.names)}")
    if prompt.prompt_column is not None or prompt.messages_column is not None:
        return Choice(prompt.prompt_column, prompt.messages_column)
    has_prompt, has_messages = "prompt" in schema.names, "messages" in schema.names
    if has_prompt and has_messages:
        raise Refused(
            "the input has both 'prompt' and 'messages': choose by --prompt-column prompt or --messages-column messages"
        )
    if has_prompt:
        return Choice("prompt", None)
    if has_messages and prompt.raw:
        raise Refused("--raw needs prompts that are text and the input has 'messages': leave out --raw, or give --prompt-column")
    if has_messages:
        return Choice(None, "messages")
    raise Refused(
        "the input has no 'prompt' and no 'messages' column: name yours by --prompt-column or --messages-column; "
        f"columns: {', '.join(schema.names)}"
    )


def _choose_tools(schema: pa.Schema, prompt: PromptOptions) -> str | None:
    if prompt.tools_column is not None:
        if prompt.tools_column not in schema.names:
            raise Refused(f"--tools-column: {no_such_column(prompt.tools_column, schema.names)}")
        return prompt.tools_column
    # A template's own columns may well be called tools; it renders them itself.
    implicit = "tools" in schema.names and not prompt.raw and prompt.template is None
    return "tools" if implicit else None


def _check_types(schema: pa.Schema, prompt: str | None, messages: str | None, tools: str | None) -> None:
    if prompt is not None:
        kind = schema.field(prompt).type
        if text_type(kind) is None and not pa.types.is_null(kind):
            hint = ", or name it by --messages-column if it holds chats" if _is_list(kind) else _cast_hint(kind, prompt)
            raise Refused(f"column {prompt!r} is {kind}: a prompt must be string (also large, view or dictionary){hint}")
    if messages is not None:
        kind = schema.field(messages).type
        if not _holds_json(kind) and not (_is_list(kind) and _is_record(kind.value_type)):
            hint = _cast_hint(kind, messages)
            raise Refused(f"column {messages!r} is {kind}: messages must be a list of structs, or string that holds JSON{hint}")
    if tools is not None:
        kind = schema.field(tools).type
        if not _holds_json(kind) and not (_is_list(kind) and (_is_record(kind.value_type) or _holds_json(kind.value_type))):
            raise Refused(
                f"column {tools!r} is {kind}: tools must be a list of structs, or string that holds JSON"
                f"{_cast_hint(kind, tools)}; rename the column if it is something else"
            )


def _cast_hint(kind: pa.DataType, name: str) -> str:
    """How to make text of a column of bytes; nothing for other kinds."""
    types = pa.types
    tests = (types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary)
    if not any(test(kind) for test in tests):
        return ""
    quoted = name.replace('"', '""')
    return f": decode the bytes first, in DuckDB by decode(\"{quoted}\"), in pyarrow by table[{name!r}].cast('string')"


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    tests = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
    return any(test(kind) for test in tests)


def _is_record(kind: pa.DataType) -> bool:
    return bool(pa.types.is_struct(kind) or pa.types.is_map(kind))


def _holds_json(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.JsonType):
        return True
    return text_type(kind) is not None or bool(pa.types.is_null(kind))


# --- cells ----------------------------------------------------------------------------------------------------------------


def column_values(column: pa.Array, name: str) -> list[Any]:
    """The column's cells as Python values; a cell that has none (bytes that are not UTF-8) is a CellError in its place."""
    if pa.types.is_timestamp(column.type) and column.type.unit == "ns":
        # Python's datetime ends at microseconds.
        column = column.cast(pa.timestamp("us", column.type.tz), safe=False)
    try:
        values: list[Any] = column.to_pylist(maps_as_pydicts="strict")
    except (ValueError, KeyError):
        values = [_one_value(cell, name) for cell in column]
    return values


def _one_value(cell: pa.Scalar, name: str) -> Any:
    try:
        return cell.as_py(maps_as_pydicts="strict")
    except UnicodeDecodeError as error:
        where = f"byte {error.object[error.start]:#04x} at position {error.start}"
        return CellError(f"column {name!r} is not valid UTF-8: {where}: write the text as UTF-8")
    except (ValueError, KeyError) as error:
        return CellError(f"column {name!r} cannot be read: {error}")


def _cell(cells: dict[str, list[Any]], name: str, i: int) -> Any:
    value = cells[name][i]
    if isinstance(value, CellError):
        raise value
    return value


def _prompt(value: Any, name: str) -> str:
    if value is None:
        raise CellError(f"column {name!r} is null: every row needs a prompt")
    if value == "":
        raise CellError(f"column {name!r} is empty: every row needs a prompt")
    assert isinstance(value, str), f"prompt is {type(value)}"
    return value


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _from_json(text: str, name: str) -> Any:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        if "\\ud" in text or "\\uD" in text:
            # Half of a surrogate pair is no character: it has no UTF-8 form, so no tokens either.
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise CellError(f"column {name!r} holds half a character (a lone surrogate): write the text as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise CellError(f"column {name!r} is not valid JSON: {error}") from error
    return value


def _messages(value: Any, name: str) -> list[dict[str, Any]]:
    if value is None or value in ("", []):
        raise CellError(f"column {name!r} is {'null' if value is None else 'empty'}: every row needs a list of messages")
    if isinstance(value, str):
        parsed = _from_json(value, name)
        # In JSON a null further inside was written on purpose (an argument of a call, say).
        value = [_without_null_fields(item) for item in parsed] if isinstance(parsed, list) else parsed
    else:
        value = _without_nulls(value)
    if not isinstance(value, list):
        raise CellError(f"column {name!r} is {_json_kind(value)}: messages are a list of objects")
    if not value:
        raise CellError(f"column {name!r} is empty: every row needs a list of messages")
    for i, message in enumerate(value):
        _check_message(message, f"column {name!r}: message {i}")
    return value


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict):
        raise CellError(f"{where} is {_json_kind(message)}: it must be an object with a role and content")
    if not isinstance(message.get("role"), str):
        raise CellError(f"{where} has no role: it must be a string such as 'user'")
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict):
                raise CellError(f"{where} has a content part that is {_json_kind(part)}: it must be an object with a type")
    elif content is not None and not isinstance(content, str):
        raise CellError(f"{where} has content that is {_json_kind(content)}: it must be text or a list of parts")


def _tools(value: Any, name: str) -> list[Any] | None:
    value = (_from_json(value, name) if value else None) if isinstance(value, str) else _without_nulls(value)
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        raise CellError(f"column {name!r} is {_json_kind(value)}: tools are a list of objects")
    tools = [_from_json(tool, name) if isinstance(tool, str) else tool for tool in value]
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise CellError(f"column {name!r}: tool {i} is {_json_kind(tool)}: it must be an object")
    return tools


def _without_null_fields(value: Any) -> Any:
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value


def _without_nulls(value: Any) -> Any:
    """Null members of objects left out at every depth; nulls in lists stay."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _json_kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")
