"""`python -m mgpu_core` is `mgpu`."""

from mgpu_core.cli import main

raise SystemExit(main())
