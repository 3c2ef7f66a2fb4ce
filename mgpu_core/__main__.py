"""`python -m mgpu_core` is `mgpu`."""

from mgpu_core.tools.cli import main

raise SystemExit(main())
