"""Which devices a training runs on.

A rank is an index into a list of devices, and several ranks may share one; so the answer is always a list of
`torch.device`, of which the first holds the model and the batches. Without any wish, the step and the wrapper take all
GPUs, or where there is none as many CPU ranks as `MGPU_CORE_CPU_RANKS` says, or two, so that the code for several ranks
is seen on every machine; the bare module takes one device.
"""

from collections.abc import Sequence

import torch

from mgpu_core.device.devices import default_devices

DeviceId = int | str | torch.device
"""A device as a user names it: an accelerator's index, `"cpu"`, `"cuda:1"`, or a `torch.device`."""

CPU_RANKS = 2


def parse_device_ids(text: str) -> tuple[DeviceId, ...]:
    """`"0,cpu,cuda:1"` to `(0, "cpu", "cuda:1")`. Whether they exist is `resolve_devices`' question."""
    entries = [entry.strip() for entry in text.split(",")]
    return tuple(int(entry) if entry.isdecimal() else entry for entry in entries)


def parse_shares(text: str) -> tuple[float, ...]:
    """Parse `"2,1"` as `(2.0, 1.0)`; raise `ValueError` if a part is not a number."""
    try:
        return tuple(float(entry) for entry in text.split(","))
    except ValueError:
        raise ValueError(f"shares: wanted one number per rank, like 2,1, got {text!r}") from None


def resolve_devices(device_ids: Sequence[DeviceId] | None, ranks: int | None, *, single: bool) -> list[torch.device]:
    """Return the devices to train on, one entry per rank.

    Args:
        device_ids: the devices by name, or None for the machine's.
        ranks: how many ranks: the first GPUs, or as many CPU ranks where there is no GPU. None: this file's default.
        single: the engine trains on one device only.

    Raises:
        ValueError: a device does not exist, there are fewer GPUs than `ranks`, the two wishes disagree, or `single` and
            more than one device.
    """
    if device_ids is None:
        devices = _default_devices(ranks, single=single)
    else:
        devices = [_existing(device) for device in device_ids]
    if ranks is not None and ranks != len(devices):
        raise ValueError(
            f"ranks and device-ids disagree: {ranks} ranks, {len(devices)} devices; one of the two is enough"
        )
    if not devices:
        raise ValueError("device-ids: wanted at least one device, got none")
    if single and len(devices) > 1:
        raise ValueError(f"the plain engine trains on one device, got {len(devices)}: {describe(devices)}")
    return devices


def describe(devices: Sequence[torch.device]) -> str:
    """Return the devices in one line, repeated ones counted: `2 x cpu, cuda:0`."""
    counts: dict[str, int] = {}
    for device in devices:
        counts[str(device)] = counts.get(str(device), 0) + 1
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())


def _accelerators() -> list[torch.device]:
    current = torch.accelerator.current_accelerator(check_available=True)
    if current is None:
        return []
    return [torch.device(current.type, index) for index in range(torch.accelerator.device_count())]


def _default_devices(ranks: int | None, *, single: bool) -> list[torch.device]:
    accelerators = _accelerators()
    wanted = ranks or (1 if single else len(accelerators or default_devices()) or CPU_RANKS)
    if not accelerators:
        return [torch.device("cpu")] * wanted
    if wanted > len(accelerators):
        raise ValueError(
            f"ranks: wanted at most {len(accelerators)}, one for each of {describe(accelerators)}, got {wanted}"
        )
    return accelerators[:wanted]


def _existing(wish: DeviceId) -> torch.device:
    here = [torch.device("cpu"), *_accelerators()]
    if isinstance(wish, int):
        found = [device for device in here if device.index == wish]
    else:
        found = [device for device in here if _same(wish, device)]
    if not found:
        raise ValueError(f"device-ids: there is no device {str(wish)!r} here, only {describe(here)}")
    return found[0]


def _same(wish: str | torch.device, device: torch.device) -> bool:
    try:
        wished = torch.device(wish)
    except RuntimeError:
        return False
    # "cuda" without an index means the first one; the CPU carries none.
    return wished.type == device.type and (wished.index or 0) == (device.index or 0)
