"""The traps: each is reported once, in words that name the value and the way out; a harmless value is not reported."""

from __future__ import annotations

import pytest
from fakes.nvml import UUIDS, gpu, instance

from mgpu_core.devices.discovery import parse_visible_devices
from mgpu_core.tools.doctor.visibility_notices import VARIABLE, change_notice, visibility_notices

FOUR = [gpu(index) for index in range(4)]


def notices(value, physical=FOUR, order="PCI_BUS_ID"):
    return visibility_notices(parse_visible_devices(value, physical), physical, order)


@pytest.mark.parametrize("value", [None, "0", "0,1", "0,1,2,3", UUIDS[3], "GPU-99,GPU-47"])
def test_harmless_values_are_not_reported(value):
    assert notices(value) == []


@pytest.mark.parametrize(
    ("value", "level", "message", "advice"),
    [
        ("", "warning", "CUDA_VISIBLE_DEVICES is set but empty: CUDA shows no GPU.", "unset"),
        ("  ", "warning", "is set but empty", "unset"),
        ("-1", "hint", "=-1 hides every GPU", "unset"),
        ("NoDevFiles", "hint", "=NoDevFiles hides every GPU", "unset"),
        ("all", "warning", "belong to the containers' NVIDIA_VISIBLE_DEVICES", "unset"),
        ("1,1", "warning", "=1,1 names '1' twice: the driver then shows no GPU at all.", "device_ids=[0, 0]"),
        ("cuda:0", "warning", "stops at 'cuda:0' (not a number), so no GPU is visible.", "Write the number alone"),
        ("0,GPU2", "warning", "stops at 'GPU2' (not a number), so only 0 is visible.", "Write the number alone"),
        ("0,9,1", "warning", "stops at '9' (no such GPU: this machine has 0, 1, 2, 3), so only 0", "as in 0,1"),
        (
            "0,1,-1,2",
            "warning",
            "stops at '-1' (a negative number ends the list), so only 0,1 is visible.",
            "as in 0,1",
        ),
        ("GPU-99, GPU-47", "warning", "stops at ' GPU-47' (a UUID may not follow a space)", "with no spaces"),
        ("GPU-9", "warning", "several UUIDs, of GPU 0 and GPU 1), so no GPU is visible.", "nvidia-smi -L"),
        ("0-3", "warning", "the driver reads '0-3' as 0.", "no ranges"),
        ("3", "hint", "=3 renumbers: GPU 3 is cuda:0. There is no cuda:3.", "from cuda:0"),
        ("1,0", "hint", "=1,0 renumbers: GPU 1 is cuda:0, GPU 0 is cuda:1.", "from cuda:0"),
    ],
)
def test_each_trap_is_reported_once(value, level, message, advice):
    (notice,) = notices(value)
    assert notice.level == level
    assert message in notice.message
    assert advice in notice.advice


def test_a_swap_of_the_first_gpus_loses_none():
    (notice,) = notices("1,0")
    assert "There is no" not in notice.message


@pytest.mark.parametrize(("value", "count"), [("", 1), ("0,0", 1), ("0-3", 1), ("3", 0), ("9", 0)])
def test_without_nvml_the_text_is_still_judged(value, count):
    assert len(notices(value, None)) == count


def test_several_mig_instances_are_one():
    physical = [gpu(0, mig=(instance(0), instance(1)))]
    (notice,) = notices("MIG-00000001,MIG-00000000", physical)
    assert notice.level == "warning"
    assert f"here {instance(1).uuid} alone" in notice.message


@pytest.mark.parametrize("order", [None, "FASTEST_FIRST"])
def test_the_default_order_is_a_hint_for_equal_gpus_and_a_warning_for_unequal_ones(order):
    (equal,) = notices(None, FOUR, order)
    (unequal,) = notices("0,1", [gpu(0, "NVIDIA T4"), gpu(1)], order)
    assert (equal.level, unequal.level) == ("hint", "warning")
    assert "cuda:0 may not be nvidia-smi's GPU 0" in unequal.message
    assert equal.advice == unequal.advice == "export CUDA_DEVICE_ORDER=PCI_BUS_ID"


@pytest.mark.parametrize(("value", "physical"), [(UUIDS[0], FOUR), ("0", FOUR[:1]), (None, FOUR[:1]), (None, [])])
def test_uuids_and_single_gpus_have_no_order(value, physical):
    assert notices(value, physical, None) == []


def test_an_order_that_cuda_does_not_know_is_named():
    (notice,) = notices(None, FOUR, "pci_bus_id")
    assert notice.level == "warning"
    assert "CUDA_DEVICE_ORDER=pci_bus_id is not a value that CUDA knows" in notice.message


@pytest.mark.parametrize(
    ("initialised", "kept", "level"),
    [(True, True, "warning"), (True, False, None), (True, None, "hint"), (False, None, "hint"), (False, True, "hint")],
)
def test_a_change_inside_the_process(initialised, kept, level):
    notice = change_notice({}, {VARIABLE: "1"}, initialised, kept)
    assert (notice and notice.level) == level
    if notice:
        assert "CUDA_VISIBLE_DEVICES was unset when this process started and is now '1'" in notice.message


def test_no_change_is_no_trap():
    assert change_notice({VARIABLE: "1"}, {VARIABLE: "1"}, True, True) is None
    assert change_notice({}, {"OTHER": "1"}, True, True) is None
    assert change_notice(None, {VARIABLE: "1"}, True, True) is None


def test_an_empty_value_differs_from_none():
    notice = change_notice({VARIABLE: ""}, {}, False, None)
    assert notice is not None
    assert "was '' when this process started and is now unset" in notice.message
