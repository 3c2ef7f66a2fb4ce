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
            assert_same_arguments(getattr(_core, node.name), node)


def test_same_methods():
    for node in STUB.body:
        methods = [each for each in getattr(node, "body", []) if isinstance(each, ast.FunctionDef)]
        if isinstance(node, ast.ClassDef) and methods:
            module = getattr(_core, node.name)
            named = {each.name for each in methods if not each.name.startswith("_")}
            assert named == {name for name in vars(module) if not name.startswith("_")}
            for each in methods:
                if each.decorator_list:  # a property
                    assert isinstance(vars(module)[each.name], property)
                else:
                    assert_same_arguments(getattr(module, each.name), each)


def assert_same_arguments(function, node):
    signature = function.__doc__.splitlines()[0]
    names = re.findall(r"(\w+): ", signature.split(" -> ")[0])
    assert [name for name in names if name != "self"] == [
        argument.arg for argument in node.args.args + node.args.kwonlyargs if argument.arg != "self"
    ], signature


def test_error_classes_and_their_bases():
    for node in STUB.body:
        if isinstance(node, ast.ClassDef) and node.bases:
            bases = [base.id for base in node.bases]
            assert [base.__name__ for base in getattr(_core, node.name).__bases__] == bases
