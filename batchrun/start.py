"""Where the `batchrun` command begins: SIGINT ends it without a traceback even before the rest of it is imported."""

import os
import signal
import sys


def main() -> int:
    """Run the command line; see `batchrun.cli.main.main` for the exit codes."""
    former = signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    from batchrun.cli.main import main as run

    signal.signal(signal.SIGINT, former)
    return run()


if __name__ == "__main__":
    sys.exit(main())
