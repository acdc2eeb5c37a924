"""`python -m batchrun` is the `batchrun` command."""

import sys

from batchrun.start import main

sys.exit(main())
