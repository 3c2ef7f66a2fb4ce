"""One small file a case: the measured call, its peers, and how results are verified.

A file here holds one `CASE`. The collectives share one implementation (`collective_case`), so theirs hold three
functions - ours, the torch loop, gloo - and a closed form of the result. The kernels share another (`kernel_case`):
theirs hold the tensors of a row and the ways to do its work on them.
"""

import importlib

from mgpu_core.bench.case import Case
from mgpu_core.bench.titles import TITLES

NAMES = tuple(TITLES)


def load(name: str) -> Case:
    """Return the case of that name."""
    case: Case = importlib.import_module(f"mgpu_core.bench.cases.{name}").CASE
    return case
