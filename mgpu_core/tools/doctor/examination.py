"""Ask everybody who knows something: Python, torch, the core, NVML, NCCL, the system.

Each question is asked under a guard, so a failure becomes
a warning in the report. torch's devices are asked for in this process, which initialises CUDA; NCCL is not loaded here.
"""

import importlib.metadata
import os
import platform
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from mgpu_core.devices.discovery import parse_visible_devices
from mgpu_core.devices.nccl_library import find_nccl
from mgpu_core.devices.peers import PeerVerdict, kept_verdicts, prove_peers
from mgpu_core.tools.doctor.checks import Facts, notices, outlook
from mgpu_core.tools.doctor.device_map import TorchReading, map_devices, read_torch_devices
from mgpu_core.tools.doctor.facts import Backend, Core, Cpu, Defaults, Python, Torch
from mgpu_core.tools.doctor.nvml import NvmlReading, read_physical_devices
from mgpu_core.tools.doctor.report import Report
from mgpu_core.tools.doctor.visibility_notices import ORDER, VARIABLE, Notice

T = TypeVar("T")


def examine(*, test_peers: bool = False) -> Report:
    """Return the report on this process, as it is now.

    Args:
        test_peers: test now whether the GPUs reach each other's memory; without it, report an earlier test.
    """
    guard = _Guard()
    facts = _ask(guard, test_peers)
    read = facts.read
    return Report(
        mgpu_core=guard("the version of mgpu_core", lambda: importlib.metadata.version("mgpu-core"), "not installed"),
        python=guard("Python", _python, Python(platform.python_version(), False, True)),
        torch=facts.torch,
        core=facts.core,
        driver=facts.nvml.driver_version or guard("the driver", _driver_of_kernel, None),
        nccl=facts.nccl,
        devices=map_devices(facts.seen.devices, facts.nvml.devices, read),
        no_device_reason=facts.seen.reason,
        nvml_problem=facts.nvml.reason,
        peers=facts.peers,
        all_reduce=facts.all_reduce,
        cpu=facts.cpu,
        environment=_environment(),
        defaults=facts.defaults,
        outlook=outlook(facts),
        notices=(*guard.problems, *notices(facts)),
    )


class _Guard:
    """Ask a question; an error is kept as a warning, and the answer is `otherwise`."""

    def __init__(self) -> None:
        self.problems: list[Notice] = []

    def __call__(self, subject: str, ask: Callable[[], T], otherwise: T) -> T:
        try:
            return ask()
        except Exception as error:
            message = f"{subject} could not be asked: {type(error).__name__}: {error}"
            advice = "Not a case that doctor knows; the rest of this report stands."
            self.problems.append(Notice("warning", message, advice))
            return otherwise


def _ask(guard: _Guard, test_peers: bool) -> Facts:
    # torch first: whether CUDA was initialised must be known before doctor itself initialises it.
    torch = guard("torch", _torch, Torch())
    nvml = guard("NVML", read_physical_devices, NvmlReading(reason="it failed"))
    want_free_memory = nvml.devices is None
    nothing = TorchReading(reason="torch could not be asked")
    seen = guard("torch's devices", lambda: read_torch_devices(want_free_memory), nothing) if torch.version else nothing
    core = guard("the compiled core", _core, Core())
    return Facts(
        environ=dict(os.environ),
        initial_environ=guard("the first environment", _initial_environment, None),
        read=parse_visible_devices(os.environ.get(VARIABLE), nvml.devices),
        nvml=nvml,
        seen=seen,
        torch=torch,
        defaults=guard("the default devices", _defaults, Defaults()) if torch.version else Defaults(),
        core=core,
        peers=guard("the GPUs' peers", lambda: _peers(core, test_peers), None),
        all_reduce=guard("the kept measurements", lambda: _all_reduce(core), None),
        nccl=guard("NCCL", lambda: find_nccl(os.environ), None),
        cpu=guard("the system", _cpu, Cpu(os.cpu_count() or 1, os.cpu_count() or 1, None, None)),
    )


def _python() -> Python:
    free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    gil_enabled = getattr(sys, "_is_gil_enabled", lambda: True)()
    return Python(platform.python_version(), free_threaded, gil_enabled)


def _torch() -> Torch:
    import torch

    initialised = bool(torch.cuda.is_initialized())
    kind = torch.accelerator.current_accelerator(check_available=True)
    return Torch(
        str(torch.__version__), torch.version.cuda, torch.get_num_threads(), initialised, torch.version.hip,
        None if kind is None else kind.type, torch.accelerator.device_count(),
    )  # fmt: skip


def _defaults() -> Defaults:
    from mgpu_core.devices.devices import default_devices

    try:
        return Defaults(tuple(str(device) for device in default_devices()))
    except ValueError as error:
        return Defaults(problem=str(error))


def _core() -> Core:
    from mgpu_core import _core as core

    return Core(
        backends=tuple(Backend(*backend) for backend in core.backends()),
        cuda_runtime=core.runtime_version("cuda"),
        cuda_driver=core.driver_version("cuda"),
        cuda_device_count=core.device_count("cuda"),
    )


def _peers(core: Core, test: bool) -> tuple[PeerVerdict, ...] | None:
    devices = range(core.cuda_device_count)
    verdicts = prove_peers(devices, again=True) if test else kept_verdicts(devices) if len(devices) > 1 else None
    return None if verdicts is None else tuple(verdicts)


def _all_reduce(core: Core) -> dict[int, str] | None:
    from mgpu_core.comm.tuning import kept_table

    return kept_table(range(core.cuda_device_count)) if core.cuda_device_count > 1 else None


def _cpu() -> Cpu:
    cores = os.cpu_count() or 1
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    memory = _memory()
    return Cpu(cores, available, memory.get("MemTotal"), memory.get("MemAvailable"))


def _memory() -> dict[str, int]:
    """Parse lines such as `MemTotal: 8000 kB`, into bytes."""
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.exists() else []
    fields = (line.split() for line in lines)
    return {field[0].rstrip(":"): int(field[1]) * 1024 for field in fields if field[2:] == ["kB"]}


def _driver_of_kernel() -> str | None:
    path = Path("/sys/module/nvidia/version")
    return path.read_text().strip() if path.exists() else None


def _initial_environment() -> dict[str, str] | None:
    path = Path("/proc/self/environ")
    if not path.exists():
        return None
    pairs = (entry.partition("=") for entry in os.fsdecode(path.read_bytes()).split("\0"))
    return {name: value for name, _, value in pairs}


def _environment() -> dict[str, str]:
    told = (name for name in sorted(os.environ) if name.startswith("MGPU_CORE_") or name in (VARIABLE, ORDER))
    return {name: os.environ[name] for name in told}
