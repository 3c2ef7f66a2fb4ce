"""Where the digits come from, and how batches are cut from them.

Three sources, one parser: the 5,000 digits in the package, a folder with MNIST's four IDX files, or torchvision's
download. All images stay in ONE uint8 tensor on the first device; a batch is one kernel that picks rows and
normalises them, so there are no per-sample loaders and no worker processes. The order of an epoch depends on (seed,
epoch) alone: every engine sees the same batches, and a resumed run needs no generator state to go on with them.
"""

import hashlib
import os
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mgpu_core.extras import require
from mgpu_core.mnist.idx import Idx, read_idx, read_idx_file
from mgpu_core.mnist.model import CLASSES
from mgpu_core.tensor_loader import batches_of

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
        made = batches_of((self.images, self.labels), order, batch, 1 / (255 * STD), -MEAN / STD)
        return ((images, labels) for images, labels in made)

    def to(self, device: torch.device) -> "Split":
        """Return the same rows on `device`."""
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))


@dataclass(frozen=True)
class Digits:
    """The data of a training: images to train on, images to test with, and their SHA-256 (hex)."""

    train: Split
    test: Split
    digest: str

    def to(self, device: torch.device) -> "Digits":
        """Return the same digits on `device`."""
        return replace(self, train=self.train.to(device), test=self.test.to(device))


def load(source: str = "builtin") -> Digits:
    """Read the digits, onto the CPU.

    Args:
        source: `builtin`, `download` (torchvision, into the user's cache folder), or a folder that holds MNIST's
            four IDX files, raw or `.gz`, in itself or in `MNIST/raw` as torchvision keeps them.

    Raises:
        ValueError: a file is damaged or is not of MNIST's shape.
        OSError: a file or folder is missing, or the download failed.
        ModuleNotFoundError: `download` without torchvision.
    """
    if source == "builtin":
        return _assemble(_read_archive(BUILTIN))
    return _assemble(_read_folder(_download() if source == "download" else Path(source)))


def epoch_order(count: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the order of the images in one epoch: int64 (count,) on the CPU, the same for one (seed, epoch)."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, epoch), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.randperm(count, generator=generator, device="cpu")


def cache_folder() -> Path:
    """Return the folder of downloads: `$XDG_CACHE_HOME/mgpu_core`, or `~/.cache/mgpu_core`.

    Raises:
        FileNotFoundError: there is no home folder.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mgpu_core"
    except RuntimeError as error:
        raise FileNotFoundError(f"no folder for downloads: {error} Set XDG_CACHE_HOME") from error


_FILES = {
    "train-images-idx3-ubyte": 3,
    "train-labels-idx1-ubyte": 1,
    "t10k-images-idx3-ubyte": 3,
    "t10k-labels-idx1-ubyte": 1,
}
"""MNIST's four files, and the dims of each."""


def _read_archive(path: Path) -> dict[str, Idx]:
    with zipfile.ZipFile(path) as archive:
        files = {}
        for name, dims in _FILES.items():
            with archive.open(name) as member:
                files[name] = read_idx(member, f"{path}:{name}", dims)
        return files


def _read_folder(folder: Path) -> dict[str, Idx]:
    if not folder.is_dir():
        raise NotADirectoryError(
            f"{folder}: no such folder (wanted builtin, download or a folder with MNIST's IDX files)"
        )
    return {name: read_idx_file(_find(folder, name), dims) for name, dims in _FILES.items()}


def _find(folder: Path, name: str) -> Path:
    for candidate in (folder / "MNIST" / "raw", folder):
        for path in (candidate / name, candidate / f"{name}.gz"):
            if path.is_file():
                return path
    raise FileNotFoundError(f"{folder}: wanted {name} or {name}.gz, here or in MNIST/raw, found neither")


def _download() -> Path:
    folder = cache_folder()
    try:
        for name in _FILES:
            _find(folder, name)
    except FileNotFoundError:
        _fetch(folder)
    return folder


def _fetch(folder: Path) -> None:
    datasets = require("torchvision.datasets", "the download")
    try:
        datasets.MNIST(str(folder), download=True)
    except (OSError, RuntimeError) as error:
        raise OSError(f"{folder}: MNIST could not be downloaded ({' '.join(str(error).split())})") from error


def _assemble(files: dict[str, Idx]) -> Digits:
    digest = hashlib.sha256()
    for name, content in files.items():
        digest.update(f"{name} {content.shape}".encode())
        digest.update(content.values)
    train, test = (_split(files, prefix) for prefix in ("train", "t10k"))
    return Digits(train, test, digest.hexdigest())


def _split(files: dict[str, Idx], prefix: str) -> Split:
    images = files[f"{prefix}-images-idx3-ubyte"]
    labels = files[f"{prefix}-labels-idx1-ubyte"]
    if images.shape[1:] != (28, 28):
        raise ValueError(f"{prefix} images: wanted 28 x 28 pixels, came {images.shape[1]} x {images.shape[2]}")
    if labels.shape[0] != images.shape[0]:
        raise ValueError(f"{prefix} labels: wanted {images.shape[0]}, one per image, came {labels.shape[0]}")
    if max(labels.values) >= CLASSES:
        raise ValueError(f"{prefix} labels: wanted digits from 0 to 9, came {max(labels.values)}")
    return Split(images.tensor().unsqueeze(1), labels.tensor().long())
