"""Columns that override a row's settings: `max_tokens`, `temperature`, `n`, ...; null takes the default."""

from collections.abc import Iterable
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import pyarrow as pa

from batchrun.engine.sampling_params import SamplingParams
from batchrun.errors import Refused
from batchrun.sources import is_text, text_type

INT_COLUMNS = ("max_tokens", "top_k", "n", "seed")
FLOAT_COLUMNS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
BOOL_COLUMNS = ("include_stop", "ignore_eos")
OVERRIDES = (*INT_COLUMNS, *FLOAT_COLUMNS, *BOOL_COLUMNS, "stop")
MAX_INT = 2**31 - 1
"""Counts end in int32 columns."""
MAX_REMEMBERED = 1 << 16


OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "num_predict": "max_tokens",
    "num_return_sequences": "n",
    "random_seed": "seed",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
    "stop_strings": "stop",
}
"""What other systems call a setting."""
LIKE = 0.85
"""Least similarity (difflib's ratio) of a misspelt name: one or two letters of ten."""
LEAST_LETTERS = 5
"""Of names shorter than this too many are words of their own."""


def lookalikes(names: Iterable[str]) -> list[str]:
    """A warning for each of the columns, which set nothing, whose name looks as if it were meant to."""
    found = []
    long_enough = [name for name in OVERRIDES if len(name) >= LEAST_LETTERS]
    for name in names:
        lower = name.lower()
        near = get_close_matches(lower, long_enough, n=1, cutoff=LIKE)
        meant = OTHER_NAMES.get(lower) or (near[0] if near else lower if lower in OVERRIDES and len(lower) > 1 else None)
        if meant is not None and meant != name:
            flag = meant.replace("_", "-")
            found.append(f"the column {name!r} sets nothing: name it {meant!r} if it is to set --{flag} per row")
    return found


class Overrides:
    """Reads the override columns of a schema; `ignore` names those that hold something else (the prompt, say).

    Raises:
        Refused: a column of such a name whose type cannot hold the setting.
    """

    def __init__(self, schema: pa.Schema, defaults: SamplingParams, ignore: frozenset[str] = frozenset()) -> None:
        self.columns = [name for name in OVERRIDES if name in schema.names and name not in ignore]
        self._defaults = defaults
        self._interned: dict[SamplingParams, SamplingParams] = {defaults: defaults}
        self._remembered: dict[tuple[Any, ...], SamplingParams] = {}
        for name in self.columns:
            kind = schema.field(name).type
            wanted = _wanted(name)
            if not (pa.types.is_null(kind) or _fits(name, kind)):
                raise Refused(
                    f"column {name!r} is {kind}: it sets --{name.replace('_', '-')} per row and must be {wanted}; rename it"
                )

    def params(self, values: dict[str, Any]) -> SamplingParams:
        """The settings of a row whose override columns hold `values`; equal settings are one object.

        Raises:
            ValueError: a value that cannot be; the message names column and value.
        """
        if not self.columns:
            return self._defaults
        key = tuple(tuple(value) if isinstance(value, list) else value for value in values.values())
        found = self._remembered.get(key)
        if found is None:
            found = self._make(values)
            if len(self._remembered) >= MAX_REMEMBERED:
                self._remembered.clear()
            self._remembered[key] = found
        return found

    def _make(self, values: dict[str, Any]) -> SamplingParams:
        settings = {name: _setting(name, value) for name, value in values.items() if value is not None}
        if not settings:
            return self._defaults
        try:
            params = replace(self._defaults, **settings)
        except ValueError as error:
            option = str(error).split(" ", 1)[0]
            column = option.removeprefix("--").replace("-", "_")
            raise ValueError(str(error).replace(option, f"column {column!r}", 1)) from error
        return self._interned.setdefault(params, params)


def _wanted(name: str) -> str:
    if name == "stop":
        return "string or a list of strings"
    return "boolean" if name in BOOL_COLUMNS else "a number"


def _fits(name: str, kind: pa.DataType) -> bool:
    types = pa.types
    if name in BOOL_COLUMNS:
        return bool(types.is_boolean(kind))
    if name != "stop":
        return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind))
    if text_type(kind) is not None:
        return True
    tests = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
    if not any(test(kind) for test in tests):
        return False
    return is_text(kind.value_type) or bool(types.is_null(kind.value_type))


def _setting(name: str, value: Any) -> Any:
    if name in INT_COLUMNS:
        # Comparing first keeps NaN and infinities away from int().
        if not float("-inf") < value < float("inf") or value != int(value):
            raise ValueError(f"column {name!r} is {value}: it must be a whole number")
        if name != "seed" and value > MAX_INT:
            raise ValueError(f"column {name!r} is {value}: it must be at most {MAX_INT}")
        return int(value)
    if name in FLOAT_COLUMNS:
        return float(value)
    if name == "stop":
        strings = (value,) if isinstance(value, str) else tuple(value)
        if any(item is None for item in strings):
            raise ValueError("column 'stop' holds a null: it must hold strings")
        return strings
    return value
