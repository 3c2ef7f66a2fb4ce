"""Runs tests again in a process whose devices are the fakes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import accelerator

TESTS = Path(__file__).parents[1]


def run_tests(paths, wanted):
    """A test that hangs says after 110 s where its threads are; by then all waits of the package have given up."""
    options = ["-q", "-p", "no:cacheprovider", "-m", "", "-o", "faulthandler_timeout=110"]
    try:
        ran = subprocess.run(
            [sys.executable, "-P", "-m", "pytest", *options, *paths],
            cwd=TESTS,
            env={"MGPU_CORE_TIMEOUT": "100"} | os.environ | {accelerator.WANTED: wanted},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=840,
        )
    except subprocess.TimeoutExpired as late:
        pytest.fail(f"still at work after 840 s:\n{(late.stdout or b'').decode()}")
    assert ran.returncode == 0, ran.stdout.decode()
