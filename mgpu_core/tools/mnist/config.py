"""The settings of one training, checked as soon as they are put together, and the devices that they mean.

One frozen dataclass is shared by the command line, the tests and the benchmarks. Values are validated here; the
machine (devices, files, data) is asked when the training is prepared, before its first step.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from mgpu_core.devices.devices import CPU, DeviceLike, as_devices, default_devices

ENGINES = ("step", "drop-in", "plain")
"""`step`: `TrainStep`; `drop-in`: the network inside `DataParallel`; `plain`: the bare network, on one device."""
AMP_DTYPES = ("bfloat16", "float16")
CPU_RANKS = 2
LIMIT, SEED_LIMIT = 2**31 - 1, 2**63 - 1


@dataclass(frozen=True)
class Config:
    """The training: model, data, devices, and files to write.

    Attributes:
        model: a name of `MODELS`.
        engine: a name of `ENGINES`.
        device_ids: one entry per rank; None for the machine's own choice (see `devices`).
        ranks: how many CPU ranks, where `device_ids` does not say.
        batch: rows per step, over all ranks.
        accumulate: steps per update. An epoch's last update may have fewer.
        amp: a name of `AMP_DTYPES`, the dtype of the step engine's forward; None for full precision.
        lr: the step length of SGD.
        epochs: passes over the training images, those before a resume included.
        seed: of the weights and of the order of the images.
        source: `builtin`, `download` or a folder (see `digits.load`).
        save: a checkpoint, written after each epoch.
        resume: a checkpoint to go on from.
        plot: a PNG of the curves, written at the end.
        explain: an animated page of some steps after the first ones, written at the end.

    Raises:
        ValueError: a value that no training can have.
    """

    model: str = "simplenet"
    engine: str = "step"
    device_ids: tuple[DeviceLike, ...] | None = None
    ranks: int | None = None
    batch: int = 64
    accumulate: int = 1
    amp: str | None = None
    lr: float = 0.01
    epochs: int = 5
    seed: int = 0
    source: str = "builtin"
    save: Path | None = None
    resume: Path | None = None
    plot: Path | None = None
    explain: Path | None = None

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ValueError(f"engine: wanted one of {', '.join(ENGINES)}, got {self.engine!r}")
        if self.amp not in (None, *AMP_DTYPES):
            raise ValueError(f"amp: wanted one of {', '.join(AMP_DTYPES)}, got {self.amp!r}")
        if self.amp is not None and self.engine != "step":
            raise ValueError(f"amp: the {self.engine} engine trains in full precision; the step engine has a choice")
        for name in ("batch", "accumulate", "epochs", "ranks"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= LIMIT:
                raise ValueError(f"{name}: wanted a number from 1 to {LIMIT}, got {value}")
        if self.ranks is not None and self.ranks > self.batch:
            raise ValueError(
                f"ranks: {self.ranks} are more than the {self.batch} rows of a batch: some would have none"
            )
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"lr: wanted a finite number above 0, got {self.lr}")
        if not 0 <= self.seed <= SEED_LIMIT:
            raise ValueError(f"seed: wanted a number from 0 to {SEED_LIMIT}, got {self.seed}")
        if self.explain is not None and self.engine == "plain":
            raise ValueError("explain: the plain engine has one device, and nothing moves that could be shown")

    def devices(self) -> list[torch.device]:
        """Return one device per rank, of which the first holds the network and the digits.

        Without `device_ids` these are `ranks` CPU ranks, or all accelerators, or one for the plain engine. Without
        accelerators all are as many CPU ranks as `MGPU_CORE_CPU_RANKS` says, or two.

        Raises:
            TypeError, ValueError: a device that does not exist; not as many as `ranks`; several for the plain engine.
        """
        if self.device_ids is not None:
            devices = list(as_devices(self.device_ids))
        else:
            devices = [CPU] * self.ranks if self.ranks else default_devices() or [CPU] * CPU_RANKS
            if self.engine == "plain" and not self.ranks:
                del devices[1:]
        if self.ranks is not None and self.ranks != len(devices):
            raise ValueError(f"ranks: wanted {self.ranks}, there are {len(devices)} devices")
        if self.engine == "plain" and len(devices) > 1:
            raise ValueError(f"the plain engine trains on one device, got {len(devices)}")
        return devices

    def __str__(self) -> str:
        devices = ", ".join(map(str, self.devices()))
        steps = f"batch {self.batch}, accumulate {self.accumulate}, {self.amp or 'float32'}"
        return f"{self.model}, {self.engine} on {devices}, {steps}, lr {self.lr:g}, seed {self.seed}"
