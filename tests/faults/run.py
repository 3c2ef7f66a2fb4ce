"""Runs tests with a fault, in a process of its own, forked from one that has imported torch and pytest."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path

from fakes.on_the_fake import fake_of

from faults import hook

TESTS = Path(__file__).resolve().parents[1]
FAKE = ("accelerator/", "fake:")  # begin what runs on a fake accelerator: its own tests, and others of the table
SECONDS = 900  # of one run: several times what the slowest one takes without a fault
OPTIONS = ["-x", "-q", "-m", "", "-p", "no:cacheprovider", "--timeout=60", "--tb=no", "--rootdir", str(TESTS.parent)]


def failing_test(fault: str, tests: Sequence[str]) -> str:
    """Return the test that notices a fault; empty: none does.

    Args:
        fault: as in the variable of the hook; empty for none.
        tests: files and folders below tests/, in the order in which they run; those on the fake accelerator come last.
    """
    runs: dict[str, list[str]] = {"": []}  # by the value of the fakes' variable
    for each in tests:
        fake = fake_of(each.removeprefix("fake:")) if each.startswith(FAKE) else ""
        runs.setdefault(fake, []).append(each.removeprefix("fake:"))
    return next((found for fake, part in runs.items() if part and (found := _run(fault, part, fake))), "")


def _run(fault: str, tests: Sequence[str], fake: str) -> str:
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "pytest", "hypothesis", "faults.run"])
    with tempfile.NamedTemporaryFile("r", prefix="fault-") as log:
        process = context.Process(target=_child, args=(fault, tests, fake, log.name))
        process.start()
        process.join(SECONDS)
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)
            return f"the time limit of {' '.join(tests)}"
        lines = log.read().splitlines()
    if process.exitcode == 0:
        return ""
    failed = [line.split()[1].removeprefix("tests/") for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return failed[0] if failed else f"exit status {process.exitcode} of {tests[0]}"


def _child(fault: str, tests: Sequence[str], fake: str, log: str) -> None:
    os.setsid()  # so that the time limit ends what a test has started, too
    target = os.open(log, os.O_WRONLY)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS / "faults" / "site"), str(TESTS)])
    os.environ |= {hook.VARIABLE: fault, "PYTHONDONTWRITEBYTECODE": "1"} | ({"MGPU_TEST_FAKE": fake} if fake else {})
    hook.install()
    os.chdir(TESTS)
    import pytest  # preloaded

    status = pytest.main([*OPTIONS, *tests])
    sys.stdout.flush()
    os._exit(status)  # threads that hang because of the fault do not keep the process
