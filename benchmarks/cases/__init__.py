"""One small file a case: what is measured, against whom, and how its result is verified.

A file here holds one `CASE`. The collectives share one implementation (`benchmarks.collective_case`), so theirs hold
three functions - ours, the torch loop, gloo - and a closed form of the result. The kernels share another
(`benchmarks.kernel_case`): theirs hold the tensors of a row and the ways to do its work on them.
"""

import importlib

from benchmarks.case import Case
from benchmarks.titles import TITLES

NAMES = tuple(TITLES)


def load(name: str) -> Case:
    """The case of that name."""
    case: Case = importlib.import_module(f"benchmarks.cases.{name}").CASE
    return case
