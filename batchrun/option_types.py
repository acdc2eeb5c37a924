"""Values from Python under the names of options: of the right type, and plain (a NumPy number becomes Python's)."""

import numbers
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from batchrun.engine.sampling_params import SamplingParams
from batchrun.options import PromptOptions, RunOptions

_TYPES = {item.name: item.type for owner in (PromptOptions, SamplingParams, RunOptions) for item in fields(owner)} | {
    "seed": int,
    "no_dedupe": bool,
    "no_prefix_cache": bool,
    "template": str | Path | None,
    "kv_memory": int | str | None,
    "profile": str | Path | None,
}


def typed(name: str, value: Any) -> Any:
    """The value of an option, as the dataclass that holds it wants it.

    Raises:
        ValueError: it is of another type; the message names the option as on the command line.
    """
    kind = _TYPES[name]
    if value is None and name == "stop":
        return ()
    if value is None and NoneType in get_args(kind):
        return None
    if value is not None and tuple[str, ...] in (kind, *get_args(kind)):
        return _texts(name, value)
    for wanted in get_args(kind) or (kind,):
        found = _as(wanted, value)
        if found is not None:
            return found
    raise ValueError(f"{option(name)} is {value!r}: it must be {_words(kind)}")


def option(name: str) -> str:
    """An option's name on the command line."""
    return f"--{name.replace('_', '-')}"


def _as(wanted: Any, value: Any) -> Any:
    """The value in the wanted type; None when it is of another one."""
    is_bool = isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")  # NumPy's is no subclass
    if wanted is bool:
        return bool(value) if is_bool else None
    if wanted is int:
        return int(value) if isinstance(value, numbers.Integral) and not is_bool else None
    if wanted is float:
        return float(value) if isinstance(value, numbers.Real) and not is_bool else None
    return value if isinstance(value, wanted) else None


def _texts(name: str, value: Any) -> tuple[str, ...]:
    """One text, or several; a text alone is not taken for a list of its letters."""
    given = (value,) if isinstance(value, str) else value
    found = tuple(given) if isinstance(given, Iterable) else (value,)
    for item in found:
        if not isinstance(item, str):
            raise ValueError(f"{option(name)} holds {item!r}: it must be a string or a list of strings")
    return found


def _words(kind: Any) -> str:
    words = {bool: "True or False", int: "a whole number", float: "a number", str: "a string", Path: "a path"}
    return " or ".join(words[wanted] for wanted in get_args(kind) or (kind,) if wanted in words)
