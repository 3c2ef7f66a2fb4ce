"""Which GPUs this process may see, and under which number.

The CUDA driver reads CUDA_VISIBLE_DEVICES once, when a process first calls it, and numbers the remaining GPUs from
zero. This file repeats that reading as a pure function: the variable's value and the GPUs of the machine go in, the
visible ones come out in CUDA's order, with the entry at which the driver stopped and why. No driver is needed, so a
machine without a GPU can test every case. The rules are those of NVIDIA's CUDA Programming Guide (environment
variables) and MIG User Guide, and, where these are silent (repeated entries, trailing letters, spaces), of torch, whose
parser was checked against a real driver.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["all", "ordinals", "GPU-", "MIG-"]
_NUMBER = re.compile(r"[+-]?[0-9]+")


@dataclass(frozen=True, slots=True)
class MigInstance:
    """A slice of a GPU in MIG mode; memory is in bytes, None where the driver does not say."""

    uuid: str
    gpu_instance: int
    compute_instance: int
    name: str
    memory_total: int | None = None
    memory_free: int | None = None


@dataclass(frozen=True, slots=True)
class PhysicalDevice:
    """A GPU of the machine under nvidia-smi's number; `mig` is None when MIG mode is off."""

    index: int
    uuid: str
    pci_bus_id: str
    name: str
    memory_total: int | None = None
    memory_free: int | None = None
    mig: tuple[MigInstance, ...] | None = None


@dataclass(frozen=True, slots=True)
class VisibleDevice:
    """The device of one CUDA index: a whole GPU, or one MIG instance of it."""

    physical: PhysicalDevice
    instance: MigInstance | None = None

    @property
    def part(self) -> PhysicalDevice | MigInstance:
        """The piece of hardware itself, which knows its uuid, name and memory."""
        return self.instance or self.physical


@dataclass(frozen=True, slots=True)
class Stop:
    """The first invalid entry: the driver ignores it and all that follow."""

    entry: str
    reason: str


@dataclass(frozen=True, slots=True)
class Visibility:
    """How the driver reads one value of CUDA_VISIBLE_DEVICES.

    `requested` holds the well-formed entries before the first invalid one, as written. `devices[i]` is CUDA's
    device i, None when that depends on GPUs which are not known. One `repeated` entry hides every GPU.
    """

    value: str | None
    kind: Kind
    requested: tuple[str, ...] = ()
    devices: tuple[VisibleDevice, ...] | None = None
    stop: Stop | None = None
    repeated: str | None = None
    only_one_instance: bool = False

    @property
    def misread(self) -> list[tuple[str, int]]:
        """Entries of which the driver takes only the leading number: "0-3" is 0."""
        if self.kind != "ordinals":
            return []
        return [(entry, _ordinal(entry)) for entry in self.requested if not _NUMBER.fullmatch(entry)]


def parse_visible_devices(value: str | None, physical: Sequence[PhysicalDevice] | None = None) -> Visibility:
    """Read `value` as the driver does; `physical` is ordered as nvidia-smi shows it, None when it is not known."""
    if value is None:
        chosen = None if physical is None else [VisibleDevice(gpu) for gpu in physical]
        return _choose(Visibility(None, "all"), chosen)
    written = _read(value)
    if written.repeated is not None or not written.requested:
        return _choose(written, [])
    return written if physical is None else _resolve(written, physical)


def candidates(physical: Iterable[PhysicalDevice]) -> list[VisibleDevice]:
    """Return all that CUDA could show: whole GPUs, and in MIG mode their instances instead."""
    devices: list[VisibleDevice] = []
    for gpu in physical:
        devices += [VisibleDevice(gpu)] if gpu.mig is None else [VisibleDevice(gpu, instance) for instance in gpu.mig]
    return devices


