"""Jinja as chat templates expect it, with no other library than jinja2.

The environment behaves as the one of transformers' `apply_chat_template` (utils/chat_template_utils.py): sandboxed,
`trim_blocks`, `lstrip_blocks`, `break` and `continue`, `{% generation %}`, `raise_exception`, `strftime_now`, and a `tojson`
that escapes nothing. The one difference is the clock: `strftime_now` tells one fixed time, so that every row of a run sees
the same date and a resumed run the same prompts.
"""

import json
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchrun.errors import Refused


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what an assistant wrote, for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block, not a bare scope: assignments inside stay inside, as in transformers.
        call = self.call_method("_content")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    @staticmethod
    def _content(caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict(...)` in a template: makes dicts and is nothing else, so that no class is in a template's reach."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(jinja2.utils.Namespace):
    """`namespace(...)` that keeps no name with a leading underscore."""

    def __init__(*args: Any, **values: Any) -> None:  # no self: `namespace(self=1)` must work
        self, *given = args
        attributes = dict(*given, **values)
        for name in attributes:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name!r}: the name must not start with an underscore")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def environment(
    now: datetime, undefined: type[jinja2.Undefined] = jinja2.Undefined, finalize: Callable[[Any], Any] | None = None
) -> ImmutableSandboxedEnvironment:
    """An environment for chat templates and for `--template` files; `strftime_now` tells `now`."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
        undefined=undefined,
        finalize=finalize,
    )
    env.filters["tojson"] = _tojson
    env.globals.update(raise_exception=_raise_exception, strftime_now=now.strftime, dict=_Dict(), namespace=_Namespace)
    return env


def compile_template(env: jinja2.Environment, source: str, what: str) -> jinja2.Template:
    """Compile `source`.

    Raises:
        Refused: a syntax error; the message names `what` and the line.
    """
    try:
        return env.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise Refused(f"{what}, line {error.lineno}: {error.message}") from error
    except jinja2.TemplateError as error:
        raise Refused(f"{what}: {error.message}") from error


def template_variables(source: str) -> frozenset[str]:
    """Names that a template takes from outside and cannot do without.

    Left out are the functions that every template has (`range`, `raise_exception`, ...) and names that the template itself
    asks about with `is defined`.

    Raises:
        jinja2.TemplateSyntaxError: source is no template.
    """
    env = environment(datetime(2000, 1, 1))
    tree = env.parse(source)
    tests = (test for test in tree.find_all(jinja2.nodes.Test) if test.name in ("defined", "undefined"))
    asked = {test.node.name for test in tests if isinstance(test.node, jinja2.nodes.Name)}
    return frozenset(jinja2.meta.find_undeclared_variables(tree) - env.globals.keys() - asked)


class TemplateFacts:
    """What a chat template looks at, read from its syntax tree."""

    def __init__(self, source: str) -> None:
        tree = environment(datetime(2000, 1, 1)).parse(source)
        names = jinja2.meta.find_undeclared_variables(tree)
        self.reads_tools = "tools" in names
        """The template uses `tools`; else tools given to it go nowhere."""
        self.reads_tool_calls = _mentions(tree, "tool_calls")
        """The template uses a message's `tool_calls`; else an assistant's calls go nowhere."""
        self.iterates_content = _iterates_content(tree)
        """The template takes a message's content as a list of parts."""


def _mentions(node: jinja2.nodes.Node, name: str) -> bool:
    attributes = any(found.attr == name for found in node.find_all(jinja2.nodes.Getattr))
    return attributes or any(found.value == name for found in node.find_all(jinja2.nodes.Const))


def _reads_content(node: jinja2.nodes.Node) -> bool:
    """Whether an expression is a message's content, possibly filtered: `message.content`, `message['content'] | list`."""
    while isinstance(node, jinja2.nodes.Filter) and node.node is not None:
        node = node.node
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, jinja2.nodes.Getitem) and isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == "content"


def _iterates_content(tree: jinja2.nodes.Template) -> bool:
    """Whether some loop runs over a message's content, or over a variable or macro argument that holds it."""
    held = {"content"}
    for assign in tree.find_all(jinja2.nodes.Assign):
        if isinstance(assign.target, jinja2.nodes.Name) and _reads_content(assign.node):
            held.add(assign.target.name)
    for loop in tree.find_all(jinja2.nodes.For):
        over = loop.iter
        while isinstance(over, jinja2.nodes.Filter) and over.node is not None:
            over = over.node
        if _reads_content(over) or (isinstance(over, jinja2.nodes.Name) and over.name in held):
            return True
    return False
