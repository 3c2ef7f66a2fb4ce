"""The findings of doctor: as text for the terminal, for notebooks, and as JSON.

The text has titles and aligned columns, and nothing wider than a terminal except paths.
"""

from __future__ import annotations

import json
import platform
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mgpu_core.devices.nccl_library import NcclLibrary
from mgpu_core.devices.peers import PeerVerdict
from mgpu_core.support.html import html_text
from mgpu_core.support.tables import Lines, Table, text_of
from mgpu_core.tools.doctor.device_map import DeviceRow
from mgpu_core.tools.doctor.facts import Core, Cpu, Defaults, Python, Torch
from mgpu_core.tools.doctor.visibility_notices import Notice

WIDTH = 96
_LABEL = 15
_SOURCES = {
    "MGPU_CORE_NCCL": "named by MGPU_CORE_NCCL",
    "loaded": "already loaded in this process (by torch)",
    "wheel": "of pip's NVIDIA wheels",
    "system": "of the system",
}


@dataclass(frozen=True, slots=True)
class Report:
    """Everything doctor knows about this process's machine.

    `all_reduce` is the algorithm of `auto` over all GPUs, by bytes of a rank, where it has been measured.
    """

    mgpu_core: str
    python: Python
    torch: Torch
    core: Core
    driver: str | None
    nccl: NcclLibrary | None
    devices: tuple[DeviceRow, ...]
    no_device_reason: str | None
    nvml_problem: str | None
    peers: tuple[PeerVerdict, ...] | None
    all_reduce: dict[int, str] | None
    cpu: Cpu
    environment: dict[str, str]
    defaults: Defaults
    outlook: str
    notices: tuple[Notice, ...]

    def to_json(self) -> str:
        """Return the report as JSON, indented for people."""
        return json.dumps(asdict(self), indent=2)

    def _repr_html_(self) -> str:
        return html_text(render(self))


def render(report: Report) -> str:
    """Return the whole report, ending with a newline."""
    return text_of(lines_of(report)) + "\n"


def lines_of(report: Report) -> Lines:
    """Return the lines and tables of the report."""
    sections: list[tuple[str, Lines]] = [
        ("Versions", _versions(report)),
        ("Backends of the core", _backends(report)),
        ("Devices", _devices(report)),
        *([("GPU to GPU, GB/s as a kernel writes", _peers(report.peers))] if report.peers is not None else []),
        *([("all_reduce, auto", _all_reduce(report.all_reduce))] if report.all_reduce else []),
        ("CPU", _cpu(report.cpu, report.torch.num_threads)),
        ("Environment", _environment(report)),
        ("What will happen", _wrapped(report.outlook, "  ")),
        (_summary(report), _notices(report)),
    ]
    return [each for title, lines in sections for each in ("", title, *lines)][1:]


def for_issue(report: Report) -> str:
    """Return the report as a block of Markdown, below the system's name, and without names of home folders."""
    return f"```text\n{platform.platform()}\n\n{render(report)}```\n".replace(str(Path.home()), "~")


def version_text(code: int) -> str:
    """Return CUDA's version number as text: 13000 is 13.0."""
    return f"{code // 1000}.{code % 1000 // 10}"


def _versions(report: Report) -> list[str]:
    core = report.core
    built = f"built with CUDA {version_text(core.cuda_runtime)}" if core.cuda_runtime else "built without CUDA"
    return [
        *_field("mgpu_core", f"{report.mgpu_core}, {built}"),
        *_field("Python", f"{report.python.version}, {_threading(report)}"),
        *_field("torch", _torch(report.torch)),
        *_field("accelerator", _accelerator(report.torch)),
        *_field("NVIDIA driver", _driver(report)),
        *_nccl(report.nccl),
    ]


def _threading(report: Report) -> str:
    if not report.python.free_threaded:
        return "with the GIL"
    return (
        "free-threaded, but with the GIL switched on" if report.python.gil_enabled else "free-threaded, without the GIL"
    )


def _torch(torch: Torch) -> str:
    if torch.version is None:
        return "does not import"
    return f"{torch.version}, built {f'with CUDA {torch.cuda}' if torch.cuda else 'without CUDA'}"


def _accelerator(torch: Torch) -> str:
    return f"{torch.accelerator}, {_counted(torch.accelerator_count, 'device')}" if torch.accelerator else "none"


def _driver(report: Report) -> str:
    limit = f"up to CUDA {version_text(report.core.cuda_driver)}" if report.core.cuda_driver else ""
    return ", ".join(part for part in (report.driver, limit) if part) or "none found"


