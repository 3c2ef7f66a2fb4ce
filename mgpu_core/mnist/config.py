"""The settings of one training, checked as soon as they are put together.

One frozen dataclass is shared by the command line, the tests and the benchmarks. Values are
validated here; the machine (devices, files, data) is checked when the training is prepared, before its first step.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mgpu_core.mnist.devices import DeviceId, describe
from mgpu_core.mnist.model import MODELS

ENGINES = ("step", "drop-in", "plain")
"""`step`: `mgpu_core.TrainStep`; `drop-in`: the network inside `mgpu_core.DataParallel`; `plain`: the bare network on
one device."""

AMP_DTYPES = ("bfloat16", "float16")

SEED_LIMIT = 2**63
COUNT_LIMIT = 2**31 - 1


@dataclass(frozen=True)
class Config:
    """The training: model, data, devices, and files to write.

    Attributes:
        model: a name of `MODELS`.
        engine: a name of `ENGINES`.
        device_ids: one entry per rank; None for the machine's own choice (see `devices`).
        ranks: how many ranks, where `device_ids` does not say.
        shares: rows in this proportion, one number per rank; None for equal parts.
        batch: rows per step, over all ranks.
        accumulate: steps per update. An epoch's last update may have fewer.
        amp: a name of `AMP_DTYPES`, the dtype of the step engine's forward; None for full precision.
        capture: whole steps of the step engine as CUDA graphs.
        lr: the step length of SGD.
        epochs: passes over the training images, those before a resume included.
        seed: of the weights and of the order of the images.
        source: `builtin`, `download` or a folder (see `data.load`).
        save: a checkpoint, written after each epoch.
        resume: a checkpoint to go on from.
        plot: a PNG of the curves, written at the end.
        json: settings, curves and counters, written at the end.
        explain: an animated page of some steps after the first ones, written at the end.

    Raises:
        ValueError: a value that no training can have, or two outputs in one file.
    """

    model: str = "simplenet"
    engine: str = "step"
    device_ids: tuple[DeviceId, ...] | None = None
    ranks: int | None = None
    shares: tuple[float, ...] | None = None
    batch: int = 64
    accumulate: int = 1
    amp: str | None = None
    capture: bool = False
    lr: float = 0.01
    epochs: int = 5
    seed: int = 0
    source: str = "builtin"
    save: Path | None = None
    resume: Path | None = None
    plot: Path | None = None
    json: Path | None = None
    explain: Path | None = None

    def __post_init__(self) -> None:
        _one_of("model", self.model, MODELS)
        _one_of("engine", self.engine, ENGINES)
        if self.amp is not None:
            _one_of("amp", self.amp, AMP_DTYPES)
            if self.engine != "step":
                raise ValueError(
                    f"amp: the {self.engine} engine trains in full precision; the step engine has a choice"
                )
        if self.capture and self.engine != "step":
            raise ValueError(f"capture: the {self.engine} engine has no graphs; the step engine has")
        for name in ("batch", "accumulate", "epochs", "ranks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: wanted at least 1, got {value}")
            if value is not None and value > COUNT_LIMIT:
                raise ValueError(f"{name}: wanted at most {COUNT_LIMIT}, got {value}")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"lr: wanted a finite number above 0, got {self.lr}")
        if not 0 <= self.seed < SEED_LIMIT:
            raise ValueError(f"seed: wanted a number from 0 to {SEED_LIMIT - 1}, got {self.seed}")
        if self.explain is not None and self.engine == "plain":
            raise ValueError("explain: the plain engine has one device, and nothing moves that could be shown")
        if self.plot is not None and self.plot.suffix.lower() != ".png":
            raise ValueError(f"plot: wanted a name that ends in .png, got {self.plot}")
        self._check_shares()
        self._check_files()

    def team(self, devices: Sequence[torch.device]) -> str:
        """Describe engine and devices in words: `step on 2 x cpu, shares 2:1`."""
        words = f"{self.engine} on {describe(devices)}"
        return words if self.shares is None else f"{words}, shares {':'.join(f'{share:g}' for share in self.shares)}"

    def pace(self) -> str:
        """Describe an update in words: `batch 64, accumulate 4, bfloat16, lr 0.01`."""
        accumulate = f", accumulate {self.accumulate}" if self.accumulate > 1 else ""
        amp = "" if self.amp is None else f", {self.amp}"
        return f"batch {self.batch}{accumulate}{amp}, lr {self.lr:g}"

    def outputs(self) -> dict[str, Path]:
        """Return the files that the training is to write, by the name of the setting."""
        wished = {"save": self.save, "plot": self.plot, "json": self.json, "explain": self.explain}
        return {name: path for name, path in wished.items() if path is not None}

    def _check_shares(self) -> None:
        if self.shares is None:
            return
        if self.engine == "plain":
            raise ValueError("shares: the plain engine trains on one device, and has nothing to share")
        for share in self.shares:
            if not (math.isfinite(share) and share > 0):
                raise ValueError(f"shares: wanted finite numbers above 0, got {share:g}")
        if not math.isfinite(sum(self.shares)):
            raise ValueError("shares: wanted numbers whose sum is finite")

    def _check_files(self) -> None:
        taken = {} if self.resume is None else {self.resume.resolve(): "resume"}
        for name, path in self.outputs().items():
            other = taken.get(path.resolve())
            # A run may go on in the checkpoint it came from, and in no other file twice.
            if other is not None and (name, other) != ("save", "resume"):
                raise ValueError(f"{name} and {other} name the same file: {path}")
            taken[path.resolve()] = name


def _one_of(name: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        raise ValueError(f"{name}: wanted one of {', '.join(known)}, got {value!r}")
