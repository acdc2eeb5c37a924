"""The `batchrun` command: finds the subcommand, and turns every way to end into a line and an exit code.

Only click is imported here. A subcommand's module is imported when it is called, so that `batchrun --help` answers at once.
"""

import difflib
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, NamedTuple

import click

from batchrun import __version__
from batchrun.cli.ending import Interrupted, log_crash, one_line, open_lost_streams, say, silence_stdout
from batchrun.errors import BatchrunError, Refused, Stopped
from batchrun.links import check_links


class LazyCommand(NamedTuple):
    """Where a subcommand lives and what `batchrun --help` says of it without importing it."""

    module: str
    attribute: str
    summary: str


COMMANDS = {
    "run": LazyCommand("batchrun.cli.run", "run_command", "Answer every prompt of Parquet files."),
    "plan": LazyCommand(
        "batchrun.cli.plan", "plan_command", "Tell what would be shared, how long it takes, what memory it needs."
    ),
    "sql": LazyCommand("batchrun.cli.sql", "sql_command", "Query an output with SQL."),
    "doctor": LazyCommand("batchrun.cli.doctor", "doctor_command", "Show the device, kernels, versions and what is missing."),
}


def nearest(word: str, known: Sequence[str]) -> str | None:
    """The known word that looks most like the one typed, if any does."""
    return next(iter(difflib.get_close_matches(word, known, n=1)), None)


class Commands(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        lazy = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(lazy.module), lazy.attribute)
        assert isinstance(command, click.Command), f"{lazy.module}.{lazy.attribute} is no command"
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not name.startswith("-") and name not in COMMANDS:
            guess = nearest(name, list(COMMANDS))
            hint = f"did you mean {guess}?" if guess else f"there are {', '.join(COMMANDS)}"
            raise click.UsageError(f"unknown command {name!r}: {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, lazy.summary) for name, lazy in COMMANDS.items()])


@click.group(cls=Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="batchrun", message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Run a large file of prompts through a language model on this machine, computing every shared prefix once."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: what follows the program's name; None takes the process's own.

    Returns:
        The exit code: 0 fine, 1 finished with failed rows, 2 refused before the start, 3 stopped before the end,
        130 after SIGINT, 143 after SIGTERM.
    """
    # OpenMP reads this when torch is loaded. Threads that spin for long while they wait lose whole time slices on a machine that
    # does anything else, and steps take up to a hundred times as long; some microseconds of spinning cost nothing anywhere.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    open_lost_streams()
    for stream in (sys.stdout, sys.stderr):
        # Under LC_ALL=C a prompt's text must still print; outputs in files are always UTF-8.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    signal.signal(signal.SIGTERM, _raise_interrupted)
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except BatchrunError as error:
        return _fail(str(error), error.exit_code)
    except Interrupted as stop:
        return _fail(f"stopped by {signal.Signals(stop.signal_number).name}", 128 + stop.signal_number)
    except (KeyboardInterrupt, click.Abort):
        return _fail("stopped by SIGINT", 128 + signal.SIGINT)
    except BrokenPipeError:
        # Whoever read our output has enough of it (`batchrun sql ... | head -1`): that is no failure.
        silence_stdout()
        return 0
    except Exception as error:
        return _fail(f"{one_line(error)}; the traceback is in {log_crash(error, None)}", Stopped.exit_code)


def _run(arguments: list[str]) -> int:
    """Parse and call, with click's ways to end turned into ours.

    Not `cli.main`: it turns a broken pipe into exit code 1, which here means that rows failed.
    """
    check_links()
    try:
        with cli.make_context("batchrun", arguments) as context:
            code: Any = cli.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.NoSuchOption as error:
        guess = nearest(error.option_name, _option_names(error.ctx))
        where = error.ctx.command_path if error.ctx else "batchrun"
        hint = f"did you mean {guess}?" if guess else f"see {where} --help"
        raise Refused(f"unknown option {error.option_name}: {hint}") from None
    except click.ClickException as error:
        raise Refused(one_line(error.format_message()).removesuffix(".")) from None
    return code if isinstance(code, int) else 0


def _option_names(context: click.Context | None) -> list[str]:
    if context is None:
        return []
    return [name for parameter in context.command.get_params(context) for name in (*parameter.opts, *parameter.secondary_opts)]


def _fail(message: str, code: int) -> int:
    say(f"batchrun: error: {one_line(message)}")
    return code


def _raise_interrupted(signal_number: int, frame: FrameType | None) -> None:
    raise Interrupted(signal_number)


if __name__ == "__main__":
    sys.exit(main())
