"""Report on machines made of fakes: four GPUs, UUID lists, MIG, old drivers, and every trap with its way out."""

from __future__ import annotations

import sys

import pytest
from fakes.nvml import GIB, UUIDS, FakeNvml, gpu, instance
from fakes.reports import VARIABLES, about, assert_same_facts, flat

from mgpu_core.devices.discovery import parse_visible_devices
from mgpu_core.devices.nccl_library import NcclLibrary
from mgpu_core.tools import doctor
from mgpu_core.tools.doctor import examination, render
from mgpu_core.tools.doctor.device_map import TorchDevice, TorchReading
from mgpu_core.tools.doctor.facts import Backend, Core, Defaults, Torch
from mgpu_core.tools.doctor.report import WIDTH

BUILT = (
    Backend("cpu", True, "2 threads"),
    Backend("cuda", True, "CUDA runtime 13.0"),
    Backend("nccl", True, "by dlopen"),
)
NO_CUDA = (
    Backend("cpu", True, "2 threads"),
    Backend("cuda", False, "no nvcc was found"),
    Backend("nccl", False, "no CUDA"),
)
FOUR = [gpu(index) for index in range(4)]


@pytest.fixture
def present(monkeypatch):
    """Puts GPUs into NVML and torch, and answers into the questions that need a driver."""

    def put(physical, seen, reason, core, about_torch):
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(gpus=physical))
        nccl = NcclLibrary("loaded", "/lib/libnccl.so.2", "2.30.7")
        defaults = Defaults(tuple(f"cuda:{device.index}" for device in seen))
        monkeypatch.setattr(examination, "read_torch_devices", lambda want: TorchReading(seen, reason))
        monkeypatch.setattr(examination, "find_nccl", lambda environ: nccl)
        monkeypatch.setattr(examination, "_torch", lambda: about_torch)
        monkeypatch.setattr(examination, "_defaults", lambda: defaults)
        monkeypatch.setattr(examination, "kept_verdicts", lambda devices: [])  # tested, and all is well
        monkeypatch.setattr(examination, "_all_reduce", lambda core: None)
        monkeypatch.setattr(examination, "_core", lambda: core or Core(BUILT, 13000, 13000, len(seen)))

    return put


