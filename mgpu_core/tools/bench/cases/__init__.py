"""The cases: the measured call, its peers, and how results are verified.

Most files hold one `CASE`.  Two hold a table of `CASES`: `collectives`, whose rows are three ways to do one and the
closed form of its result, and `kernels`, whose rows are the tensors of a problem and the ways to do its work on them.
"""

import importlib
from typing import TYPE_CHECKING

from mgpu_core.tools.bench.titles import TITLES

if TYPE_CHECKING:
    from mgpu_core.tools.bench.case import Case

COLLECTIVES = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "scatter", "gather")
KERNELS = ("sgd", "adamw", "pack", "unpack", "sum_ranks", "scale_cast", "l2_norm")
_tables = dict.fromkeys(COLLECTIVES, "collectives") | dict.fromkeys(KERNELS, "kernels")
_elsewhere: dict[str, str] = {}  # modules of cases that are not in this folder


def add(name: str, title: str, module: str) -> None:
    """Let there be a case whose `CASE` another module holds."""
    TITLES[name], _elsewhere[name] = title, module


def load(name: str) -> "Case":
    """Return the case of that name."""
    module = importlib.import_module(_elsewhere.get(name, f"mgpu_core.tools.bench.cases.{_tables.get(name, name)}"))
    case: Case = module.CASES[name] if name in _tables else module.CASE
    return case
