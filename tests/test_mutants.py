"""The mutants are as they were when they were last run: every text is found, every named test is there."""

import importlib.util
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SPEC = importlib.util.spec_from_file_location("mutants", TESTS / "mutants.py")
mutants = sys.modules["mutants"] = importlib.util.module_from_spec(SPEC)  # its dataclass looks itself up
SPEC.loader.exec_module(mutants)


@pytest.mark.parametrize("each", mutants.MUTANTS, ids=lambda each: each.name)
def test_its_text_is_found_and_its_tests_are_there(each):
    assert each.text(mutants.ROOT) != (mutants.ROOT / each.path).read_text()
    assert (TESTS / (f"cpp/{each.program}.cpp" if each.is_cpp else each.tests)).is_file()


def test_names_are_told_apart():
    names = [each.name for each in mutants.MUTANTS]
    assert len(set(names)) == len(names) >= 30


def test_the_table_has_all_of_them():
    rows = mutants.TABLE.read_text().splitlines()
    for each in mutants.MUTANTS:
        assert any(row.startswith(f"| {each.name} | `{each.path}` | `") for row in rows), "run mutants.py --table"
