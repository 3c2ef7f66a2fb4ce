"""Where the digits come from, and how batches are cut from them.

Three sources: the 5,000 digits in the package, a folder with MNIST's four files, or a download; torchvision reads the
latter two. All images stay in ONE uint8 tensor on the first device; a batch is one kernel that picks rows and
normalises them, so there are no per-sample loaders and no worker processes. The order of an epoch depends on (seed,
epoch) alone: every engine sees the same batches, and a resumed run needs no generator state to go on with them.
"""

import hashlib
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from mgpu_core.data.tensor_loader import batches_of
from mgpu_core.devices.tensor_checks import memory_view
from mgpu_core.support.extras import require
from mgpu_core.tools.mnist.model import CLASSES

BUILTIN = Path(__file__).parent / "data" / "mnist_5k.zip"
MEAN, STD = 0.1307, 0.3081
"""Of MNIST's grey values in 0..1, over the 60,000 training images."""


@dataclass(frozen=True)
class Split:
    """Images and their labels: `images` uint8 (count, 1, 28, 28), `labels` int64 (count,), both on one device."""

    images: torch.Tensor
    labels: torch.Tensor

    @property
    def count(self) -> int:
        """How many images."""
        return self.images.shape[0]

    def batches(self, order: torch.Tensor, batch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Return the rows in this order, `batch` at a time: float32 images (batch, 1, 28, 28), int64 labels (batch,).

        Args:
            order: int64 (any,), on the device of the images.
        """
        loader = batches_of((self.images, self.labels), order, batch, 1 / (255 * STD), -MEAN / STD)
        return ((images, labels) for images, labels in loader)


@dataclass(frozen=True)
class Digits:
    """The data of a training: images to train on, and images to test with."""

    train: Split
    test: Split

    def to(self, device: torch.device) -> "Digits":
        """Return the same digits on `device`."""
        train, test = (Split(each.images.to(device), each.labels.to(device)) for each in (self.train, self.test))
        return Digits(train, test)

    def digest(self) -> str:
        """Return the SHA-256 (hex) of all pixels and labels."""
        digest = hashlib.sha256()
        for tensor in (self.train.images, self.train.labels, self.test.images, self.test.labels):
            digest.update(memory_view(tensor.cpu()))
        return digest.hexdigest()


def load(source: str = "builtin") -> Digits:
    """Read the digits, onto the CPU.

    Args:
        source: `builtin`, `download` (into torch's own folder of downloads), or a folder that holds MNIST's four
            unpacked files, in itself or in `MNIST/raw` as torchvision keeps them.

    Raises:
        ValueError: a file is damaged or is not of MNIST's shape, or the download failed.
        OSError: a file or folder is missing.
        ModuleNotFoundError: `download` or a folder, without torchvision.
    """
    if source != "builtin":
        return _by_torchvision(source)
    with zipfile.ZipFile(BUILTIN) as archive:
        files = {name: bytearray(archive.read(name)) for name in archive.namelist()}
    # Our own file needs no checks: bytes behind a header of 16 (images) or 8 (labels).
    splits = []
    for prefix in ("train", "t10k"):
        images = torch.frombuffer(files[f"{prefix}-images-idx3-ubyte"], dtype=torch.uint8, offset=16)
        labels = torch.frombuffer(files[f"{prefix}-labels-idx1-ubyte"], dtype=torch.uint8, offset=8)
        splits.append(Split(images.view(-1, 1, 28, 28), labels.long()))
    return Digits(*splits)


def epoch_order(count: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the order of the images in one epoch: int64 (count,) on the CPU, the same for one (seed, epoch)."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, epoch), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.randperm(count, generator=generator, device="cpu")


def _by_torchvision(source: str) -> Digits:
    """Read a folder's files, or the download's, which is made once. Raises as `load`."""
    mnist = require("torchvision.datasets.mnist", "reading MNIST's files")
    folder = Path(torch.hub.get_dir()) / "mgpu_core" if source == "download" else Path(source)
    try:
        if source == "download":
            mnist.MNIST(folder, download=True)
        raw = folder / "MNIST" / "raw"
        files = raw if raw.is_dir() else folder
        return Digits(_split(mnist, files, "train"), _split(mnist, files, "t10k"))
    except (ValueError, TypeError, LookupError, AssertionError, RuntimeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{folder}: wanted MNIST's unpacked files, came others ({reason})") from error


def _split(mnist: ModuleType, folder: Path, prefix: str) -> Split:
    images = mnist.read_image_file(folder / f"{prefix}-images-idx3-ubyte")
    labels = mnist.read_label_file(folder / f"{prefix}-labels-idx1-ubyte")
    if images.shape[1:] != (28, 28) or len(labels) != len(images) or labels.max() >= CLASSES:
        raise ValueError(f"{prefix}: images {tuple(images.shape)}, {len(labels)} labels up to {labels.max()}")
    return Split(images.unsqueeze(1), labels)