def _nccl(nccl: NcclLibrary | None) -> list[str]:
    if nccl is None:
        return _field("NCCL", "none found")
    return [*_field("NCCL", f"{nccl.version or 'not usable'}, {_SOURCES[nccl.source]}"), *_field("", nccl.path)] + (
        _field("", nccl.problem) if nccl.problem else []
    )


def _backends(report: Report) -> list[str]:
    told = {
        backend.name: f"{'built' if backend.built else 'missing'}: {backend.detail}" for backend in report.core.backends
    }
    lines = [line for name, text in told.items() for line in _field(name, text)]
    return lines or ["  not known: the compiled core could not be asked"]


def _devices(report: Report) -> Lines:
    lines: list[str | Table] = [_table(report.devices)] if report.devices else []
    if all(row.torch_index is None for row in report.devices):
        lines = [*_field("no GPU", f"for torch: {report.no_device_reason}"), *lines]
    return [*lines, *(_field("NVML", f"not read: {report.nvml_problem}") if report.nvml_problem else [])]


def _table(devices: Sequence[DeviceRow]) -> Table:
    uuids = [row.uuid for row in devices]
    header = ("torch", "listed as", "nvidia-smi", "PCI address", "UUID", "memory free", "name")
    return Table([header, *(_cells(row, uuids) for row in devices)], range(len(header)), "  ")


def _cells(row: DeviceRow, uuids: Sequence[str]) -> tuple[str, ...]:
    torch = "hidden" if row.torch_index is None else f"cuda:{row.torch_index}"
    number = "?" if row.nvidia_smi_index is None else f"GPU {row.nvidia_smi_index}"
    memory = f"{_gib(row.memory_free)} of {_gib(row.memory_total)} GiB"
    return torch, _short(row.entry or "-", uuids), number, row.pci_bus_id, _short(row.uuid, uuids), memory, row.name


def _peers(peers: Sequence[PeerVerdict]) -> Lines:
    """Return a row per writer, a column per owner of the memory."""
    if not peers:
        return ["  there is one GPU, or none: nothing to test"]
    devices = sorted({each.device for each in peers})
    by_pair = {(each.device, each.peer): each for each in peers}
    header = ["from", *(f"to {peer}" for peer in devices)]
    rows = [[str(device), *(_speed(by_pair.get((device, peer))) for peer in devices)] for device in devices]
    return [Table([header, *rows], (), "  ")]


def _all_reduce(table: dict[int, str]) -> list[str]:
    return [line for size, name in sorted(table.items()) for line in _field(f"to {size // 1024} KiB", name)]


def _speed(verdict: PeerVerdict | None) -> str:
    if verdict is None:
        return "-"
    return f"{verdict.gigabytes_per_second:.1f}" if verdict.passed else "fails"


def _short(uuid: str, uuids: Sequence[str]) -> str:
    # GPU- and eight digits: CUDA_VISIBLE_DEVICES takes that much, as long as it is the beginning of one UUID only.
    return uuid[:12] if sum(other.startswith(uuid[:12]) for other in uuids) <= 1 else uuid


def _cpu(cpu: Cpu, threads: int | None) -> list[str]:
    cores = f"{cpu.cores_available} of {cpu.cores} for this process"
    memory = f"{_gib(cpu.memory_available)} of {_gib(cpu.memory_total)} GiB available"
    return [*_field("cores", cores), *_field("torch threads", str(threads or "?")), *_field("memory", memory)]


def _environment(report: Report) -> list[str]:
    lines = [f"  {name}={value}" for name, value in report.environment.items()]
    return lines or ["  none of MGPU_CORE_*, CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER is set"]


def _summary(report: Report) -> str:
    warnings = sum(notice.level == "warning" for notice in report.notices)
    return f"{_counted(warnings, 'warning')}, {_counted(len(report.notices) - warnings, 'hint')}"


def _notices(report: Report) -> list[str]:
    lines: list[str] = []
    for notice in report.notices:
        lines += _wrapped(notice.message, f"  {notice.level}: ") + _wrapped(notice.advice, "    -> ")
    return lines


def _field(label: str, value: str) -> list[str]:
    return _wrapped(value, f"  {label:<{_LABEL}}")


def _wrapped(text: str, start: str) -> list[str]:
    # Paths and UUIDs stay whole, so that they can be copied.
    rest = " " * min(len(start), _LABEL + 2)
    return textwrap.wrap(
        text, WIDTH, initial_indent=start, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def _counted(count: int, word: str) -> str:
    return f"{count or 'no'} {word}{'' if count == 1 else 's'}"


def _gib(nbytes: int | None) -> str:
    return "?" if nbytes is None else f"{nbytes / 2**30:.1f}"
