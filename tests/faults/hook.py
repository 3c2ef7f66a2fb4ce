"""An import hook that puts the fault of the variable MGPU_FAULT into its module, in memory.

The variable is ``MODULE:NUMBER``, the fault's number in ``faults_of``.  Processes that tests start inherit it.
"""

from __future__ import annotations

import ast
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from itertools import islice
from types import CodeType
from typing import Any

from faults.operators import faults_of

VARIABLE = "MGPU_FAULT"


class _Loader(SourceFileLoader):
    """Load a module with one fault."""

    def __init__(self, name: str, path: str, number: int) -> None:
        super().__init__(name, path)
        self._number = number

    def get_code(self, fullname: str) -> CodeType:
        tree = ast.parse(self.get_data(self.path))
        next(islice(faults_of(tree), self._number, None)).put()
        return compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    """Find one module as the other finders do, and have it loaded with the fault."""

    def __init__(self, module: str, number: int) -> None:
        self._module, self._number = module, number

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self._module:
            return None
        others = [each for each in sys.meta_path if each is not self]
        spec = next(found for each in others if (found := each.find_spec(fullname, path, target)))
        spec.loader = _Loader(fullname, str(spec.origin), self._number)
        return spec


def install() -> None:
    """Put the hook before the other finders, if the variable names a fault."""
    module, _, number = os.environ.get(VARIABLE, "").partition(":")
    if number:
        sys.meta_path.insert(0, _Finder(module, int(number)))
