"""MNIST without MNIST: as many images as the real one, random pixels, in the four files that every reader knows.

Nothing is downloaded, and the time of a loader does not depend on the pixels.
"""

import struct
from pathlib import Path

import torch
from torch.utils.data import Dataset

from mgpu_core.mnist.digits import MEAN, STD

SCALE, SHIFT = 1 / (255 * STD), -MEAN / STD
"""uint8 pixel to normalised float: pixel * SCALE + SHIFT."""
TEST_COUNT = 100


def write_digits(folder: Path, count: int) -> None:
    """Write `count` training and a few test images as IDX files, where torchvision and `mgpu_core.mnist` look."""
    target = folder / "MNIST" / "raw"
    target.mkdir(parents=True)
    generator = torch.Generator().manual_seed(1998)
    for prefix, images in (("train", count), ("t10k", TEST_COUNT)):
        pixels = torch.randint(256, (images, 28, 28), dtype=torch.uint8, generator=generator)
        labels = torch.randint(10, (images,), dtype=torch.uint8, generator=generator)
        _write_idx(target / f"{prefix}-images-idx3-ubyte", pixels)
        _write_idx(target / f"{prefix}-labels-idx1-ubyte", labels)


def torchvision_digits(folder: Path) -> "Dataset[tuple[torch.Tensor, int]]":
    """Return the training images as the reference program reads them: torchvision's MNIST, ToTensor, Normalize."""
    from torchvision import datasets, transforms

    steps = transforms.Compose([transforms.ToTensor(), transforms.Normalize((MEAN,), (STD,))])
    digits: Dataset[tuple[torch.Tensor, int]] = datasets.MNIST(str(folder), train=True, transform=steps)
    return digits


def _write_idx(path: Path, values: torch.Tensor) -> None:
    """Two zeros, type 8 (unsigned byte), the number of dims, the dims (big-endian u32), the values."""
    header = struct.pack(f">HBB{values.dim()}I", 0, 8, values.dim(), *values.shape)
    path.write_bytes(header + values.numpy().tobytes())
