"""Importing the package: its version, and where its compiled core is not."""

import importlib.metadata
import inspect
import pydoc
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mgpu_core


def test_the_source_folder_says_what_to_do(tmp_path):
    """The clone's folder hides the installed package from a Python that is started in the clone."""
    shutil.copytree(
        Path(mgpu_core.__file__).parent, tmp_path / "mgpu_core", ignore=shutil.ignore_patterns("*.so", "*.pyd")
    )
    # Without site-packages there is neither the installed package nor its editable finder.
    ran = subprocess.run([sys.executable, "-S", "-c", "import mgpu_core"], cwd=tmp_path, capture_output=True, text=True)
    last = ran.stderr.splitlines()[-1]
    assert ran.returncode == 1
    assert last.startswith(f"ImportError: mgpu_core in {tmp_path / 'mgpu_core'} has no compiled core")
    assert "start Python from another folder, or install it in place: pip install --no-build-isolation -e ." in last


def test_the_version_is_that_of_the_installed_package():
    assert mgpu_core.__version__ == importlib.metadata.version("mgpu-core")


def test_names_are_imported_at_their_first_use(tmp_path):
    program = (
        "import sys, mgpu_core\n"
        "count = lambda: len([name for name in sys.modules if name.startswith('mgpu_core')])\n"
        "print(count() <= 70, 'torch' in sys.modules, set(mgpu_core.__all__) <= set(dir(mgpu_core)))\n"
        "mgpu_core.Team\n"
        "print('torch' in sys.modules, 'mgpu_core.step.train_step' in sys.modules)\n"
    )
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == ["True False True", "True False"]


PAGES = [
    "DataParallel",
    "TrainStep",
    "Pipeline",
    "place",
    "TensorParallel",
    "Predictor",
    "DeviceLoader",
    "optim",
    "explain",
]


def test_help_is_one_screen_and_that_of_a_class_is_whole():
    page = pydoc.render_doc(mgpu_core, renderer=pydoc.plaintext).splitlines()
    assert len(page) < 60
    first_words = [line.split()[0] for line in page if re.match(r"    \w+ {2,}\S", line)]
    assert first_words == [*PAGES, "advise"]
    assert set(first_words) <= set(mgpu_core.__all__)
    assert "| __call__" in pydoc.render_doc(mgpu_core.TrainStep, renderer=pydoc.plaintext).replace("|  ", "| ")


def test_dir_has_public_names_alone():
    assert dir(mgpu_core) == sorted([*mgpu_core.__all__, "__version__"])
    assert {name for name, _ in inspect.getmembers(mgpu_core)} == set(dir(mgpu_core))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'mgpu_core' has no attribute 'DataParalel'"):
        _ = mgpu_core.DataParalel
