"""Options that several commands share, and what click's values become.

Each decorator adds a group of options to a command and hands the command one object in their place:
`prompt: PromptOptions`, `sampling: SamplingParams` and `seed: int`, `model: ModelChoice`, `engine: EngineLimits`.
"""

import csv
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import click

from batchrun import options
from batchrun.engine.config import KV_DTYPES
from batchrun.engine.sampling_params import SamplingParams
from batchrun.errors import Refused
from batchrun.options import DEVICES, DTYPES, ORDERS, PromptOptions

Function = Callable[..., Any]
Decorator = Callable[[Function], Function]


class Option(NamedTuple):
    """One option before click sees it."""

    flag: str
    settings: dict[str, Any]

    @property
    def key(self) -> str:
        """The name under which click passes the value."""
        return self.flag.removeprefix("--").replace("-", "_")


def _option(flag: str, text: str, **settings: Any) -> Option:
    return Option(flag, {"help": text, **settings})


def _flag(flag: str, text: str) -> Option:
    return _option(flag, text, is_flag=True)


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """Which model runs where; the fields of RunOptions of the same names."""

    model: str | None
    device: str
    dtype: str
    threads: int | None

    def fields(self) -> dict[str, Any]:
        """As keyword arguments of RunOptions."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Memory, batch and order of the engine; the fields of RunOptions of the same names."""

    kv_tokens: int | None
    kv_memory: int | None
    kv_dtype: str
    chunk_tokens: int | None
    max_running: int | None
    order: str
    dedupe: bool
    prefix_cache: bool

    def fields(self) -> dict[str, Any]:
        """As keyword arguments of RunOptions."""
        return asdict(self)


def parse_size(value: str) -> int:
    """Bytes from `4GiB`, `512MB`, `1.5 GB` or plain `1073741824`."""
    try:
        return options.parse_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def parse_names(value: str) -> tuple[str, ...]:
    """Names between commas; a name that has a comma itself stands in double quotes; an empty text is no name."""
    names = next(csv.reader([value], skipinitialspace=True), [])
    if not all(names):
        raise click.BadParameter(f"{value!r} has an empty name in it: write the names with one comma between two")
    return tuple(names)


@contextmanager
def refusing() -> Iterator[None]:
    """Options that contradict each other or lie outside their range end the command with exit code 2."""
    try:
        yield
    except ValueError as error:
        raise Refused(str(error)) from error


def _group(name: str, build: Callable[[dict[str, Any]], Any], *added: Option) -> Decorator:
    """A decorator that adds the options and passes build({key: value}) as one argument."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(*arguments: Any, **values: Any) -> Any:
            own = {option.key: values.pop(option.key) for option in added}
            with refusing():
                values[name] = build(own)
            return function(*arguments, **values)

        # click lists options in the reverse order of decoration.
        command: Function = call
        for option in reversed(added):
            command = click.option(option.flag, **option.settings)(command)
        return command

    return decorate


def _build_prompt(values: dict[str, Any]) -> PromptOptions:
    path = values.pop("template")
    return PromptOptions(**values, template=None if path is None else options.read_template("--template", path))


prompt_options = _group(
    "prompt",
    _build_prompt,
    _option("--prompt-column", "Column with the prompt's text.  [default: prompt]", metavar="NAME"),
    _option(
        "--messages-column", "Column with chat messages: list of structs, or JSON text.  [default: messages]", metavar="NAME"
    ),
    _option("--tools-column", "Column with the tools that the chat template gets.  [default: tools]", metavar="NAME"),
    _option("--template", "Jinja file over the row's columns: makes a prompt, or messages if it is a JSON list.", metavar="FILE"),
    _option("--system", "System turn put before messages that have none.", metavar="TEXT"),
    _flag("--raw", "Prompts are plain text to continue: no chat template, special strings parsed."),
)
"""Adds the options that say where a row's prompt comes from; passes `prompt: PromptOptions`."""


def _sampling(flag: str, kind: type, text: str) -> Option:
    default = getattr(SamplingParams(), Option(flag, {}).key)
    return _option(flag, text, type=kind, default=default, show_default=True)


sampling_options = _group(
    "sampling",
    lambda values: SamplingParams(**values),
    _sampling("--max-tokens", int, "Most output tokens per sample, the end token included."),
    _sampling("--temperature", float, "0 always takes the likeliest token."),
    _sampling("--top-p", float, "Keep the likeliest tokens up to this probability."),
    _sampling("--top-k", int, "Keep this many of the likeliest tokens; 0 keeps all."),
    _sampling("--min-p", float, "Drop tokens below this share of the likeliest one's probability."),
    _sampling("--repetition-penalty", float, "Above 1 makes tokens of the prompt and the output less likely."),
    _sampling("--presence-penalty", float, "Taken off the logit of each token in the output."),
    _sampling("--frequency-penalty", float, "Taken off the logit per occurrence in the output."),
    _sampling("--n", int, "Samples per row."),
    _option(
        "--stop",
        "End the output where TEXT appears; may be given again. \\n is two characters here.",
        multiple=True,
        metavar="TEXT",
    ),
    _flag("--include-stop", "Keep the stop text in the output."),
    _flag("--ignore-eos", "Go on past the model's end tokens, up to --max-tokens."),
)
"""Adds the defaults of a row's sampling; passes `sampling: SamplingParams`, whose seed stays None."""

model_options = _group(
    "model",
    lambda values: ModelChoice(**values),
    _option(
        "--model",
        "Hugging Face folder or hub id, or a .gguf file.  [default: the embedded SmolLM2-135M-Instruct]",
        metavar="MODEL",
    ),
    _option("--device", "Where to compute.", metavar="|".join(DEVICES), default="auto", show_default=True),
    _option("--dtype", "What to compute in.", metavar="|".join(DTYPES), default="auto", show_default=True),
    _option("--threads", "CPU threads.  [default: one per core]", type=int),
)
"""Adds the choice of model and machine; passes `model: ModelChoice`."""


def _build_engine(values: dict[str, Any]) -> EngineLimits:
    dedupe, prefix_cache = not values.pop("no_dedupe"), not values.pop("no_prefix_cache")
    return EngineLimits(**values, dedupe=dedupe, prefix_cache=prefix_cache)


engine_options = _group(
    "engine",
    _build_engine,
    _option("--kv-tokens", "Size of the KV pool in tokens.  [default: from the file and the machine]", type=int),
    _option("--kv-memory", "Size of the KV pool in memory, instead: 4GiB, 512MB or bytes.", type=parse_size, metavar="SIZE"),
    _option(
        "--kv-dtype",
        "Keep keys and values as --dtype, or in int8: about half of bfloat16's memory, and outputs change.",
        metavar="|".join(KV_DTYPES),
        default="auto",
        show_default=True,
    ),
    _option(
        "--chunk-tokens",
        "Most prompt tokens computed in one step, beside the decoding rows.  [default: from the machine]",
        type=int,
    ),
    _option("--max-running", "Most rows decoding at once.  [default: from the file and the machine]", type=int),
    _option("--order", "Order of the rows: planned, or as given.", metavar="|".join(ORDERS), default="plan", show_default=True),
    _flag("--no-dedupe", "Compute identical greedy rows each for itself."),
    _flag("--no-prefix-cache", "Share nothing between rows; also turns off dedupe."),
)
"""Adds memory, batch size and order; passes `engine: EngineLimits`."""
