"""The faults that are put in on purpose: their operators, and a run that notices one."""

import ast
import tomllib

import pytest
from faults import hook
from faults.command import PythonFault, python_faults
from faults.operators import OPERATORS, faults_of
from faults.run import TESTS

FAULTS = {  # operator: a body, and what becomes of it
    "dropped_call": ("f(x)", "pass"),
    "dropped_raise": ("raise E(x + 1)", "pass"),
    "flipped_comparison": ("y = x < z", "y = x <= z"),
    "negated_condition": ("y = a if x else b", "y = a if not x else b"),
    "exchanged_connective": ("y = x and z", "y = x or z"),
    "swapped_arithmetic": ("y = x - z", "y = x + z"),
    "lost_result": ("return x", "return None"),
    "number_off_by_one": ("y = x[2:]", "y = x[3:]"),
    "swapped_arguments": ("y = f(x, z)", "y = f(z, x)"),
    "left_context": ("with x:\n    y = z", "with __import__('contextlib').nullcontext():\n    y = z"),
    "first_item_alone": ("y = [z for z in x]", "y = [z for z in __import__('itertools').islice(x, 1)]"),
}


def module_of(body):
    return ast.parse("class C:\n  def f(self):\n" + "\n".join(f"    {line}" for line in body.splitlines()))


def test_every_operator_is_here():
    assert list(FAULTS) == [each.__name__ for each in OPERATORS]


@pytest.mark.parametrize("operator", FAULTS)
def test_an_operator_makes_one_fault(operator):
    before, after = FAULTS[operator]
    tree = module_of(before)
    (fault,) = faults_of(tree)
    assert (fault.function, fault.operator, fault.line) == ("C.f", operator, 3)
    fault.put()
    assert ast.unparse(tree) == ast.unparse(module_of(after))


@pytest.mark.parametrize(
    "body", ["return []", "assert f(x)", "y: int = x", "y = isinstance(x, z)", "with x as y:\n    z = y", "y = 'a' + x"]
)
def test_what_makes_no_fault(body):
    assert list(faults_of(module_of(body))) == []


@pytest.mark.parametrize(("fault", "value"), [("", 2), ("toy:0", 3)])
def test_a_process_imports_the_module_with_its_fault(fault, value, tmp_path, monkeypatch):
    (tmp_path / "toy.py").write_text("def value():\n    x = 2\n    return x\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.meta_path", [*hook.sys.meta_path])
    monkeypatch.delitem(hook.sys.modules, "toy", raising=False)
    monkeypatch.setenv(hook.VARIABLE, fault)
    hook.install()
    import toy

    assert toy.value() == value


def test_the_table_names_modules_and_tests_that_are_there():
    found = python_faults(tomllib.loads((TESTS / "faults" / "targets.toml").read_text()))
    assert len(found) > 5000
    tests = {test.removeprefix("fake:") for each in found if isinstance(each, PythonFault) for test in each.tests}
    assert [test for test in sorted(tests) if not (TESTS / test).exists()] == []
