"""Conclusions from the facts: warnings and hints with advice, and the outlook in one sentence.

Pure functions: facts in, notices out. A check stays silent unless it can name both the trouble and the way out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mgpu_core.devices.discovery import Visibility, parse_visible_devices
from mgpu_core.devices.nccl_library import VARIABLE as NCCL_VARIABLE
from mgpu_core.devices.nccl_library import NcclLibrary
from mgpu_core.devices.nccl_teams import TIMEOUT_VARIABLE as NCCL_TIMEOUT_VARIABLE
from mgpu_core.devices.peers import PeerVerdict
from mgpu_core.devices.time_limits import TIMEOUT_VARIABLE
from mgpu_core.tools.doctor.device_map import TorchReading, shows
from mgpu_core.tools.doctor.facts import Core, Cpu, Defaults, Torch
from mgpu_core.tools.doctor.nvml import NvmlReading
from mgpu_core.tools.doctor.report import version_text
from mgpu_core.tools.doctor.visibility_notices import ORDER, VARIABLE, Notice, change_notice, visibility_notices

RANKS = "MGPU_CORE_CPU_RANKS"


@dataclass(frozen=True, slots=True)
class Facts:
    """All answers, before anybody judges them."""

    environ: Mapping[str, str]
    initial_environ: Mapping[str, str] | None
    read: Visibility
    nvml: NvmlReading
    seen: TorchReading
    torch: Torch
    defaults: Defaults
    core: Core
    nccl: NcclLibrary | None
    peers: tuple[PeerVerdict, ...] | None
    all_reduce: dict[int, str] | None
    cpu: Cpu


def notices(facts: Facts) -> list[Notice]:
    """Return all notices, warnings first."""
    notices_of_all = visibility_notices(facts.read, facts.nvml.devices, facts.environ.get(ORDER))
    checks = _NVIDIA_CHECKS if facts.torch.hip is None else (_amd,)
    notices_of_all += [notice for check in (*_CHECKS, *checks) if (notice := check(facts))]
    notices_of_all += [Notice("warning", problem, "nvidia-smi and dmesg say more.") for problem in facts.nvml.problems]
    return sorted(notices_of_all, key=lambda notice: notice.level == "hint")


def outlook(facts: Facts) -> str:
    """Say how `DataParallel(net)` will run here, without further arguments."""
    devices = facts.defaults.devices
    if facts.torch.version is None:
        return "Nothing, before torch imports: mgpu_core stands on it."
    if facts.defaults.problem:
        return f"DataParallel(net) will refuse to start: {facts.defaults.problem}."
    if not devices:
        return f"No GPU is visible: DataParallel(net) passes everything to the plain module, on the CPU. {_TWO_RANKS}"
    if devices[0] == "cpu":
        share = max(1, (facts.torch.num_threads or 1) // len(devices))
        ranks = f"{RANKS}={len(devices)} asks for that many CPU ranks, torch threads in each: {share}."
        return f"No GPU is visible: DataParallel(net) runs on the CPU. {ranks}"
    where = f"{len(devices)} ranks, {devices[0]} to {devices[-1]}" if devices[1:] else f"{devices[0]} alone"
    is_served = facts.torch.hip is None and facts.core.has_cuda and facts.core.cuda_device_count > 0
    return f"DataParallel(net) runs on {where}{'' if is_served else ', through the torch backend'}."


_TWO_RANKS = f'{RANKS}=2 makes it two CPU ranks, and so does device_ids=["cpu", "cpu"].'


def _changed(facts: Facts) -> Notice | None:
    return change_notice(facts.initial_environ, facts.environ, facts.torch.cuda_initialised, _kept_initial(facts))


def _kept_initial(facts: Facts) -> bool | None:
    if facts.nvml.devices is None or facts.initial_environ is None:
        return None
    first = parse_visible_devices(facts.initial_environ.get(VARIABLE), facts.nvml.devices)
    as_first, as_now = (shows(facts.seen.devices, facts.nvml.devices, read) for read in (first, facts.read))
    return None if as_first == as_now else as_first


def _blind_torch(facts: Facts) -> Notice | None:
    if facts.seen.devices or not facts.read.devices or not facts.torch.version:
        return None
    message = f"NVML shows {len(facts.read.devices)} GPU(s), torch none: {facts.seen.reason}"
    if facts.torch.cuda is None:
        return Notice("warning", message, "Install a CUDA build of torch.")
    advice = f"torch wants a driver for CUDA {facts.torch.cuda}; the driver here is {facts.nvml.driver_version}."
    return Notice("warning", message, advice)


def _other_count(facts: Facts) -> Notice | None:
    if facts.read.devices is None or not facts.seen.devices or len(facts.read.devices) == len(facts.seen.devices):
        return None
    message = f"torch shows {len(facts.seen.devices)} GPU(s) where {len(facts.read.devices)} were expected."
    advice = f"Was {VARIABLE} changed after CUDA was initialised? Does every GPU work (nvidia-smi)?"
    return Notice("warning", message, advice)


def _old_driver(facts: Facts) -> Notice | None:
    core = facts.core
    if not facts.seen.devices or not core.has_cuda or core.cuda_device_count:
        return None
    message = f"torch sees {len(facts.seen.devices)} GPU(s), the core none, so the torch backend is used: "
    message += f"the core is built with CUDA {version_text(core.cuda_runtime)}, "
    if core.cuda_driver // 1000 < core.cuda_runtime // 1000:
        message += f"the driver knows no more than {version_text(core.cuda_driver)}."
        return Notice("warning", message, "Build with the machine's own CUDA 12 toolkit (MGPU_CUDA=system).")
    message += f"which this driver ({version_text(core.cuda_driver)}) should run."
    return Notice("warning", message, "Please report this, with the output of `mgpu doctor --json`.")


def _amd(facts: Facts) -> Notice | None:
    message = f"torch is built for AMD GPUs (ROCm {facts.torch.hip}): plain torch serves them, which is slower."
    return Notice("hint", message, "mgpu_core's CUDA kernels and NCCL are for NVIDIA GPUs alone.")


def _no_cuda_backend(facts: Facts) -> Notice | None:
    if not facts.seen.devices or not facts.core.backends or facts.core.has_cuda:
        return None
    message = "mgpu_core is built without CUDA: the GPUs are used through the torch backend, which is slower."
    return Notice("warning", message, "Build again with MGPU_CUDA=on, which says what is missing.")


def _nccl(facts: Facts) -> Notice | None:
    if facts.nccl and facts.nccl.version:
        return None
    if facts.nccl and facts.nccl.source == NCCL_VARIABLE:
        message = f"{NCCL_VARIABLE}={facts.nccl.path} cannot be used: {facts.nccl.problem}"
        return Notice("warning", message, f"Give it the path of a libnccl.so.2, or unset {NCCL_VARIABLE}.")
    if len(facts.seen.devices) < 2:
        return None
    problem = f"{facts.nccl.path} cannot be used: {facts.nccl.problem}" if facts.nccl else "There is no NCCL here."
    return Notice("warning", problem, "pip install nvidia-nccl-cu13 (cu12 for a torch with CUDA 12).")


def _bad_defaults(facts: Facts) -> Notice | None:
    problem = facts.defaults.problem
    return Notice("warning", f"{problem}.", f"export {RANKS}=2") if problem else None


def _bad_variables(facts: Facts) -> Notice | None:
    """Return notices of bad variables, which are errors, or ignored, where they are read."""
    wrong = [name for name, is_right in _NUMBERS.items() if not is_right(facts.environ.get(name, "").strip() or "1")]
    if not wrong:
        return None
    named = ", ".join(f"{name}={facts.environ[name]}" for name in wrong)
    return Notice("warning", f"{named}: this is no number that it could be.", f"unset {' '.join(wrong)}")


def _is_seconds(text: str) -> bool:
    try:
        return 0 < float(text) <= 1e9
    except ValueError:
        return False


def _is_count(text: str) -> bool:
    return text.isdecimal() and len(text) <= 4 and int(text) > 0


_NUMBERS: dict[str, Callable[[str], bool]] = {
    TIMEOUT_VARIABLE: _is_seconds,
    NCCL_TIMEOUT_VARIABLE: _is_seconds,
    "MGPU_CORE_NUM_THREADS": _is_count,
}


def _threads(facts: Facts) -> Notice | None:
    threads, cores = facts.torch.num_threads or 0, facts.cpu.cores_available
    if threads <= cores:
        return None
    message = f"torch uses {threads} threads, but this process may use {cores} core(s)."
    return Notice("hint", message, f"export OMP_NUM_THREADS={cores}")


def _no_nvml(facts: Facts) -> Notice | None:
    if facts.nvml.devices is not None or not facts.seen.devices:
        return None
    message = f"nvidia-smi's numbers and the hidden GPUs are unknown: {facts.nvml.reason}."
    return Notice("hint", message, "Until NVML works, count devices as torch does, from cuda:0.")


def _peers(facts: Facts) -> Notice | None:
    failed = [each for each in facts.peers or () if not each.passed]
    if not failed:
        return None
    pairs = ", ".join(f"{each.device} -> {each.peer} ({each.problem})" for each in failed)
    message = f"GPUs that do not reach each other's memory meet in host memory, which is slower: {pairs}."
    return Notice("warning", message, "Is an IOMMU or ACS switched on? See `nvidia-smi topo -p2p r`.")


def _untested_peers(facts: Facts) -> Notice | None:
    if facts.core.cuda_device_count < 2 or facts.peers is not None:
        return None
    message = "It has not been tested whether the GPUs reach each other's memory; their first use will."
    return Notice("hint", message, "mgpu doctor --p2p")


_CHECKS = (
    _changed,
    _bad_defaults,
    _bad_variables,
    _threads,
)
_NVIDIA_CHECKS = (
    _blind_torch,
    _other_count,
    _old_driver,
    _no_cuda_backend,
    _nccl,
    _no_nvml,
    _peers,
    _untested_peers,
)
