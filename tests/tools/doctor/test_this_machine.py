"""Report on this machine as it is: its facts, both views of them, and no traceback whatever fails."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys

import pytest
import torch
from fakes.reports import VARIABLES, about, assert_same_facts, flat

from mgpu_core.tools import doctor
from mgpu_core.tools.cli import main
from mgpu_core.tools.doctor import examination, render
from mgpu_core.tools.doctor.facts import Defaults, Torch


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_this_machine():
    report = doctor.examine()
    assert report.mgpu_core == importlib.metadata.version("mgpu-core")
    assert report.python.version == platform.python_version()
    assert report.torch.version == torch.__version__
    assert [backend.name for backend in report.core.backends] == ["cpu", "cuda", "nccl"]
    assert report.cpu.memory_total is None or report.cpu.memory_total > (report.cpu.memory_available or 0)
    assert len([row for row in report.devices if row.torch_index is not None]) == torch.cuda.device_count()
    assert_same_facts(report)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_this_machine_without_a_gpu_says_so():
    report = doctor.examine()
    assert report.devices == ()
    assert report.no_device_reason
    assert report.outlook.startswith("No GPU is visible: DataParallel(net) passes everything to the plain module")
    assert "MGPU_CORE_CPU_RANKS=2 makes it two CPU ranks" in report.outlook
    assert [notice for notice in report.notices if notice.level == "warning"] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cpu_ranks_on_this_machine(monkeypatch):
    monkeypatch.setenv("MGPU_CORE_CPU_RANKS", "3")
    report = doctor.examine()
    assert report.defaults == Defaults(("cpu", "cpu", "cpu"))
    assert "MGPU_CORE_CPU_RANKS=3 asks for that many CPU ranks, torch threads in each: " in report.outlook
    assert_same_facts(report)


@pytest.mark.parametrize("value", ["abc", "-1", "0", "1e300"])
def test_numbers_that_are_none(monkeypatch, value):
    """Each is found out where it is needed, in every forward or not at all; doctor says it before."""
    names = ["MGPU_CORE_TIMEOUT", "MGPU_CORE_NCCL_TIMEOUT", "MGPU_CORE_NUM_THREADS"]
    for name in names:
        monkeypatch.setenv(name, value)
    [notice] = [each for each in doctor.examine().notices if names[0] in each.message]
    assert notice.message == ", ".join(f"{name}={value}" for name in names) + ": this is no number that it could be."
    for name in names:
        monkeypatch.setenv(name, "60")
    assert not [each for each in doctor.examine().notices if names[0] in each.message]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_number_of_ranks_that_is_none(monkeypatch):
    monkeypatch.setenv("MGPU_CORE_CPU_RANKS", "many")
    report = doctor.examine()
    assert "will refuse to start: MGPU_CORE_CPU_RANKS must be a whole number" in report.outlook
    assert about(report, "'many'").level == "warning"


@pytest.mark.parametrize("text", [None, "this is no library"])
def test_an_nccl_that_cannot_be_used(monkeypatch, tmp_path, text):
    path = tmp_path / "libnccl.so.2"
    if text:
        path.write_text(text)
    monkeypatch.setenv("MGPU_CORE_NCCL", str(path))
    report = doctor.examine()
    assert report.nccl is not None
    assert (report.nccl.source, report.nccl.version) == ("MGPU_CORE_NCCL", None)
    notice = about(report, f"MGPU_CORE_NCCL={path} cannot be used: ")
    assert notice.level == "warning"
    assert "unset MGPU_CORE_NCCL" in notice.advice
    assert_same_facts(report)


@pytest.mark.parametrize(
    "question", ["_torch", "_core", "_cpu", "_python", "find_nccl", "read_physical_devices", "_defaults"]
)
def test_a_question_that_fails_is_a_warning_and_never_a_traceback(monkeypatch, question):
    def fail(*arguments):
        raise RuntimeError("out of order")

    monkeypatch.setattr(examination, question, fail)
    report = doctor.examine()
    assert about(report, "could not be asked: RuntimeError: out of order").level == "warning"
    assert "out of order" in render(report)
    assert json.loads(report.to_json())["notices"]


def test_without_torch_nothing_runs(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    report = doctor.examine()
    assert report.torch == Torch()
    assert report.outlook.startswith("Nothing, before torch imports")
    assert "torch does not import" in flat(render(report))


def test_the_environment_this_process_started_with_is_not_the_changed_one(monkeypatch):
    initial = examination._initial_environment()
    if initial is None:
        pytest.skip("this system keeps no /proc/self/environ")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "set by this test")
    assert examination._initial_environment() == initial
    assert initial.get("CUDA_VISIBLE_DEVICES") != "set by this test"
    assert "PATH" in initial


def test_a_report_for_an_issue_is_a_block_without_the_home_folder(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MGPU_CORE_CACHE", str(tmp_path / "cache"))
    assert main(["doctor", "--report"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"```text\n{platform.platform()}\n\nVersions\n")
    assert "  MGPU_CORE_CACHE=~/cache\n" in shown
    assert shown.endswith("```\n")
    assert str(tmp_path) not in shown


def test_one_form_at_a_time(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--json", "--report"])
    assert "not allowed with argument" in capsys.readouterr().err
