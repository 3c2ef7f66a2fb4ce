"""Ctrl-C in one process: all stop, or a step says that it may have been made."""

import contextlib
import os
import signal
import threading
import time

import torch
from processes.fragile import ONES, Fragile, batch, seen_of, step_of, values_of
from processes.world import run


def interrupt(process, when):
    """Ctrl-C in process 0, while it computes or while it waits for process 1."""
    acts = {}
    net = Fragile(acts)
    step = step_of(net)
    step(batch(), ONES)
    before = values_of(net)
    if process == 0:
        acts["forward"] = lambda: time.sleep(1.0)
        threading.Timer(0.3 if when == "computing" else 1.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        acts["forward"] = lambda: time.sleep(0.0 if when == "computing" else 4.0)
    first = seen_of(lambda: step(batch(0 if process == 1 or when == "computing" else None), ONES))
    kept = all(map(torch.equal, values_of(net), before))
    acts.clear()
    return first, seen_of(lambda: step(batch(), ONES)), kept, step.steps


def test_ctrl_c_before_the_ballot_stops_all():
    own, (told, *others) = run(interrupt, "computing")
    assert own == ("KeyboardInterrupt: ", "nothing", True, 2)
    assert told.startswith("Error: ")
    assert others == ["nothing", True, 2]


def test_ctrl_c_behind_the_ballot_leaves_a_step_that_says_so():
    (own, after, *rest), (told, again, *others) = run(interrupt, "waiting")
    assert own == "KeyboardInterrupt: "
    assert "interrupted while they agreed on an update, and some may have made it" in after
    assert told.startswith("Error: ")
    assert "process 1 of 2 was left alone: process 0 (pid " in again
    assert rest == others == [True, 1]


def rebuild_after_an_unknown_end(process):
    """Process 0 was interrupted while the others updated: it is found to be one update behind."""
    acts = {}
    net = Fragile(acts)
    step = step_of(net)
    step(batch(), ONES)
    if process == 0:
        threading.Timer(1.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        acts["forward"] = lambda: time.sleep(3.0)
    with contextlib.suppress(KeyboardInterrupt):
        step(batch(0 if process == 1 else None), ONES)
    return seen_of(step.rebuild)


def test_processes_at_another_update_are_found_by_rebuild():
    texts = run(rebuild_after_an_unknown_end)
    assert texts[0] == texts[1]
    assert texts[0].startswith("ValueError: ")
    assert "processes differ in their settings: updates=1 in process 0, updates=2 in process 1" in texts[0]


def interrupt_the_first(process):
    """Ctrl-C while process 0 waits in the first step, for a process that computes."""
    acts = {"forward": lambda: time.sleep(3.0)}
    step = step_of(Fragile(acts))
    if process == 0:
        threading.Timer(1.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    first = seen_of(lambda: step(batch(0 if process == 1 else None), ONES))
    return first, seen_of(lambda: step(batch(), ONES))


def test_ctrl_c_while_the_processes_speak():
    (own, after), (told, _) = run(interrupt_the_first)
    assert own == "KeyboardInterrupt: "
    assert "process 0 of 2 was interrupted while the processes spoke about the first backward" in after
    assert "process 1 of 2 was left alone" in told
