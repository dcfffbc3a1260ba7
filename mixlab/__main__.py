"""`python -m mixlab` is the `mixlab` command."""

import sys

from mixlab.cli import main

sys.exit(main())
