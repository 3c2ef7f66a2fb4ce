"""The road on a fake accelerator, in a process of its own: registering one makes it the accelerator of the process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import accelerator
from fakes.accelerator.cpu_only import CPU_ONLY

TESTS = Path(__file__).parent

ON_THE_FAKE = [
    "accelerator",
    "conformance",
    "parallel/test_replicate.py",
    "parallel/test_scatter.py",
    "test_data_parallel_contract.py",
    "test_data_parallel_equality.py",
    "test_torch_expectations.py",
]


@pytest.mark.skipif(accelerator.is_wanted(), reason="this is the process with the fake already")
@pytest.mark.timeout(900)  # the first run compiles
def test_the_road_on_the_fake_accelerator():
    if reason := accelerator.what_is_missing():
        pytest.skip(reason)
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *ON_THE_FAKE],
        cwd=TESTS,
        env=os.environ | {accelerator.WANTED: "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=840,
    )
    assert ran.returncode == 0, ran.stdout


def test_every_test_that_is_left_out_exists():
    files = [path for name in ON_THE_FAKE for path in ([TESTS / name] if "." in name else (TESTS / name).glob("*.py"))]
    text = "".join(path.read_text() for path in files)
    assert [name for name in CPU_ONLY if f"def {name}(" not in text] == []