@pytest.fixture
def machine(monkeypatch, present):
    """Makes a machine with these GPUs: torch and the core see what CUDA_VISIBLE_DEVICES leaves of them."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def make(physical=FOUR, *, variables=None, initial=None, torch_sees=None, reason=None, core=None, **torch_facts):
        variables = variables or {}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        read = parse_visible_devices(variables.get("CUDA_VISIBLE_DEVICES"), physical)
        parts = [device.part for device in read.devices or ()] if torch_sees is None else [gpu(i) for i in torch_sees]
        seen = tuple(
            TorchDevice(rank, part.uuid[4:], "0000:ff:00.0", part.name, 140 * GIB) for rank, part in enumerate(parts)
        )
        started_with = variables if initial is None else initial
        monkeypatch.setattr(examination, "_initial_environment", lambda: started_with)
        present(physical, seen, reason, core, Torch("2.15.0", **{"cuda": "13.2", "num_threads": 2} | torch_facts))
        return doctor.examine()

    return make


def test_four_gpus(machine):
    report = machine(variables={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert [(row.torch_index, row.nvidia_smi_index, row.uuid) for row in report.devices] == [
        (index, index, UUIDS[index]) for index in range(4)
    ]
    assert report.driver == "580.65.06"
    assert report.outlook == "DataParallel(net) runs on 4 ranks, cuda:0 to cuda:3."
    assert report.notices == ()
    assert_same_facts(report)


def test_a_list_of_uuids_with_hidden_gpus(machine):
    report = machine(variables={"CUDA_VISIBLE_DEVICES": f"{UUIDS[3]},GPU-99"})
    assert [(row.torch_index, row.entry, row.nvidia_smi_index) for row in report.devices] == [
        (0, UUIDS[3], 3),
        (1, "GPU-99", 0),
        (None, None, 1),
        (None, None, 2),
    ]
    assert report.notices == ()
    assert_same_facts(report)


def test_a_mig_instance(machine):
    report = machine([gpu(0, mig=(instance(0), instance(1)))], variables={"CUDA_VISIBLE_DEVICES": instance(1).uuid})
    assert [(row.torch_index, row.uuid) for row in report.devices] == [(0, instance(1).uuid), (None, instance(0).uuid)]
    assert report.outlook == "DataParallel(net) runs on cuda:0 alone."
    assert_same_facts(report)


def test_a_renumbered_gpu_and_the_order_are_hints(machine):
    report = machine(variables={"CUDA_VISIBLE_DEVICES": "3"})
    assert [notice.level for notice in report.notices] == ["hint", "hint"]
    assert "There is no cuda:3" in about(report, "renumbers").message
    assert render(report).count("no warnings, 2 hints\n") == 1
    assert_same_facts(report)


def test_uuids_with_one_beginning_are_written_out(machine):
    twin = f"{UUIDS[0][:-1]}0"
    physical = [gpu(0), type(gpu(1))(1, twin, "0000:02:00.0", "NVIDIA H200", GIB, GIB)]
    text = render(machine(physical))
    assert UUIDS[0] in text
    assert twin in text


def test_the_driver_for_cuda_12_is_one_warning_with_the_way_out(machine):
    report = machine(core=Core(BUILT, 13000, 12020, 0), variables={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    (notice,) = report.notices
    assert notice.level == "warning"
    assert "torch sees 4 GPU(s), the core none" in notice.message
    assert "built with CUDA 13.0, the driver knows no more than 12.2" in notice.message
    assert "MGPU_CUDA=system" in notice.advice
    assert report.outlook.endswith("cuda:0 to cuda:3, through the torch backend.")


def test_a_blind_core_with_a_new_driver_is_not_blamed_on_the_driver(machine):
    notice = about(machine(core=Core(BUILT, 13000, 13010, 0)), "the core none")
    assert "MGPU_CUDA" not in notice.advice


def test_a_build_without_cuda_beside_gpus(machine):
    report = machine(core=Core(NO_CUDA))
    assert about(report, "built without CUDA").level == "warning"
    assert "built without CUDA" in render(report)
    assert report.outlook.endswith("through the torch backend.")
    assert_same_facts(report)


@pytest.mark.parametrize("core", [Core(NO_CUDA), Core(BUILT, 13000, 0, 0), Core(BUILT, 13000, 13000, 2)])
def test_gpus_of_amd_are_served_by_plain_torch(machine, core):
    report = machine(
        [], torch_sees=[0, 1], cuda=None, hip="6.4", core=core, variables={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    )
    (notice,) = report.notices
    assert notice.level == "hint"
    assert "AMD GPUs (ROCm 6.4): plain torch serves them" in notice.message
    assert report.outlook == "DataParallel(net) runs on 2 ranks, cuda:0 to cuda:1, through the torch backend."


@pytest.mark.parametrize(("cuda", "advice"), [(None, "Install a CUDA build"), ("13.2", "wants a driver for CUDA 13.2")])
def test_gpus_that_torch_does_not_see(machine, cuda, advice):
    report = machine(torch_sees=[], reason="the driver is too old", cuda=cuda)
    notice = about(report, "NVML shows 4 GPU(s), torch none: the driver is too old")
    assert notice.level == "warning"
    assert advice in notice.advice
    assert [row.torch_index for row in report.devices] == [None] * 4
    assert "no GPU for torch: the driver is too old" in flat(render(report))


def test_hidden_gpus_are_not_blamed_on_torch(machine):
    report = machine(variables={"CUDA_VISIBLE_DEVICES": ""}, reason="No CUDA GPUs are available")
    assert "is set but empty" in about(report, "CUDA_VISIBLE_DEVICES").message
    assert not [notice for notice in report.notices if "torch none" in notice.message]


def test_a_change_that_came_too_late(machine):
    report = machine(
        variables={"CUDA_VISIBLE_DEVICES": "1"}, initial={}, torch_sees=[0, 1, 2, 3], cuda_initialised=True
    )
    notice = about(report, "was unset when this process started and is now '1'")
    assert notice.level == "warning"
    assert "the old value holds" in notice.message


def test_a_change_that_changes_nothing_is_no_warning(machine):
    report = machine(variables={"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, initial={}, cuda_initialised=True)
    assert about(report, "when this process started").level == "hint"


def test_a_change_in_time_is_no_trap(machine):
    report = machine(variables={"CUDA_VISIBLE_DEVICES": "1"}, initial={}, cuda_initialised=True)
    assert not [notice for notice in report.notices if "when this process started" in notice.message]


def test_another_count_than_expected(machine):
    notice = about(machine(torch_sees=[0, 1]), "torch shows 2 GPU(s) where 4 were expected")
    assert notice.level == "warning"


def test_several_gpus_without_nccl(machine, monkeypatch):
    machine()
    monkeypatch.setattr(examination, "find_nccl", lambda environ: None)
    report = doctor.examine()
    assert "pip install nvidia-nccl" in about(report, "There is no NCCL here").advice
    assert "NCCL none found" in flat(render(report))


def test_more_threads_than_cores(machine):
    notice = about(machine(num_threads=100_000), "torch uses 100000 threads")
    assert notice.level == "hint"
    assert notice.advice.startswith("export OMP_NUM_THREADS=")


def test_a_lost_gpu(machine, monkeypatch):
    machine()
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(gpus=FOUR, lost=[2]))
    assert about(doctor.examine(), "GPU 2 does not answer: GPU is lost").level == "warning"


def test_gpus_without_nvml(machine, monkeypatch):
    machine()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    report = doctor.examine()
    assert [(row.torch_index, row.nvidia_smi_index, row.memory_free) for row in report.devices] == [
        (index, None, None) for index in range(4)
    ]
    assert about(report, "nvidia-smi's numbers and the hidden GPUs are unknown").level == "hint"
    assert "? of 140.0 GiB" in render(report)


def test_no_line_is_wider_than_the_terminal(machine):
    report = machine([gpu(0, "NVIDIA T4"), gpu(1)], variables={"CUDA_VISIBLE_DEVICES": "1,0"}, core=Core(NO_CUDA))
    assert max(len(line) for line in render(report).splitlines()) <= WIDTH
