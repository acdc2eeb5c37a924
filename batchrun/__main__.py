"""`python -m batchrun` is the `batchrun` command."""

import sys

from batchrun.cli.main import main

sys.exit(main())
