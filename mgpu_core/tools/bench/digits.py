"""MNIST without MNIST: as many images as the real one, of random pixels; for torchvision in the files that it reads.

Nothing is downloaded, and the time of a loader does not depend on the pixels.
"""

import struct
from pathlib import Path

import torch
from torch.utils.data import Dataset

from mgpu_core.tools.mnist.digits import MEAN, STD, Digits, Split

SCALE, SHIFT = 1 / (255 * STD), -MEAN / STD
"""uint8 pixel to normalised float: pixel * SCALE + SHIFT."""
TEST_COUNT = 100


def random_digits(count: int) -> Digits:
    """Return `count` training and a few test images."""
    generator = torch.Generator().manual_seed(1998)
    return Digits(_random_split(count, generator), _random_split(TEST_COUNT, generator))


def torchvision_digits(digits: Digits, folder: Path) -> "Dataset[tuple[torch.Tensor, int]]":
    """Return the training images as the reference program reads them: torchvision's MNIST, ToTensor, Normalize.

    Its IDX files are written into `folder` first, which must not have such files yet.
    """
    from torchvision import datasets, transforms

    target = folder / "MNIST" / "raw"
    target.mkdir(parents=True)
    for prefix, split in (("train", digits.train), ("t10k", digits.test)):
        _write_idx(target / f"{prefix}-images-idx3-ubyte", split.images.squeeze(1))
        _write_idx(target / f"{prefix}-labels-idx1-ubyte", split.labels.to(torch.uint8))
    steps = transforms.Compose([transforms.ToTensor(), transforms.Normalize((MEAN,), (STD,))])
    images: Dataset[tuple[torch.Tensor, int]] = datasets.MNIST(str(folder), train=True, transform=steps)
    return images


def _random_split(count: int, generator: torch.Generator) -> Split:
    pixels = torch.randint(256, (count, 1, 28, 28), dtype=torch.uint8, generator=generator)
    return Split(pixels, torch.randint(10, (count,), generator=generator))


def _write_idx(path: Path, values: torch.Tensor) -> None:
    """Two zeros, type 8 (unsigned byte), the number of dims, the dims (big-endian u32), the values."""
    header = struct.pack(f">HBB{values.dim()}I", 0, 8, values.dim(), *values.shape)
    path.write_bytes(header + values.numpy().tobytes())
