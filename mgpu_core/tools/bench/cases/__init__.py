"""One small file a case: the measured call, its peers, and how results are verified.

A file here holds one `CASE`. The collectives share one implementation (`collective_case`), so theirs hold three
functions - ours, the torch loop, gloo - and a closed form of the result. The kernels share another (`kernel_case`):
theirs hold the tensors of a row and the ways to do its work on them.
"""

import importlib
from typing import TYPE_CHECKING

from mgpu_core.tools.bench.titles import TITLES

if TYPE_CHECKING:
    from mgpu_core.tools.bench.case import Case

_elsewhere: dict[str, str] = {}  # modules of cases that are not in this folder


def add(name: str, title: str, module: str) -> None:
    """Let there be a case whose `CASE` another module holds."""
    TITLES[name], _elsewhere[name] = title, module


def load(name: str) -> "Case":
    """Return the case of that name."""
    case: Case = importlib.import_module(_elsewhere.get(name, f"mgpu_core.tools.bench.cases.{name}")).CASE
    return case
