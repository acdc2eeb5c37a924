"""Write docs/cli.md from the command line's own help; `make docs` runs it, a test fails when the file differs."""

from pathlib import Path

import click

from batchrun.cli.main import cli
from batchrun.overrides import BOOL_COLUMNS, INT_COLUMNS, OVERRIDES

TARGET = Path(__file__).with_name("cli.md")
WIDTH = 110
HEAD = """# Command line

Made from the program's own help by `make docs`; do not edit.

Exit codes: 0 every row is fine; 1 finished, some rows have errors; 2 refused before the start; 3 stopped before the end;
130 after SIGINT, 143 after SIGTERM. A job that ended with 3, 130 or 143 goes on with `--resume`.
"""


COLUMNS = """## Columns that set something for their row

Null takes the option's value. A value that cannot be costs its row; a column of a type that cannot be is refused.

| column | type | instead of |
|---|---|---|
"""


def reference() -> str:
    """The whole page."""
    root = _context(cli, None, "batchrun")
    parts = [HEAD, _section(root)]
    for name in cli.list_commands(root):
        command = cli.get_command(root, name)
        assert command is not None, f"batchrun --help lists {name}, which is not there"
        parts.append(_section(_context(command, root, name)))
    return "\n".join([*parts, _columns()])


def _columns() -> str:
    """The columns that set something for their row."""
    lines = []
    for name in OVERRIDES:
        kind = "a whole number" if name in INT_COLUMNS else "boolean" if name in BOOL_COLUMNS else "a number"
        kind = "string, or a list of strings" if name == "stop" else kind
        lines.append(f"| `{name}` | {kind} | `--{name.replace('_', '-')}` |")
    return COLUMNS + "\n".join(lines) + "\n"


def _context(command: click.Command, parent: click.Context | None, name: str) -> click.Context:
    # Through make_context, which applies the command's own settings, among them the names of the help option.
    return command.make_context(name, [], parent, resilient_parsing=True, terminal_width=WIDTH, max_content_width=WIDTH)


def _section(context: click.Context) -> str:
    return f"## {context.command_path}\n\n```text\n{context.get_help()}\n```\n"


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
