"""`python -m mgpu_core.mnist`, for a checkout whose `mgpu` command is not on the path."""

import sys

from mgpu_core.mnist.train import main

sys.exit(main())
