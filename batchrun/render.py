"""A row's columns -> chat template -> text -> token ids.

Which way a row goes:

    messages           chat template of the model
    prompt             one user turn through the chat template; as --raw when the model has none
    --template         Jinja over the row's columns: a prompt, or messages when it prints a JSON list of turns
    --raw              plain text to continue, encoded with the tokenizer's own BOS rule
"""

import json
import math
import re
from collections.abc import Collection
from datetime import datetime
from typing import Any, NamedTuple, Protocol

import jinja2
import numpy as np
import numpy.typing as npt

from batchrun.chat_template import TemplateFacts, compile_template, environment, template_variables
from batchrun.errors import Refused
from batchrun.options import PromptOptions
from batchrun.rows import RowError, RowInput
from batchrun.special_text import Marks, SpecialText, strings
from batchrun.turns import Message, RowFaultError, normalise_turn, without_nulls

Ids = npt.NDArray[np.int32]


class ChatTokenizer(Protocol):
    """The part of `batchrun.engine.tokenizer.Tokenizer` that rendering needs."""

    chat_template: str | None
    special_tokens: dict[str, int]
    bos_token: str
    eos_token: str

    def encode(self, text: str, parse_special: bool) -> list[int]: ...
    def encode_batch(self, texts: list[str], parse_special: bool) -> list[list[int]]: ...
    def encode_raw(self, texts: list[str]) -> list[list[int]]: ...


def template_columns(source: str) -> frozenset[str]:
    """Columns that a `--template` prints or tests.

    Raises:
        Refused: a syntax error, with its line.
    """
    try:
        return template_variables(source)
    except jinja2.TemplateSyntaxError as error:
        raise Refused(f"--template, line {error.lineno}: {error.message}") from error
    except jinja2.TemplateError as error:
        raise Refused(f"--template: {error.message}") from error


def check_template_columns(source: str, columns: Collection[str]) -> frozenset[str]:
    """The columns that a `--template` uses.

    Raises:
        Refused: a syntax error, or one of them is not among the input's `columns`.
    """
    used = template_columns(source)
    missing = sorted(used - set(columns))
    if missing:
        raise Refused(f"--template uses {_names(missing)}, which the input does not have: its columns are {_names(columns)}")
    return used


def check(options: PromptOptions, chat_template: str | None, columns: Collection[str], uses_messages: bool) -> None:
    """Refuse what no row could survive, before any row is read.

    Args:
        options: where prompts come from.
        chat_template: the model's, None when it has none.
        columns: names of the input's columns.
        uses_messages: whether rows come from a messages column.

    Raises:
        Refused: one line that says what to do instead.
    """
    if options.template is not None:
        check_template_columns(options.template, columns)
    if options.raw and uses_messages:
        raise Refused("--raw continues plain text, and the rows have messages: leave --raw out, or choose a --prompt-column")
    if options.raw or chat_template is not None:
        return
    if uses_messages:
        raise Refused("the model has no chat template for the rows' messages: choose text with --prompt-column, or another model")
    if options.system is not None:
        raise Refused("the model has no chat template, which --system needs: leave it out, or choose another model")


def _names(names: Collection[str]) -> str:
    return ", ".join(repr(name) for name in names) or "none"


class _Text(NamedTuple):
    """One row's text, and how it becomes ids: as raw text, or as a chat with or without marked special strings."""

    text: str
    raw: bool
    marks: Marks | None = None


