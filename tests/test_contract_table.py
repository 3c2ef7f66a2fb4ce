"""Every promise has a test, every test that is named exists, and the table in the docs is that of today."""

import ast
import importlib.util
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def load_tool():
    spec = importlib.util.spec_from_file_location("contract_table", TESTS.parent / "tools" / "contract_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load_tool()
ROWS = [(section, promise) for section, rows in tool.promises().items() for promise in rows]


def functions_of(path):
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("section", "promise"), ROWS, ids=[promise[:50] for _, promise in ROWS])
def test_a_promise_has_tests_that_exist(section, promise):
    tests = tool.promises()[section][promise]
    assert tests
    for test in tests:
        path, name = test.split("::")
        assert name.startswith("test_")
        assert name in functions_of(TESTS / path), test


def test_the_page_is_that_of_today():
    assert tool.TARGET.read_text() == tool.page(), "run `python tools/contract_table.py`"
