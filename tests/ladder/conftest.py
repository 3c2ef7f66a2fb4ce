"""The ladder is no part of the package: it is found beside it, as its command finds it."""

import importlib.util
import shutil
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from fakes import ptx

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))


@pytest.fixture(scope="session")
def on_host(tmp_path_factory):
    """`on_host.py`, with a `library(kernel)` that builds each once."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    module = beside("on_host")
    folder = tmp_path_factory.mktemp("ladder-on-host")
    module.library = cache(lambda kernel: module.build(kernel, folder))
    return module


@pytest.fixture(scope="session")
def on_ptx():
    """`on_ptx.py`, whose machine runs nvcc's PTX."""
    if reason := ptx.what_is_missing():
        pytest.skip(reason)
    return beside("on_ptx")


def beside(name):
    """Import a module of this folder, which is no package."""
    spec = importlib.util.spec_from_file_location(f"ladder_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def gpu():
    """The first GPU; afterwards its work has ended without an error that the next test would report."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    yield torch.device("cuda", 0)
    torch.cuda.synchronize()
