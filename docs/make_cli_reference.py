"""Write docs/cli.md from the command line's own help; `make docs` runs it, a test fails when the file differs."""

from pathlib import Path

import click

from batchrun.cli.main import cli

TARGET = Path(__file__).with_name("cli.md")
HEAD = """# Command line

Made from the program's own help by `make docs`; do not edit.

Exit codes: 0 every row is fine; 1 finished, some rows have errors; 2 refused before the start; 3 stopped before the end;
130 after SIGINT, 143 after SIGTERM. A job that ended with 3, 130 or 143 goes on with `--resume`.
"""


def reference() -> str:
    """The whole page."""
    root = click.Context(cli, info_name="batchrun", terminal_width=110, max_content_width=110)
    parts = [HEAD, _section(root)]
    for name in cli.list_commands(root):
        command = cli.get_command(root, name)
        assert command is not None, f"batchrun --help lists {name}, which is not there"
        parts.append(_section(click.Context(command, parent=root, info_name=name, terminal_width=110, max_content_width=110)))
    return "\n".join(parts)


def _section(context: click.Context) -> str:
    return f"## {context.command_path}\n\n```text\n{context.get_help()}\n```\n"


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
