"""The file a training can go on from, bit for bit.

It is written after whole epochs only, so the position in the data is the number of the epoch: the order of the next
one follows from (seed, epoch). Kept are the engine's state (network, optimizer, loss scale, random numbers), the
curves so far, and the settings that the remaining bits depend on. It is read with `weights_only=True`: a file from a
stranger can be refused, but cannot run code. The bits are the same for the same engine, devices, number of threads and
version of torch; with others the curve goes on, rounded differently.
"""

import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mgpu_core.step.train_step import TrainStep
from mgpu_core.support.files import write_whole
from mgpu_core.tools.mnist.engines import LoopStep

FORMAT = "mgpu_core.mnist checkpoint 2"


@dataclass(frozen=True)
class Epoch:
    """One pass over the training images.

    Attributes:
        number: from 1.
        loss: the mean over the images of the epoch, as they were seen.
        accuracy: on the test images after the epoch, 0..1.
        seconds: of the steps, without the test.
        step_losses: the mean loss of each step's batch; read from the device once per epoch.
    """

    number: int
    loss: float
    accuracy: float
    seconds: float
    step_losses: list[float]


def write_checkpoint(path: Path, settings: dict[str, Any], state: dict[str, Any], epochs: list[Epoch]) -> None:
    """Write the file, whole or not at all: the state of an engine after `epochs`, trained with `settings`."""
    content = {"format": FORMAT, "settings": settings, "state": state, "epochs": [asdict(each) for each in epochs]}
    write_whole(path, lambda stream: torch.save(content, stream))


def read_checkpoint(path: Path, settings: dict[str, Any], engine: TrainStep | LoopStep) -> list[Epoch]:
    """Load the state of a file that was written with these settings into `engine`, and return the epochs.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is damaged, is not one of ours, or was written with other settings, which are named.
    """
    try:
        content = _whole_content(path)
        saved, epochs = content["settings"], [Epoch(**epoch) for epoch in content["epochs"]]
        others = [name for name, value in settings.items() if saved[name] != value]
        if not others:
            engine.load_state_dict(content["state"])
    except OSError:
        raise
    except Exception as error:
        # Any type can come out of a damaged pickle, and torch's texts are a page long.
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{path} is damaged, or not a checkpoint of mgpu mnist ({reason})") from error
    if others:
        words = [", ".join(f"{name} {each[name]}" for name in others) for each in (saved, settings)]
        raise ValueError(f"{path}: the checkpoint was made with {words[0]}; this run has {words[1]}")
    return epochs


def _whole_content(path: Path) -> dict[str, Any]:
    """Return the content of a file with our mark; any error if it is not one, or not whole."""
    # torch does not compare the archive's checksums, so a flipped bit in a weight would pass unseen.
    with zipfile.ZipFile(path) as archive:
        if damaged := archive.testzip():
            raise ValueError(f"wrong checksum of {damaged}")
    content = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"it has no mark {FORMAT!r}")
    return content
