"""`batchrun sql`: questions to an output."""

import shutil
import sys
from pathlib import Path

import click

from batchrun.cli.ending import say
from batchrun.errors import Refused

ENDINGS = {".csv": "csv", ".json": "json", ".parquet": "parquet", ".txt": "table"}
FORMATS = ("table", "csv", "json", "parquet")


@click.command("sql")
@click.argument("output", type=Path)
@click.argument("query", default="SELECT * FROM rows")
@click.option(
    "--format", "file_format", metavar="|".join(FORMATS), help="How to show the result.  [default: table, or as FILE ends]"
)
@click.option(
    "-o", "--output", "target", type=Path, metavar="FILE", help="Write the result to a new file instead of standard output."
)
def sql_command(output: Path, query: str, file_format: str | None, target: Path | None) -> int:
    """Query an output of `batchrun run` with SQL.

    OUTPUT is a Parquet file or a folder of them. QUERY is DuckDB's SQL over the view `rows`; `-` reads it from standard input,
    without it all rows are selected.

    \b
    batchrun sql answers.parquet "select finish_reason, count(*), avg(ttft_ms) from rows group by 1"
    batchrun sql answers.parquet "select row_index, error from rows where finish_reason = 'error'" --format csv
    """
    chosen = _choose(file_format, target)
    text = sys.stdin.read() if query == "-" else query
    if not text.strip():
        raise Refused("the query is empty: ask with SELECT ... FROM rows")

    from batchrun import sql

    table = sql.query(output, text)
    if not sql.is_output(output):
        say(f"batchrun: note: {output} is not an output of `batchrun run`; it is queried all the same")
    if target is not None:
        sql.save(table, chosen, target)
        return 0
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    stream = sys.stdout.buffer
    sql.write(table, chosen, stream, width)
    stream.flush()
    return 0


def _choose(file_format: str | None, target: Path | None) -> str:
    """The format that was asked for, or that goes with the file's ending.

    Raises:
        Refused: there is no such format, the ending says none, or it is for files and would go to a terminal.
    """
    if file_format is None:
        file_format = "table" if target is None else ENDINGS.get(target.suffix.lower(), "")
        if not file_format:
            raise Refused(f"--output is {str(target)!r}: end it in {', '.join(ENDINGS)}, or say what it is by --format")
    if file_format not in FORMATS:
        raise Refused(f"--format is {file_format!r}: it must be one of {', '.join(FORMATS)}")
    if file_format == "parquet" and target is None and sys.stdout.isatty():
        raise Refused("--format parquet is not for a terminal: name a file with --output, or redirect standard output")
    return file_format
