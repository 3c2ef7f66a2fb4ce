"""``python tests/faults``: see faults/command.py."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from faults.command import main

    sys.exit(main())
