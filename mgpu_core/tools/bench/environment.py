"""The header of every table: which machine and which versions the times belong to.

Names and versions only, no paths and no host name, so that a result can be published as it is.
"""

import os
import subprocess
from pathlib import Path

from mgpu_core import _core
from mgpu_core.tools.doctor import Report, examine
from mgpu_core.tools.explain.environ import cpu_model

GIT_SECONDS = 20.0


def environment() -> dict[str, str]:
    """Return the facts to print above a table, in this order."""
    report = examine()
    return {
        "CPU": f"{cpu_model()}, {report.cpu.cores_available} of {report.cpu.cores} cores",
        "threads": f"torch {report.torch.num_threads}, mgpu_core {_core.num_threads()}",
        "GPU": _gpus(report),
        "driver": report.driver or "none",
        "torch": report.torch.version or "none",
        "CUDA": report.torch.cuda or "none",
        "NCCL": _nccl(report),
        "Python": report.python.version,
        "mgpu_core": report.mgpu_core,
        **_commit(),
    }


def header(facts: dict[str, str]) -> str:
    """Return the facts as lines of a Markdown list, which also reads well on a terminal."""
    return "\n".join(f"* {name}: {value}" for name, value in facts.items())


def _gpus(report: Report) -> str:
    names = [device.name for device in report.devices if device.torch_index is not None]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"


def _nccl(report: Report) -> str:
    if report.nccl is None or report.nccl.version is None:
        return "none"
    return f"{report.nccl.version} ({report.nccl.source})"


def _commit() -> dict[str, str]:
    """Return the commit of this checkout; `-dirty` if tracked files differ from it; nothing where there is none.

    MGPU_BENCH_COMMIT names it where the package is installed, as on a machine that gets a wheel.
    """
    if named := os.environ.get("MGPU_BENCH_COMMIT"):
        return {"commit": named}
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():  # installed: a repository around it is somebody else's
        return {}
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        asked = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return {"commit": "unknown"}
    return {"commit": asked.stdout.strip()}
