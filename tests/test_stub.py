"""The stub says what the compiled module has: same names, same arguments."""

import ast
import re
from pathlib import Path

import mgpu_core
from mgpu_core import _core

STUB = ast.parse((Path(mgpu_core.__file__).parent / "_core.pyi").read_text())


def test_same_names():
    stub = {node.name for node in STUB.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    module = {name for name in dir(_core) if not name.startswith("_")}
    assert stub == module


def test_same_arguments():
    for node in STUB.body:
        if isinstance(node, ast.FunctionDef):
            signature = getattr(_core, node.name).__doc__.splitlines()[0]
            names = re.findall(r"(\w+): ", signature.split(" -> ")[0])
            assert names == [argument.arg for argument in node.args.args], signature


def test_error_classes_and_their_bases():
    for node in STUB.body:
        if isinstance(node, ast.ClassDef):
            bases = [base.id for base in node.bases]
            assert [base.__name__ for base in getattr(_core, node.name).__bases__] == bases
