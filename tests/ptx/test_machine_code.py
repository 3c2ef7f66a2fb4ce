"""The shape of the kernels' machine code: docs/machine_code.md is up to date, and keeps to its bounds."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_SPEC = importlib.util.spec_from_file_location("machine_code", ROOT / "tools" / "machine_code.py")
machine_code = importlib.util.module_from_spec(_SPEC)
sys.modules["machine_code"] = machine_code
_SPEC.loader.exec_module(machine_code)

pytestmark = [pytest.mark.fakes, pytest.mark.timeout(600)]  # each architecture is compiled
FOUR_LOADS = ("copy_kernel", "move_kernel", "squares_kernel", "sum_many_kernel", "sum_ranks_kernel sum")


@pytest.fixture(scope="module", params=machine_code.ARCHITECTURES)
def kernels(request):
    try:
        return machine_code.measure(request.param)
    except machine_code.Unavailable as reason:
        pytest.skip(str(reason))


def test_no_kernel_spills(kernels):
    assert [each.name for each in kernels if each.spilled] == []


def test_four_loads_are_in_flight(kernels):
    few = [each for each in kernels if each.template in FOUR_LOADS and each.loads_in_flight < 4]
    # Before compute capability 8.0 conversions to bfloat16 are many instructions, which ptxas begins one load early.
    assert {(each.arch, each.loads_in_flight) for each in few} <= {(75, 3)}
    assert all(re.search("__half|__nv_bfloat16", each.name) for each in few)


def test_stores_are_as_wide_as_they_can_be(kernels):
    wide = [each for each in kernels if each.template in FOUR_LOADS and each.template != "squares_kernel"]
    assert {each.store_nbytes for each in wide} == {16}


def test_copies_are_short(kernels):
    assert max(each.instructions for each in kernels if each.template == "copy_kernel") <= 700


def test_the_page_is_up_to_date(kernels):
    text = machine_code.PAGE.read_text()
    if f"with nvcc {machine_code.nvcc_release()}," not in text:
        pytest.skip(f"the page is of another nvcc than {machine_code.nvcc_release()}")
    rows = machine_code.table(machine_code.worst(kernels)).splitlines()[2:]
    assert [row for row in rows if row not in text] == [], "run: python tools/machine_code.py --write"


def test_loads_in_flight_are_counted_to_the_first_use():
    load = "        /*0010*/                   LDG.E.128 R{}, [R2.64] ;"
    use = "        /*0020*/                   FADD R{}, R{}, R1 ;"
    body = [load.format(4), load.format(8), use.format(20, 5), load.format(12)]
    assert machine_code._shape(body) == (4, 2, 0)
    assert machine_code._shape([load.format(4), ".L_x_1:", load.format(8)]) == (2, 1, 0)
    assert machine_code._shape([load.format(4), load.format(4)]) == (2, 2, 0)  # written again, not read
    store = "        /*0030*/              @!P0 STG.E.128 [R2.64], R4 ;"
    assert machine_code._shape([load.format(4), load.format(8), store, load.format(12)]) == (4, 2, 16)
