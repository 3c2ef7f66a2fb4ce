"""``DeviceLoader``: the batches of any loader, on their ranks' devices one batch ahead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from mgpu_core.devices.devices import CPU, DeviceLike, default_devices
from mgpu_core.devices.streams import GPU_TYPE
from mgpu_core.devices.transfer import copying_to, hand_over, lend, to_device
from mgpu_core.parallel.scatter_inputs import check_shares, split_ahead
from mgpu_core.ranks.team import Team
from mgpu_core.trees.nested import RankParts, Rows, map_leaves, tensors_in

__all__ = ["DeviceLoader"]


class DeviceLoader:
    """Iterate over a loader; the rows of each batch are copied to their ranks while the batch before is computed with::

        for x, y in mgpu_core.DeviceLoader(loader, [0, 1]):
            loss = step(x, y)  # or loss_fn(model(x), y)

    Copies to GPUs go through pinned memory on side streams; two batches are on the devices at a time.  Where ranks are
    on several devices, each tensor and each :class:`mgpu_core.Rows` with rows is a ``RankParts``, which wrappers and
    steps take as it is, and which torch's functions see joined on the first device; pass the same ``dim`` and
    ``shares`` to the step.  Where all ranks are on one device, tensors are moved there, and stay whole.  Batches come
    from the loader in the calling thread, in its order; random transforms in that thread draw a batch earlier than
    without.  A step with ``capture=True`` is not captured on batches that are split.

    Args:
        loader: gives batches: any nest of tensors.  It is iterated anew by each ``iter()``.
        device_ids: one device per rank; ``None``: all accelerators, else the CPU.
        dim: the dimension of the rows.
        shares: rows in this proportion, one positive number per rank.

    Raises:
        TypeError, ValueError: devices that do not exist, shares that do not fit; while iterating, a batch whose tensors
            disagree on their rows.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device_ids: Sequence[DeviceLike] | None = None,
        *,
        dim: int = 0,
        shares: Sequence[float] | None = None,
    ) -> None:
        if not hasattr(loader, "__iter__"):
            raise TypeError(f"loader must give batches when it is iterated, not be a {type(loader).__name__}")
        devices = default_devices() or [CPU] if device_ids is None else device_ids
        self._team = Team.of(devices)
        check_shares(shares, len(self._team))
        self.loader, self.dim, self.shares = loader, dim, shares
        self._devices = tuple(dict.fromkeys(self._team.devices))

    @property
    def device_ids(self) -> tuple[torch.device, ...]:
        """One device per rank."""
        return self._team.devices

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # a loader without a length has torch's own error

    def __getattr__(self, name: str) -> Any:
        if "loader" not in self.__dict__:  # while it is copied
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        ahead: list[Any] = []
        for batch in self.loader:
            ahead.append(self._sent(batch))
            if len(ahead) > 1:
                yield self._received(ahead.pop(0))
        for batch in ahead:
            yield self._received(batch)

    def _sent(self, batch: Any) -> Any:
        """Start the copies of a batch."""
        if any(device.type == GPU_TYPE for device in self._devices):
            lend(tensors_in(map_leaves(batch, lambda leaf: list(leaf) if isinstance(leaf, Rows) else leaf)))
            batch = map_leaves(batch, _pinned)
        with copying_to(self._devices):
            if len(self._devices) > 1:
                return split_ahead(batch, self._team, self.dim, self.shares)
            return map_leaves(batch, lambda leaf: _moved(leaf, self._devices[0]))

    def _received(self, batch: Any) -> Any:
        """Let the current streams compute with a batch, whose copies may be under way."""
        hand_over(tensors_in(map_leaves(batch, lambda leaf: leaf.parts if isinstance(leaf, RankParts) else leaf)))
        return batch


def _pinned(leaf: Any) -> Any:
    is_host = isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu"
    return leaf.pin_memory() if is_host else leaf


def _moved(leaf: Any, device: torch.device) -> Any:
    return to_device(leaf, device) if isinstance(leaf, torch.Tensor) else leaf
