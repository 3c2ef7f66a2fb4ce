"""Few digits, so that a training is a matter of milliseconds, and MNIST's files made by hand."""

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mgpu_core.tools.mnist import Digits, Split, load


@pytest.fixture(scope="session")
def builtin() -> Digits:
    return load("builtin")


@pytest.fixture(scope="session")
def few(builtin: Digits) -> Digits:
    """150 digits to train on, 100 to test with: three batches of 64, the last one of 22."""
    train = Split(builtin.train.images[:150], builtin.train.labels[:150])
    return Digits(train, Split(builtin.test.images[:100], builtin.test.labels[:100]))


@pytest.fixture(scope="session")
def idx() -> Callable[..., bytes]:
    """Builds an IDX file of unsigned bytes, whole or (with other dims than the values have) wrong."""

    def build(values: bytes, *dims: int) -> bytes:
        return bytes([0, 0, 8, len(dims)]) + struct.pack(f">{len(dims)}I", *dims) + values

    return build


@pytest.fixture
def folder(tmp_path: Path, builtin: Digits, idx: Callable[..., bytes]) -> Path:
    """A folder with MNIST's four files, 30 digits to train on and 20 to test with."""
    pytest.importorskip("torchvision", reason="torchvision is not installed (extra: mnist)")
    for prefix, split, count in (("train", builtin.train, 30), ("t10k", builtin.test, 20)):
        images = bytes(split.images[:count].flatten().tolist())
        (tmp_path / f"{prefix}-images-idx3-ubyte").write_bytes(idx(images, count, 28, 28))
        (tmp_path / f"{prefix}-labels-idx1-ubyte").write_bytes(idx(bytes(split.labels[:count].tolist()), count))
    return tmp_path


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
