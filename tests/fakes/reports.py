"""How the tests of doctor read a report: its one notice about a thing, and both views of it side by side."""

from __future__ import annotations

import json

from fakes.nvml import GIB

from mgpu_core.tools.doctor import Report, render
from mgpu_core.tools.doctor.visibility_notices import Notice

VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "MGPU_CORE_NCCL", "MGPU_CORE_CPU_RANKS")


def flat(text: str) -> str:
    """Wrapped and aligned text as one line."""
    return " ".join(text.split())


def about(report: Report, part: str) -> Notice:
    """The one notice that says `part`."""
    (notice,) = [notice for notice in report.notices if part in notice.message]
    return notice


def assert_same_facts(report: Report) -> None:
    """Whatever the JSON says, the text says too."""
    facts = json.loads(report.to_json())
    text = flat(render(report))
    said = [facts["mgpu_core"], facts["python"]["version"], facts["torch"]["version"], facts["outlook"]]
    said += [facts["driver"] or "none found", *(value for notice in facts["notices"] for value in notice.values())]
    said += [
        f"{each['name']} {'built' if each['built'] else 'missing'}: {each['detail']}"
        for each in facts["core"]["backends"]
        for backend in facts["core"]["backends"]
    ]
    said += [f"{name}={value}" for name, value in facts["environment"].items()]
    said += [facts["nccl"]["path"], facts["nccl"]["version"] or facts["nccl"]["problem"]] if facts["nccl"] else []
    for row in facts["devices"]:
        index = "hidden" if row["torch_index"] is None else f"cuda:{row['torch_index']}"
        entry = (row["entry"] or "-")[:12]
        free, total = ("?" if n is None else f"{n / GIB:.1f}" for n in (row["memory_free"], row["memory_total"]))
        numbers = f"{free} of {total} GiB"
        smi = "?" if row["nvidia_smi_index"] is None else f"GPU {row['nvidia_smi_index']}"
        names = f"{smi} {row['pci_bus_id']} {row['uuid'][:12]}"
        said.append(f"{index} {entry} {names} {numbers} {row['name']}")
    assert [fact for fact in said if flat(fact) not in text] == []
