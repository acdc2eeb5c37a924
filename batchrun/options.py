"""The options of a run, as the command line and `batchrun.run` give them."""

import re
from dataclasses import dataclass, field
from datetime import datetime
from fractions import Fraction
from pathlib import Path

from batchrun.engine.config import KV_DTYPES
from batchrun.engine.sampling_params import MAX_COUNT, MAX_SEED, SamplingParams

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
ORDERS = ("plan", "given")
MAX_THREADS = 4096
MAX_BYTES = 2**63 - 1
OTHER_FORMATS = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".arrow", ".feather", ".pq", ".xlsx", ".db", ".duckdb")
"""Endings of an output that are surely not meant as a folder's name."""
_UNITS = {"": 1, "b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for ending, base in (("b", 1000), ("ib", 1024))
}


def parse_size(text: str) -> int:
    """Bytes from `4GiB`, `512MB`, `1.5 GB` or plain `1073741824`.

    Raises:
        ValueError: anything else.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?b|b|)\s*", text, re.IGNORECASE)
    if not found:
        raise ValueError(f"{text!r} is no amount of memory: write it like 4GiB, 512MB or a number of bytes")
    return int(Fraction(found[1]) * _UNITS[found[2].lower()])


def read_text(option: str, path: str | Path) -> str:
    """The text of a file that an option names.

    Raises:
        ValueError: the file cannot be read or is not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{option} is {str(path)!r}, which cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} is {str(path)!r}, which is not UTF-8 text: byte {error.start} does not decode") from error


def read_template(option: str, path: str | Path) -> str:
    """The Jinja source in a file that an option names.

    Raises:
        ValueError: as for `read_text`.
        batchrun.errors.Refused: a syntax error, with file and line.
    """
    from batchrun.chat_template import compile_template, environment

    source = read_text(option, path)
    compile_template(environment(datetime(2000, 1, 1)), source, f"{option} {path}")
    return source


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Where a row's prompt comes from."""

    prompt_column: str | None = None
    messages_column: str | None = None
    tools_column: str | None = None
    template: str | None = None
    """Jinja source (the file's content) over the row's columns: a prompt, or messages when it renders a JSON list."""
    system: str | None = None
    """Put before messages that have no system turn."""
    raw: bool = False
    """Plain text to continue: the tokenizer's own BOS rule, special strings parsed, no chat template."""

    def __post_init__(self) -> None:
        """Refuse what would be ignored.

        Raises:
            ValueError: two options contradict each other; the message names both.
        """
        for option, value in (
            ("--messages-column", self.messages_column),
            ("--tools-column", self.tools_column),
            ("--system", self.system),
        ):
            if self.raw and value is not None:
                raise ValueError(f"--raw and {option} contradict each other: a raw prompt is plain text without turns or tools")
        for option, value in (("--prompt-column", self.prompt_column), ("--messages-column", self.messages_column)):
            if self.template is not None and value is not None:
                raise ValueError(f"--template and {option} both say where the prompt comes from: give one of them")
        if self.prompt_column is not None and self.messages_column is not None:
            raise ValueError("--prompt-column and --messages-column both say where the prompt comes from: give one of them")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Everything that `batchrun run` can be told; validated once.

    Raises:
        ValueError: an unknown or contradictory value; the message names the option as the user types it.
    """

    inputs: tuple[str, ...]
    output: Path
    model: str | None = None
    """Hugging Face folder, hub id or `.gguf` file; None is the embedded model."""
    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    """What keys and values are kept in: `auto` is `dtype`."""
    threads: int | None = None
    prompt: PromptOptions = field(default_factory=PromptOptions)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Defaults for rows; seed stays None here."""
    seed: int = 0
    """The job's seed."""
    kv_tokens: int | None = None
    kv_memory: int | None = None
    """Bytes."""
    chunk_tokens: int | None = None
    max_running: int | None = None
    order: str = "plan"
    dedupe: bool = True
    prefix_cache: bool = True
    resume: bool = False
    overwrite: bool = False
    flush_seconds: float = 10.0
    output_prefix: str = ""
    keep_columns: tuple[str, ...] | None = None
    """None keeps all input columns."""
    return_token_ids: bool = False
    profile: Path | None = None
    """Parquet file for the step table; None measures nothing."""

    def __post_init__(self) -> None:
        checks = (
            (self.device in DEVICES, f"--device is {self.device!r}: it must be one of {', '.join(DEVICES)}"),
            (self.dtype in DTYPES, f"--dtype is {self.dtype!r}: it must be one of {', '.join(DTYPES)}"),
            (self.kv_dtype in KV_DTYPES, f"--kv-dtype is {self.kv_dtype!r}: it must be one of {', '.join(KV_DTYPES)}"),
            (self.order in ORDERS, f"--order is {self.order!r}: it must be one of {', '.join(ORDERS)}"),
            (not (self.resume and self.overwrite), "--resume and --overwrite contradict each other: give one of them"),
            (self.kv_tokens is None or self.kv_memory is None, "--kv-tokens and --kv-memory both set the pool: give one of them"),
            (0 <= self.seed <= MAX_SEED, f"--seed is {self.seed}: it must be between 0 and 2^63 - 1"),
            (self.sampling.seed is None, "the seed of the sampling defaults must stay unset: the job's seed is --seed"),
            (
                self.output.suffix.lower() not in OTHER_FORMATS,
                f"--output is {str(self.output)!r}, but only Parquet can be written: give a .parquet file or a folder",
            ),
            (self.flush_seconds > 0, f"--flush-seconds is {self.flush_seconds}: it must be above 0"),
        )
        if not self.inputs:
            raise ValueError("no input is given: name a Parquet file, a folder or a glob")
        for fine, message in checks:
            if not fine:
                raise ValueError(message)
        for option, value, largest in (
            ("--threads", self.threads, MAX_THREADS),
            ("--kv-tokens", self.kv_tokens, MAX_COUNT),
            ("--kv-memory", self.kv_memory, MAX_BYTES),
            ("--chunk-tokens", self.chunk_tokens, MAX_COUNT),
            ("--max-running", self.max_running, MAX_COUNT),
        ):
            if value is not None and not 1 <= value <= largest:
                raise ValueError(f"{option} is {value}: it must be between 1 and {largest}")
