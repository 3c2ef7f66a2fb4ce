"""Whoever misses an extra is told which one, in one sentence, and the extras are those of `pyproject.toml`."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from mgpu_core.support import extras

OPTIONAL = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
PROJECTS = {"pynvml": "nvidia-ml-py"}  # where the package's name is not that of the project


@pytest.mark.parametrize("package", extras._EXTRAS)
def test_the_extra_brings_the_package(package):
    project = PROJECTS.get(package, package)
    assert any(each.startswith(project) for each in OPTIONAL[extras._EXTRAS[package]])


def test_what_is_there_is_given():
    assert extras.require("json.decoder", "a test") is sys.modules["json.decoder"]


def test_what_is_not_there_is_named_with_its_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(extras.MissingExtra) as caught:
        extras.require("matplotlib", "a picture")
    assert str(caught.value).startswith("a picture needs matplotlib: pip install 'mgpu-core[mnist]' (")
    assert isinstance(caught.value, ModuleNotFoundError)


def test_a_package_that_is_there_and_does_not_work_says_why(monkeypatch, tmp_path):
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise ImportError('undefined symbol:\\n  at::x')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [each for each in sys.modules if each.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(extras.MissingExtra, match=r"^the download needs torchvision: .* \(undefined symbol: at::x\)$"):
        extras.require("torchvision.datasets", "the download")


@pytest.mark.parametrize("package", extras._EXTRAS)
def test_nobody_else_says_how_to_install_it(package):
    own = Path(extras.__file__)
    alone = re.compile(rf"find_spec\(.{package}|pip install .?({package}|mgpu-core\[{extras._EXTRAS[package]})")
    assert [path for path in own.parents[1].rglob("*.py") if path != own and alone.search(path.read_text())] == []
