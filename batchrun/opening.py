"""What a job is refused for before a row of it is read, the cheapest checks first; nothing is made here.

input and its columns        the footers of the files
model                        its config, tokenizer and chat template, without weights and without torch
machine                      device, compute type, threads and memory; imports torch
"""

from dataclasses import dataclass, replace
from datetime import datetime
from typing import NamedTuple

from batchrun import hardware
from batchrun.engine.config import ModelConfig
from batchrun.engine.device import missing_for_int8, page_size
from batchrun.engine.loader import ModelSource, load_tokenizer, pick_device, pick_dtype, resolve_model
from batchrun.engine.tokenizer import Tokenizer
from batchrun.errors import Refused
from batchrun.options import RunOptions
from batchrun.planning import KVSize
from batchrun.render import Renderer, check, check_template_columns
from batchrun.rows import RowReader
from batchrun.sources import Source, open_source


@dataclass(frozen=True, slots=True)
class OpenedInput:
    """The input files and how their rows are read."""

    source: Source
    reader: RowReader
    warnings: list[str]
    """Columns that may have been meant for something and are only carried over."""


class OpenedModel(NamedTuple):
    """A model as far as it is known without its weights."""

    found: ModelSource
    config: ModelConfig
    tokenizer: Tokenizer


def open_input(options: RunOptions) -> OpenedInput:
    """Read the footers and choose the columns.

    Raises:
        Refused: an input cannot be read, or its columns are not what the options say.
    """
    source = open_source(options.inputs)
    template = options.prompt.template
    columns = None if template is None else check_template_columns(template, source.schema.names)
    reader = RowReader(source.schema, options.prompt, options.sampling, columns)
    return OpenedInput(source, reader, reader.warnings)


def open_model(options: RunOptions, opened: OpenedInput) -> OpenedModel:
    """Find the model and see that it can answer such rows.

    Raises:
        Refused: the rows and the model's chat template do not go together, or a template does not compile.
        ModelError: the model cannot be used.
    """
    found = resolve_model(options.model)
    config, tokenizer = load_tokenizer(found)
    check(options.prompt, tokenizer.chat_template, opened.source.schema.names, opened.reader.messages_column is not None)
    Renderer(tokenizer, options.prompt, datetime.now())
    return OpenedModel(found, config, tokenizer)


def settle(options: RunOptions) -> tuple[RunOptions, list[str]]:
    """The options with device, compute type and number of threads chosen, and what is worth a warning about it.

    Raises:
        ModelError: the device cannot be used.
    """
    threads, warnings = usable_threads(options.threads)
    device = pick_device(options.device)
    dtype = str(pick_dtype(options.dtype, options.device)).removeprefix("torch.")
    return replace(options, device=device, dtype=dtype, threads=threads), warnings


def usable_threads(asked: int | None) -> tuple[int, list[str]]:
    """One thread per usable processor, or fewer where that was asked for; a warning where more was asked for.

    More threads than processors wait for each other at every step's end, and a job that takes seconds takes hours.
    """
    cpus = hardware.usable_cpus()
    if asked is None or asked <= cpus:
        return asked or cpus, []
    return cpus, [f"--threads is {asked} and this process may use {cpus} processor{'s' if cpus > 1 else ''}: {cpus} are used"]


def check_kv_memory(options: RunOptions) -> None:
    """Refuse a --kv-memory that the machine does not have.

    Raises:
        Refused: it is more than all of the memory.
    """
    _check_within_machine("--kv-memory", options.kv_memory)


def kv_size(options: RunOptions, config: ModelConfig) -> KVSize:
    """What the KV pool of a job on this machine is made of; `options` are settled.

    Raises:
        Refused: --kv-tokens or --kv-memory is more than the machine has, or --kv-dtype does not go with the rest.
    """
    check_kv_dtype(options, config)
    per_token = config.kv_bytes_per_token(options.dtype, options.kv_dtype)
    check_kv_memory(options)
    _check_within_machine("--kv-tokens", None if options.kv_tokens is None else options.kv_tokens * per_token)
    return KVSize(page_size(options.device), per_token, hardware.pool_memory(options.device), options.kv_dtype)


def check_kv_dtype(options: RunOptions, config: ModelConfig, here: bool = True) -> None:
    """Refuse keys and values in int8 where nothing computes with them; the compute type is chosen already.

    Args:
        here: the job is for this machine; else only what does not depend on the machine is looked at.

    Raises:
        Refused: the compute type is another than bfloat16, or there is no compiled kernel for this model.
    """
    if options.kv_dtype != "int8":
        return
    if options.dtype != "bfloat16":
        raise Refused(
            f"--kv-dtype is int8, which goes with bfloat16, and the job computes in {options.dtype}: "
            "add --dtype bfloat16, or leave --kv-dtype out"
        )
    if (missing := missing_for_int8(config.head_dim, here)) is not None:
        raise Refused(f"--kv-dtype is int8, which {missing}: leave --kv-dtype out")


def _check_within_machine(option: str, asked: int | None) -> None:
    machine = hardware.total_memory()
    if asked is not None and asked > machine:
        raise Refused(f"{option} asks for {asked} bytes and this machine has {machine}: ask for less, or leave it out")
