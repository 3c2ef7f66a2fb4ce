"""The update by an optimizer of ours, over the memory that the step has laid out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mgpu_core.optim import FlatOptimizer
from mgpu_core.train.laid_out import LaidOut
from mgpu_core.train.replicas import Replicas

__all__ = ["FlatUpdate"]


class FlatUpdate:
    """Attach the optimizer to the step's memory; one call of its step updates all devices.

    Args:
        optimizer: over some or all of the module's parameters.
        replicas: the ranks' modules.
        layout: of the step.
        in_shards: each device updates its part of each bucket.

    Attributes:
        device_count: how many devices it updates.
        flat: the optimizer's state over that memory.

    Raises:
        TypeError: sparse gradients, or parameters that the kernels cannot update.
    """

    def __init__(self, optimizer: FlatOptimizer, replicas: Replicas, layout: LaidOut, in_shards: bool) -> None:
        if layout.loose:
            raise TypeError(
                f"the gradient of {replicas.names[layout.loose[0]]} is sparse, and the kernels update whole buffers: "
                "use torch.optim.SparseAdam or torch.optim.SGD"
            )
        flats = layout.flats[:1] if replicas.is_mixed else layout.flats
        self._optimizer, self.device_count = optimizer, len(flats)
        self.flat = optimizer.attach(replicas.own, layout.buckets, flats, len(flats) if in_shards else 1)
        self._used: list[bool] = []

    def is_attached(self) -> bool:
        """Return whether the optimizer still steps over this memory; another step, or a new group, ends that."""
        return self._optimizer.is_over(self.flat)

    def prepare(self, used: Sequence[bool]) -> None:
        """Bring tables and settings up to date for an update of these parameters."""
        self._used = list(used)
        self.flat.prepare(self._used)

    def launch(self, factor: float | torch.Tensor) -> None:
        """Call the optimizer's step, which multiplies the gradients by ``factor``."""
        self._optimizer.step_by(self._used, factor)

    def launch_on(self, index: int, factor: float | torch.Tensor | None) -> None:
        """Launch the kernels of one device, for a recording."""
        self.flat.run_on(index, factor)

    def hold_back(self, index: int, if_not_zero: torch.Tensor) -> None:
        """Let the next launch on a device change nothing where this number on it is not 0; nobody waits for it."""
        self.flat.devices[index].held_back.copy_(if_not_zero)

    def was_held_back(self) -> bool:
        """Return whether the last launch has changed nothing; waits for the device, and lets later ones go on."""
        held = bool(self.flat.devices[0].held_back)
        if held:
            for device in self.flat.devices:
                device.held_back.zero_()
        return held

    def begin_replay(self) -> None:
        """Let kernels multiply gradients by 1, where the recording does not write a factor itself."""
        self.flat.scale_by(1.0)

    def replayed(self) -> None:
        """Take note of a replay: the device alone knows the factor, and schedulers learn that there was a step."""
        for device in self.flat.devices:
            device.replayed()
        self._optimizer._opt_called = True  # type: ignore[attr-defined]

    def close(self) -> None:
        """Leave the optimizer with state of its own."""
        if self.is_attached():
            self._optimizer.detach()