class Renderer:
    """Turns rows into token ids; one object per run.

    Args:
        tokenizer: the model's.
        options: where prompts come from; `check` has accepted them.
        now: what `strftime_now` tells in templates, the same for the whole run.

    Raises:
        Refused: a template that does not compile; the message has its line.
    """

    def __init__(self, tokenizer: ChatTokenizer, options: PromptOptions, now: datetime) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._special = SpecialText(tokenizer)
        self._chat: jinja2.Template | None = None
        self._facts: TemplateFacts | None = None
        if tokenizer.chat_template is not None and not options.raw:
            self._chat = compile_template(environment(now), tokenizer.chat_template, "the model's chat template")
            self._facts = TemplateFacts(tokenizer.chat_template)
        self._row_template: jinja2.Template | None = None
        if options.template is not None:
            env = environment(now, undefined=jinja2.StrictUndefined, finalize=_refuse_null)
            self._row_template = compile_template(env, options.template, "--template")
        named = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
        self._special_names = {name: token for name, token in named.items() if token}
        self._ignored: dict[str, int] = {}

    @property
    def uses_chat_template(self) -> bool:
        """Whether prompts become user turns; else they are encoded as --raw."""
        return self._chat is not None

    @property
    def warnings(self) -> list[str]:
        """What went nowhere in the rows so far, one line each."""
        return [f"{count} {'row has' if count == 1 else 'rows have'} {what}" for what, count in self._ignored.items()]

    def encode(self, rows: list[RowInput]) -> list[Ids | RowError]:
        """Token ids of each row, int32 [prompt tokens], at least one; a row that cannot be rendered gives its error."""
        results: list[Ids | RowError | None] = [None] * len(rows)
        raw: list[tuple[int, str]] = []
        chat: list[tuple[int, str]] = []
        for place, row in enumerate(rows):
            try:
                made = self._text_of(row)
                if made.marks is not None:
                    results[place] = self._finish(row, self._special.encode(made.text, made.marks))
                else:
                    (raw if made.raw else chat).append((place, made.text))
            except (RowFaultError, ValueError) as fault:
                results[place] = RowError(row_index=row.row_index, message=str(fault))
        for places, batch in (
            (raw, self._tokenizer.encode_raw([text for _, text in raw])),
            (chat, self._tokenizer.encode_batch([text for _, text in chat], parse_special=True)),
        ):
            for (place, _), ids in zip(places, batch, strict=True):
                results[place] = self._finish(rows[place], ids)
        done = [result for result in results if result is not None]
        assert len(done) == len(rows), f"{len(rows) - len(done)} rows were not rendered"
        return done

    @staticmethod
    def _finish(row: RowInput, ids: list[int]) -> Ids | RowError:
        if not ids:
            return RowError(row_index=row.row_index, message="the prompt is empty: it has no tokens")
        return np.asarray(ids, dtype=np.int32)

    def _text_of(self, row: RowInput) -> _Text:
        prompt, messages = row.prompt, row.messages
        if self._row_template is not None:
            prompt, messages = self._apply_row_template(self._row_template, row)
        tools = without_nulls(row.tools) if row.tools else None
        if self._chat is None or self._facts is None:
            if prompt is None:
                raise RowFaultError("the row has messages, and no chat template is in use")
            if tools:
                self._count("tools, which only a chat template could use")
            return _Text(prompt, raw=True)
        if messages is None:
            assert prompt is not None, f"row {row.row_index} has neither prompt nor messages"
            messages = [{"role": "user", "content": prompt}]
        messages = self._turns(messages, self._facts.iterates_content)
        if tools and not self._facts.reads_tools:
            self._count("tools, which the model's chat template ignores")
        if not self._facts.reads_tool_calls and any(turn.get("tool_calls") for turn in messages):
            self._count("tool_calls in their messages, which the model's chat template ignores")
        marks = None
        if self._special.occurs_in(messages) or (tools and self._special.occurs_in(tools)):
            marks = Marks.unused_in([*strings(messages), *strings(tools)])
            messages, tools = self._special.mark(messages, marks), self._special.mark(tools, marks)
        return _Text(self._apply_chat_template(self._chat, messages, tools), raw=False, marks=marks)

    def _count(self, what: str) -> None:
        self._ignored[what] = self._ignored.get(what, 0) + 1

    def _apply_row_template(self, template: jinja2.Template, row: RowInput) -> tuple[str | None, list[Message] | None]:
        """The prompt or the messages that `--template` makes of the row's columns."""
        values = row.values or {}
        try:
            text = template.render(values)
        except _NullPrintedError as error:
            nulls = ", ".join(sorted(name for name, value in values.items() if _is_null(value)))
            where = f" (null here: {nulls})" if nulls else ""
            raise RowFaultError(f"--template prints a null value{where}: write {{{{ name or '' }}}} to allow it") from error
        except Exception as error:  # whatever an expression can raise costs this row only
            raise RowFaultError(f"--template: {_one_line(error)}") from error
        if not text.strip():
            raise RowFaultError("--template printed nothing for this row")
        messages = None if self._options.raw else _as_messages(text)
        return (text, None) if messages is None else (None, messages)

    def _turns(self, messages: list[Message], iterates_content: bool) -> list[Message]:
        turns = [normalise_turn(turn, f"messages[{number}]", iterates_content) for number, turn in enumerate(messages)]
        if not turns:
            raise RowFaultError("the messages are empty: give at least one turn")
        if self._options.system is not None and not any(turn["role"] in ("system", "developer") for turn in turns):
            turns.insert(0, {"role": "system", "content": self._options.system})
        return turns

    def _apply_chat_template(self, template: jinja2.Template, messages: list[Message], tools: list[Any] | None) -> str:
        """Render as transformers does: without content where a tool call has none, and with an empty one if that fails."""
        attempts = [messages]
        if any("content" not in turn for turn in messages):
            attempts.append([{**turn, "content": turn.get("content", "")} for turn in messages])
        fault: Exception | None = None
        for turns in attempts:
            try:
                return template.render(
                    messages=turns, tools=tools, documents=None, add_generation_prompt=True, **self._special_names
                )
            except Exception as error:  # whatever a model's template can raise costs this row only
                fault = error
        raise RowFaultError(f"the chat template refuses the row: {_one_line(fault)}") from fault


class _NullPrintedError(Exception):
    """A `--template` printed null or NaN, which would reach the model as the word."""


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _refuse_null(value: Any) -> Any:
    if _is_null(value):
        raise _NullPrintedError
    return value


def _one_line(error: Exception | None) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _as_messages(text: str) -> list[Message] | None:
    """The turns, when the text is a JSON list of objects with a role; None when it is a prompt.

    Raises:
        RowFaultError: it begins like a list of objects and is not one of turns. As a prompt it would run, and answer nonsense.
    """
    if not re.match(r"\s*\[\s*\{", text):
        return None
    try:
        turns = json.loads(text)
    except ValueError as error:
        raise RowFaultError(
            f"--template printed what begins as a JSON list of messages and is not JSON ({error}): "
            "write values as {{ name | tojson }}, which quotes them"
        ) from error
    if not all(isinstance(turn, dict) and "role" in turn for turn in turns):
        raise RowFaultError("--template printed a JSON list, but not of messages: each needs a `role`")
    return list(turns)