def _read(value: str) -> Visibility:
    """Read the text alone: up to the first malformed entry, without asking which GPUs exist."""
    kind = _kind(value)
    requested: dict[int | str, str] = {}
    for entry in value.split(","):
        reason = _malformed(entry, kind)
        if reason:
            return Visibility(value, kind, tuple(requested.values()), stop=Stop(entry, reason))
        key = _ordinal(entry) if kind == "ordinals" else entry
        if key in requested:
            return Visibility(value, kind, repeated=entry.strip())
        requested[key] = entry.strip()
    return Visibility(value, kind, tuple(requested.values()))


def _kind(value: str) -> Kind:
    # The first entry decides; the driver mixes no kinds in one list.
    if value.startswith("GPU-"):
        return "GPU-"
    return "MIG-" if value.startswith("MIG-") else "ordinals"


def _malformed(entry: str, kind: Kind) -> str:
    if kind == "ordinals":
        if not _NUMBER.match(entry.strip()):
            return "not a number"
        return "a negative number ends the list" if _ordinal(entry) < 0 else ""
    if entry.startswith(kind):
        return ""
    return "a UUID may not follow a space" if entry.lstrip().startswith(kind) else f"not a {kind} UUID like the first"


def _resolve(written: Visibility, physical: Sequence[PhysicalDevice]) -> Visibility:
    """Look the entries up among the machine's GPUs, up to the first that is not exactly one of them."""
    chosen: list[VisibleDevice] = []
    for entry in written.requested:
        matches = _matches(entry, written.kind, physical)
        if len(matches) != 1:
            stop = Stop(entry, _unresolved(entry, written.kind, matches, physical))
            return _choose(replace(written, requested=written.requested[: len(chosen)], stop=stop), chosen)
        if matches[0] in chosen:
            return _choose(replace(written, requested=(), stop=None, repeated=entry), [])
        chosen += matches
    return _choose(written, chosen)


def _matches(entry: str, kind: Kind, physical: Sequence[PhysicalDevice]) -> list[VisibleDevice]:
    if kind == "ordinals":
        return [VisibleDevice(gpu) for gpu in physical if gpu.index == _ordinal(entry)]
    if kind == "GPU-":
        return [VisibleDevice(gpu) for gpu in physical if gpu.uuid.startswith(entry)]
    return [c for c in candidates(physical) if c.instance and _is_instance(entry, c.physical, c.instance)]


def _is_instance(entry: str, gpu: PhysicalDevice, instance: MigInstance) -> bool:
    # Drivers before R470 gave instances no UUID of their own: MIG-GPU-<uuid>/<GPU instance>/<compute instance>.
    head, _, instance_path = entry.partition("/")
    if instance_path:
        return (
            f"MIG-{gpu.uuid}".startswith(head)
            and instance_path == f"{instance.gpu_instance}/{instance.compute_instance}"
        )
    return instance.uuid.startswith(entry)


def _unresolved(entry: str, kind: Kind, matches: Sequence[VisibleDevice], physical: Sequence[PhysicalDevice]) -> str:
    if matches:
        return "the beginning of several UUIDs, of GPU " + " and GPU ".join(str(m.physical.index) for m in matches)
    if kind == "ordinals":
        return f"no such GPU: this machine has {', '.join(str(gpu.index) for gpu in physical) or 'none'}"
    return "no device of this machine has a UUID that begins so"


def _choose(read: Visibility, chosen: Sequence[VisibleDevice] | None) -> Visibility:
    """Fill in the devices under MIG's own rule: a process sees one instance, and then no whole GPU."""
    if chosen is None:
        return read
    parts = [part for c in chosen for part in ([c] if c.instance else candidates([c.physical])[:1])]
    instances = [part for part in parts if part.instance]
    alone = bool(instances) and len(chosen) > 1
    return replace(read, devices=tuple(instances[:1] or parts), only_one_instance=alone)


def _ordinal(entry: str) -> int:
    # Like C's strtoul: the leading number counts, whatever follows it in the entry does not.
    number = _NUMBER.match(entry.strip())
    return int(number.group()) if number else -1
