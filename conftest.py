"""Let ``python -m pytest`` in a clone find the installed package.

Python puts the current folder first in ``sys.path``; the clone's ``mgpu_core`` there has no compiled core.  An editable
install does not need that entry.
"""

import sys
from pathlib import Path

sys.path[:] = [each for each in sys.path if Path(each or ".").resolve() != Path(__file__).parent]
