"""Other programs are seen, and work of our own is not taken for theirs."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from mgpu_core.support import busy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="only Linux tells what other programs use"),
]


@pytest.fixture
def alone():
    """One processor that nobody else used a moment ago, so that what the machine does elsewhere is not seen."""
    mine = os.sched_getaffinity(0)
    try:
        for _ in range(50):
            for processor in mine:
                os.sched_setaffinity(0, {processor})
                if (busy.others_busy(0.3) or 0.0) < 0.1:
                    yield processor
                    return
        pytest.skip("no processor was free")
    finally:
        os.sched_setaffinity(0, mine)


@pytest.fixture
def spinning():
    """Return a function that starts another program, which uses the processors of this one without end."""
    processes = []

    def start():
        processes.append(subprocess.Popen([sys.executable, "-c", "print(1, flush=True)\nwhile True: pass"], stdout=-1))
        assert processes[-1].stdout.readline() == b"1\n"

    yield start
    for each in processes:
        each.kill()
        each.wait()
        each.stdout.close()


def test_a_program_next_to_us_is_found(alone, spinning):
    spinning()
    assert [busy.busy_note() for _ in range(3)] == [
        "other programs keep 1.0 of 1 processors busy: repeat it on a quiet machine"
    ] * 3


def test_our_own_work_is_not_that_of_others(alone):
    """Neither threads that go on while we look, nor processes that worked before it."""
    end = threading.Event()
    thread = threading.Thread(target=lambda: [None for _ in iter(end.is_set, True)])
    thread.start()
    try:
        assert is_quiet_once()
    finally:
        end.set()
        thread.join()
    worker = multiprocessing.get_context("fork").Process(target=spin_then_sleep)
    worker.start()
    time.sleep(0.5)
    assert is_quiet_once()
    worker.kill()
    worker.join()


def is_quiet_once():
    """Return whether one of many looks sees nobody: others may come and go, but our own work is there in each."""
    return any(busy.busy_note() == "" for _ in range(50))


def spin_then_sleep():
    end = time.monotonic() + 0.4
    while time.monotonic() < end:
        pass
    signal.pause()


def test_a_system_that_tells_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(busy, "_STAT", tmp_path / "nothing")
    assert (busy.others_busy(), busy.busy_note()) == (None, "")
