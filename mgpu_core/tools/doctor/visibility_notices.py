"""The classic traps of CUDA_VISIBLE_DEVICES, found before they cost an afternoon.

Every check is a pure function from discovery.py's result to notices in plain words. A warning says that the machine
will not follow the variable; a hint says that it will, under numbers that may surprise.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mgpu_core.devices.discovery import PhysicalDevice, Visibility

VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
_HIDE_ALL, _CONTAINERS_WORDS = ("-1", "NoDevFiles"), ("all", "none", "void")


@dataclass(frozen=True, slots=True)
class Notice:
    """A warning or hint for the user, with advice."""

    level: Literal["hint", "warning"]
    message: str
    advice: str


def visibility_notices(
    read: Visibility, physical: Sequence[PhysicalDevice] | None, device_order: str | None
) -> list[Notice]:
    """Return all that `read` and CUDA_DEVICE_ORDER hide from somebody who only looks at nvidia-smi."""
    candidates = [_nothing_visible(read), _stopped(read), *_misread(read), _renumbered(read), _one_instance(read)]
    return [notice for notice in [*candidates, _order(read, physical or (), device_order)] if notice]


def change_notice(
    initial: Mapping[str, str] | None, current: Mapping[str, str], initialised: bool, kept_initial: bool | None
) -> Notice | None:
    """Return a notice if the variable was changed inside this process, too late or in time.

    `initial` is the environment the process was started with, None where the system does not keep it. `kept_initial`
    says whether CUDA shows the devices of that first value and not those of the current one, None if unknown.
    """
    if initial is None or initial.get(VARIABLE) == current.get(VARIABLE):
        return None
    change = f"{VARIABLE} was {_shown(initial.get(VARIABLE))} when this process started and is now "
    change += _shown(current.get(VARIABLE))
    if initialised and kept_initial:
        return Notice("warning", f"{change}, but CUDA was initialised before: the old value holds.", _SET_EARLY)
    if initialised and kept_initial is False:
        return None
    return Notice("hint", f"{change}: that counts only if nothing called CUDA before.", _SET_EARLY)


_SET_EARLY = f"Set {VARIABLE} in the shell, or before the first import that touches CUDA."


def _nothing_visible(read: Visibility) -> Notice | None:
    if read.value is None or read.devices is None or read.devices:
        return None
    if not read.value.strip():
        return Notice("warning", f"{VARIABLE} is set but empty: CUDA shows no GPU.", f"unset {VARIABLE}")
    if read.repeated is not None:
        message = f"{VARIABLE}={read.value} names {read.repeated!r} twice: the driver then shows no GPU at all."
        return Notice("warning", message, "Name each GPU once; ranks may share one by device_ids=[0, 0].")
    if read.value.strip() in _HIDE_ALL:
        return Notice("hint", f"{VARIABLE}={read.value} hides every GPU.", f"unset {VARIABLE} to use them")
    if read.value.strip() in _CONTAINERS_WORDS:
        message = f"{VARIABLE}={read.value} shows no GPU: these words belong to the containers' NVIDIA_VISIBLE_DEVICES."
        return Notice("warning", message, f"unset {VARIABLE} for all GPUs")
    return None


def _stopped(read: Visibility) -> Notice | None:
    if read.stop is None or read.value is None or read.value.strip() in ("", *_HIDE_ALL, *_CONTAINERS_WORDS):
        return None
    kept = ",".join(read.requested)
    left = f"only {kept} is visible" if kept else "no GPU is visible"
    message = f"{VARIABLE}={read.value}: the driver stops at {read.stop.entry!r} ({read.stop.reason}), so {left}."
    return Notice("warning", message, _spelling(read.stop.entry.strip()))


def _spelling(entry: str) -> str:
    if re.fullmatch(r"cuda:?\d+|gpu:?\d+", entry, re.IGNORECASE):
        return "Write the number alone, as in 0,1."
    if entry.startswith(("GPU-", "MIG-")):
        return "Copy the UUID from `nvidia-smi -L`; one list holds one kind, with no spaces."
    return "List the GPUs as in 0,1, with commas alone between them."


def _misread(read: Visibility) -> list[Notice]:
    advice = "The list knows no ranges and no other separator than the comma: write 0,1,2."
    return [
        Notice("warning", f"{VARIABLE}={read.value}: the driver reads {entry!r} as {ordinal}.", advice)
        for entry, ordinal in read.misread
    ]


def _renumbered(read: Visibility) -> Notice | None:
    if read.kind != "ordinals" or not read.devices:
        return None
    indices = [device.physical.index for device in read.devices]
    if indices == list(range(len(indices))):
        return None
    shown = ", ".join(f"GPU {index} is cuda:{rank}" for rank, index in enumerate(indices))
    lost = [index for index in indices if index >= len(indices)]
    missing = f" There is no cuda:{lost[-1]}." if lost else ""
    return Notice("hint", f"{VARIABLE}={read.value} renumbers: {shown}.{missing}", "Count devices from cuda:0.")


def _one_instance(read: Visibility) -> Notice | None:
    if not read.only_one_instance or not read.devices:
        return None
    message = f"A process sees one MIG instance and no other GPU: here {read.devices[0].part.uuid} alone."
    return Notice("warning", message, "For several GPUs in one process, turn MIG mode off: nvidia-smi -mig 0")


def _order(read: Visibility, physical: Sequence[PhysicalDevice], device_order: str | None) -> Notice | None:
    # UUIDs mean the same GPU under every order; a single GPU has no order.
    if read.kind not in ("all", "ordinals") or len(physical) < 2 or device_order == "PCI_BUS_ID":
        return None
    advice = f"export {ORDER}=PCI_BUS_ID"
    if device_order not in (None, "FASTEST_FIRST"):
        return Notice("warning", f"{ORDER}={device_order} is not a value that CUDA knows: it counts as unset.", advice)
    start = f"CUDA numbers GPUs fastest first ({ORDER} is not PCI_BUS_ID)"
    if len({gpu.name for gpu in physical}) > 1:
        return Notice("warning", f"{start} and these differ: cuda:0 may not be nvidia-smi's GPU 0.", advice)
    return Notice("hint", f"{start}; nvidia-smi numbers them by PCI address.", advice)


def _shown(value: str | None) -> str:
    return "unset" if value is None else repr(value)
