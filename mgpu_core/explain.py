"""``mgpu_core.explain``, as the import system sees it: the recorder itself, which is no module.

So ``from mgpu_core.explain import Step`` still works, with a DeprecationWarning, though that name has moved.
"""

import sys

from mgpu_core.explanation.recorder import explain

__all__ = ["explain"]

sys.modules[__name__] = explain  # type: ignore[assignment]
