"""One device or many?  Measured on the user's own model, with the reason and a recommendation.

``print(mgpu_core.advise(net, loss_fn, (x, y)))`` lets the ways to train take turns on copies of the net; ``mgpu advise
script.py`` does it for a script.  ``benchmark``, ``from_trace``, ``memory`` and ``loading`` measure;
``break_even``, ``reasons`` and ``recommend`` draw conclusions: pure functions of numbers.
"""

from __future__ import annotations

from mgpu_core.tools.advise.measure import advise
from mgpu_core.tools.advise.result import Advice

__all__ = ["Advice", "advise"]
