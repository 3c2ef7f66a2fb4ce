"""The file a training can go on from, bit for bit.

It is written after whole epochs only, so the position in the data is the number of the epoch: the order of the next
one follows from (seed, epoch), and no generator of the shuffling has to be kept. Kept are the network, the
optimizer, torch's global CPU generator, the curves so far, and the settings that the remaining bits depend on. It
is read with `weights_only=True`: a file from a stranger can be refused, but cannot run code. The bits are the same
for the same team, number of threads and version of torch; with others the curve goes on, rounded differently.
"""

import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mgpu_core.files import write_whole
from mgpu_core.mnist.config import Config
from mgpu_core.mnist.history import Epoch
from mgpu_core.train.checkpoint import check_groups, compact_copy

FORMAT = "mgpu_core.mnist checkpoint 1"
PARTS = {
    "settings": dict,
    "team": str,
    "net": dict,
    "optimizer": dict,
    "loss_scale": dict,
    "generator": torch.Tensor,
    "epochs": list,
}
"""What the file holds besides the mark, and of which type: the fields of `Checkpoint`."""


@dataclass
class Checkpoint:
    """A training after a whole epoch.

    Attributes:
        settings: that a resumed run must share with this one (see `binding_settings`).
        team: engine and devices in words. Another team may go on: same curve, other rounding.
        net: the network's state, on the CPU after `read`; keys without `module.`.
        optimizer: the optimizer's state.
        loss_scale: the state of the engine's loss scale; empty where it has none.
        generator: the state of torch's global CPU generator.
        epochs: the records so far.
    """

    settings: dict[str, Any]
    team: str
    net: dict[str, Any]
    optimizer: dict[str, Any]
    loss_scale: dict[str, Any]
    generator: torch.Tensor
    epochs: list[Epoch]

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        content: dict[str, Any] = {"format": FORMAT}
        content |= {name: getattr(self, name) for name in PARTS}
        content["epochs"] = [asdict(epoch) for epoch in self.epochs]
        write_whole(path, lambda stream: torch.save(compact_copy(content), stream))

    @classmethod
    def read(cls, path: Path) -> "Checkpoint":
        """Read the file. `OSError` if it cannot be opened, `ValueError` if it is damaged or not one of ours."""
        content = _load(path)
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise ValueError(f"{path}: wanted a file with the mark {FORMAT!r}, came a torch file without it")
        content.setdefault("loss_scale", {})  # files from before there was mixed precision
        wrong = [name for name, kind in PARTS.items() if not isinstance(content.get(name), kind)]
        if wrong or len(content) != len(PARTS):
            came = ", ".join(map(str, content))
            raise ValueError(f"{path}: wanted a checkpoint with {', '.join(PARTS)}, came one with {came}")
        for name, only in {"accumulate": 1, "amp": None}.items():  # files from before there was a choice
            content["settings"].setdefault(name, only)
        try:
            content["epochs"] = [Epoch(**epoch) for epoch in content["epochs"]]
            for epoch in content["epochs"]:
                epoch.check()
        except TypeError as error:
            raise ValueError(f"{path}: wanted records of epochs, came something else ({error})") from error
        return cls(**content)

    def check_settings(self, path: Path, wanted: dict[str, Any]) -> None:
        """Raise `ValueError` that names each setting in which a run with `wanted` differs from this checkpoint."""
        names = [name for name, value in wanted.items() if self.settings.get(name) != value]
        if names:
            made = ", ".join(f"{name} {_short(self.settings.get(name))}" for name in names)
            asked = ", ".join(f"{name} {_short(wanted[name])}" for name in names)
            raise ValueError(f"{path}: the checkpoint was made with {made}; this run has {asked}")

    def restore(self, path: Path, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Put the state into `net` and `optimizer`, on their devices. `ValueError` if it does not fit them."""
        try:
            net.load_state_dict(self.net)
            _check_fits(self.optimizer, optimizer)
            optimizer.load_state_dict(self.optimizer)
            torch.Generator().set_state(self.generator)
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"{path}: the checkpoint does not fit its own settings ({reason})") from error


def _check_fits(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Check shapes that torch checks only in a step."""
    check_groups(state, optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, values in state["state"].items():
        for name, value in values.items():
            if torch.is_tensor(value) and value.dim() and value.shape != parameters[index].shape:
                raise ValueError(
                    f"{name} of parameter {index} is {tuple(value.shape)}, not {tuple(parameters[index].shape)}"
                )


def binding_settings(config: Config, digest: str) -> dict[str, Any]:
    """Return the settings that a checkpoint and the run that goes on from it must share; `digest` says which digits."""
    return {
        "model": config.model,
        "batch": config.batch,
        "accumulate": config.accumulate,
        "amp": config.amp,
        "lr": config.lr,
        "seed": config.seed,
        "digits": digest,
    }


def _load(path: Path) -> Any:
    with path.open("rb") as stream:
        try:
            # torch does not compare the archive's checksums, so a flipped bit in a weight would pass unseen.
            with zipfile.ZipFile(stream) as archive:
                damaged = archive.testzip()
            if damaged is not None:
                raise ValueError(f"wrong checksum of {damaged}")
            stream.seek(0)
            return torch.load(stream, map_location="cpu", weights_only=True)
        except Exception as error:
            # Any type can come out of a damaged pickle, and torch's texts are a page long.
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(f"{path} is damaged, or not a checkpoint of mgpu mnist ({reason})") from error


def _short(value: object) -> str:
    return f"{value:.12}" if isinstance(value, str) else str(value)
