"""`python -m mixlab`, also for torchrun: `torchrun --nproc-per-node 2 -m mixlab train ...`."""

import sys

from mixlab.cli import main

sys.exit(main())
