"""CUDA_VISIBLE_DEVICES, case by case, and against torch's own parser as an oracle."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
from fakes.nvml import UUIDS, gpu, instance
from hypothesis import assume, example, given
from hypothesis import strategies as st

from mgpu_core.devices.discovery import Visibility, candidates, parse_visible_devices

FOUR = [gpu(index) for index in range(4)]
MIG_FIRST = [gpu(0, mig=(instance(0), instance(1))), gpu(1)]


def indices(read: Visibility) -> list[int]:
    assert read.devices is not None
    return [device.physical.index for device in read.devices]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("0,1,2,3", [0, 1, 2, 3]),
        ("2,1", [2, 1]),
        ("3", [3]),
        (" 1 , 2 ", [1, 2]),
        ("1\t,2", [1, 2]),
        ("+3,-0", [3, 0]),
        ("1gpu2,2ampere", [1, 2]),
        ("0-3", [0]),
        ("0;1", [0]),
        ("01", [1]),
        ("0,", [0]),
        (UUIDS[2], [2]),
        ("GPU-47,GPU-99", [3, 0]),
        (f"{UUIDS[1]},GPU-e", [1, 2]),
    ],
)
def test_visible_in_the_order_of_the_list(value, expected):
    assert indices(parse_visible_devices(value, FOUR)) == expected


@pytest.mark.parametrize("value", ["", " ", ",", "-1", "-1,0", "NoDevFiles", "all", "none", "cuda:0", "+", "+-1", ",0"])
def test_a_list_that_begins_with_an_invalid_entry_shows_nothing(value):
    read = parse_visible_devices(value, FOUR)
    assert read.devices == ()
    assert read.requested == ()
    assert read.stop is not None
    assert read.stop.entry == value.split(",")[0]


@pytest.mark.parametrize(
    ("value", "expected", "entry", "reason"),
    [
        ("0,2,-1,1", [0, 2], "-1", "negative number"),
        ("0,7,1", [0], "7", "no such GPU: this machine has 0, 1, 2, 3"),
        ("0,,1", [0], "", "not a number"),
        ("1,two,3", [1], "two", "not a number"),
        ("0,GPU-99", [0], "GPU-99", "not a number"),
        ("GPU-99,1", [0], "1", "not a GPU- UUID like the first"),
        ("GPU-99, GPU-47", [0], " GPU-47", "may not follow a space"),
        ("GPU-99,GPU-123,GPU-47", [0], "GPU-123", "no device of this machine"),
        ("GPU-e,GPU-9,GPU-47", [2], "GPU-9", "several UUIDs, of GPU 0 and GPU 1"),
        ("GPU-99,MIG-1", [0], "MIG-1", "not a GPU- UUID"),
        ("GPU-99,gpu-47", [0], "gpu-47", "not a GPU- UUID"),
    ],
)
def test_the_first_invalid_entry_ends_the_list(value, expected, entry, reason):
    read = parse_visible_devices(value, FOUR)
    assert indices(read) == expected
    assert len(read.requested) == len(expected)
    assert read.stop is not None
    assert read.stop.entry == entry
    assert reason in read.stop.reason


@pytest.mark.parametrize(
    ("value", "entry"),
    [
        ("0,0", "0"),
        ("1,2, 1", "1"),
        ("0,+0", "+0"),
        ("0,9,0", "0"),
        ("GPU-99,GPU-99", "GPU-99"),
        ("GPU-99,GPU-994", "GPU-994"),
    ],
)
def test_a_repeated_device_hides_all(value, entry):
    read = parse_visible_devices(value, FOUR)
    assert read.devices == ()
    assert read.repeated == entry
    assert read.stop is None


def test_a_repetition_after_the_end_of_the_list_is_never_read():
    assert indices(parse_visible_devices("0,x,0", FOUR)) == [0]
    assert indices(parse_visible_devices("GPU-99,GPU-123,GPU-994", FOUR)) == [0]


def test_only_the_leading_number_of_an_entry_counts():
    assert parse_visible_devices("0-3,1gpu, 2 ,+3", FOUR).misread == [("0-3", 0), ("1gpu", 1)]
    assert parse_visible_devices("GPU-99", FOUR).misread == []


def test_without_the_list_of_gpus_the_text_alone_is_read():
    assert parse_visible_devices("0,9,1", None) == Visibility("0,9,1", "ordinals", ("0", "9", "1"))
    assert parse_visible_devices(None, None) == Visibility(None, "all")
    assert parse_visible_devices("", None).devices == ()
    assert parse_visible_devices("5,5", None).devices == ()


def test_a_machine_without_gpus_has_no_valid_ordinal():
    read = parse_visible_devices("0", [])
    assert read.devices == ()
    assert read.stop is not None
    assert read.stop.reason == "no such GPU: this machine has none"


def test_mig_instances_go_by_uuid_or_by_the_older_name():
    for value in ("MIG-00000001", instance(1).uuid, f"MIG-{UUIDS[0]}/8/0", "MIG-GPU-99/8/0"):
        read = parse_visible_devices(value, MIG_FIRST)
        assert read.devices is not None
        assert [device.part for device in read.devices] == [instance(1)], value
        assert not read.only_one_instance


@pytest.mark.parametrize("value", [f"MIG-{UUIDS[0]}/1/0", f"MIG-{UUIDS[1]}/8/0", "MIG-2", "MIG-0"])
def test_an_unknown_or_ambiguous_mig_instance_is_invalid(value):
    read = parse_visible_devices(value, MIG_FIRST)
    assert read.devices == ()
    assert read.stop is not None


@pytest.mark.parametrize("value", [None, "0,1", "1,0", "MIG-00000000,MIG-00000001", f"{UUIDS[1]},{UUIDS[0]}"])
def test_one_mig_instance_and_nothing_beside_it(value):
    read = parse_visible_devices(value, MIG_FIRST)
    assert read.devices is not None
    assert [device.part for device in read.devices] == [instance(0)]
    assert read.only_one_instance


def test_mig_mode_without_instances_leaves_the_other_gpus():
    read = parse_visible_devices(None, [gpu(0, mig=()), gpu(1), gpu(2)])
    assert indices(read) == [1, 2]
    assert not read.only_one_instance


def test_a_whole_gpu_may_be_chosen_beside_one_in_mig_mode():
    assert indices(parse_visible_devices("1", MIG_FIRST)) == [1]


def test_candidates_are_instances_in_mig_mode_and_gpus_otherwise():
    assert [c.part for c in candidates(MIG_FIRST)] == [instance(0), instance(1), gpu(1)]


TOKENS = st.sampled_from(
    ["0", "1", "2", "3", "4", "7", "-1", "+2", "-0", " 1", "3 ", "1gpu", "0-3", "", "x", "GPU-", "GPU-9", "GPU-99"]
    + ["GPU-9e", "GPU-e", "GPU-47", "GPU-47ea", "GPU-1", " GPU-47", "gpu-47", "MIG-1", *UUIDS]
)
NOISE = st.text("0123-+ gx", max_size=4)


def torch_indices(value: str) -> list[int]:
    """torch's answer: its list of entries, looked up as torch does it."""
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": value}):
        entries = torch.cuda._parse_visible_devices()
    if entries and isinstance(entries[0], str):
        return torch.cuda._transform_uuid_to_ordinals(entries, list(UUIDS))
    beyond = [position for position, ordinal in enumerate(entries) if ordinal >= len(UUIDS)]
    return entries[: beyond[0]] if beyond else entries


@given(st.lists(TOKENS | NOISE, min_size=1, max_size=5).map(",".join))
@example("0,9,0")
@example("GPU-99,GPU-1,GPU-994")
@example("GPU-,GPU-")
def test_reads_as_torch_reads(value):
    # torch leaves MIG to the driver, and fails on a sign with no number after it.
    assume(not value.startswith("MIG-"))
    assume(not any(entry.strip()[:1] in ("+", "-") and not entry.strip()[1:2].isdigit() for entry in value.split(",")))
    assert indices(parse_visible_devices(value, FOUR)) == torch_indices(value)


@given(st.lists(st.sampled_from(range(6)), min_size=1, max_size=6))
def test_ordinals_by_the_definition(ordinals):
    read = parse_visible_devices(",".join(map(str, ordinals)), FOUR)
    if len(set(ordinals)) < len(ordinals):
        assert read.devices == ()
        assert read.repeated is not None
    else:
        first_invalid = next((position for position, ordinal in enumerate(ordinals) if ordinal > 3), len(ordinals))
        assert indices(read) == ordinals[:first_invalid]
        assert (read.stop is None) == (first_invalid == len(ordinals))
