"""Ctrl-C in a step or an evaluation: nothing is half done, and no rank works on."""

import inspect
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress

import pytest
import torch
from fakes.nets import cpu
from step.nets import Linear, mse
from torch import nn
from torch.optim import SGD

from mgpu_core import TrainStep


@pytest.mark.several_ranks
def test_ctrl_c_in_an_evaluation_waits_for_its_ranks(ranks):
    """Or they would write into the net later, and a step could begin beside them."""
    started, inside = threading.Event(), []

    class Slow(Linear):
        def forward(self, x):
            if threading.current_thread() is not threading.main_thread() and not self.training:
                inside.append(1)
                started.set()
                time.sleep(0.3)
                inside.pop()
            return super().forward(x)

    net = Slow().eval()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(ranks), workers="threads")
    batch = torch.ones(8, 3), torch.ones(8, 2)
    interrupt = threading.Thread(target=lambda: (started.wait(60), os.kill(os.getpid(), signal.SIGINT)))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        step.evaluate(*batch)
    assert not inside
    interrupt.join()
    net.train()
    step(*batch)


INTERRUPTED = r"""
    import os, signal, sys, threading, time, torch, copy
    from mgpu_core import TrainStep
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    def loss_fn(out, y):
        if slow:
            os.write(1, b"slow\n")
            time.sleep({seconds})
        return ((out - y) ** 2).mean()
    slow = False
    step = TrainStep(net, loss_fn, torch.optim.AdamW(net.parameters()), ["cpu"] * {ranks})
    x, y = torch.ones(8, 4), torch.ones(8, 2)
    step(x, y)
    before = copy.deepcopy(net.state_dict())
    slow = True
    try:
        step(x, y)
    except KeyboardInterrupt:
        slow = False
        same = all(torch.equal(before[k], v) for k, v in net.state_dict().items())
        step(x, y)
        step.check_replicas()
        print("interrupted", same, step.steps, flush=True)
"""

INTERRUPTED_TWICE = r"""
    import os, threading, time, torch
    from mgpu_core import TrainStep, optim
    net = torch.nn.Linear(4, 2)
    slow = False
    def loss_fn(out, y):
        if slow:
            os.write(1, b"slow\n")
            time.sleep(1.5)
        return ((out - y) ** 2).mean()
    step = TrainStep(net, loss_fn, torch.optim.SGD(net.parameters(), lr=0.1), ["cpu"] * 2, workers="threads")
    x, y = torch.ones(8, 4), torch.ones(8, 2)
    step(x, y)
    slow = True
    try:
        step(x, y)
    except KeyboardInterrupt:
        slow = False
        try:
            step(x, y)
        except Exception as error:
            print(type(error).__name__, "step.rebuild()" in str(error), flush=True)
        time.sleep(2)
        step.rebuild()
        step(x, y)
        print("done", step.steps, flush=True)
"""


def lines_of(script, *seconds):
    """Return what the script prints, which gets Ctrl-C after so many seconds of its slow step, and again after more."""
    command = [sys.executable, "-P", "-c", textwrap.dedent(script)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "slow\n"
    for each in seconds:
        time.sleep(each)
        child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 0
    return out.splitlines()


@pytest.mark.slow
def test_ctrl_c_in_the_middle_of_a_step(ranks):
    assert lines_of(INTERRUPTED.format(ranks=ranks, seconds=1.0), 0.0)[-1] == "interrupted True 2"


@pytest.mark.slow
def test_ctrl_c_twice_breaks_the_step_but_says_so():
    assert lines_of(INTERRUPTED_TWICE, 0.2, 0.4)[-2:] == ["Error True", "done 2"]


def interrupt_updates(step):
    """Send Ctrl-C at the beginning of each update."""

    def interrupt(*_):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)

    step.optimizer.register_step_pre_hook(interrupt)


def test_ctrl_c_waits_for_the_end_of_the_update():
    net = Linear()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.5), cpu(2))
    interrupt_updates(step)
    before = net.last.weight.clone()
    with pytest.raises(KeyboardInterrupt):
        step(torch.ones(4, 3), torch.zeros(4, 2))
    assert step.steps == 1, "the update was made whole"
    assert not torch.equal(before, net.last.weight)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_behind_an_update_leaves_its_running_statistics():
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(2))
    step(torch.randn(8, 3), torch.zeros(8, 2))
    before = net[1].running_mean.clone()
    interrupt_updates(step)
    with pytest.raises(KeyboardInterrupt):
        step(torch.randn(8, 3), torch.zeros(8, 2))
    assert step.steps == 2
    assert net[1].num_batches_tracked == 2
    assert not torch.equal(net[1].running_mean, before)


def test_ctrl_c_at_the_guard_leaves_nobody_inside():
    """At each line after the guard, as the interpreter may run the handler between any two."""
    net = Linear()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.5), cpu(2))
    code = TrainStep.__call__.__wrapped__.__code__
    source, first = inspect.getsourcelines(code)
    guard = first + next(i for i, line in enumerate(source) if "with self._guard" in line)
    lines = sorted({line for _, _, line in code.co_lines() if line and line > guard})
    assert len(lines) >= 2
    for at in lines:

        def trace(frame, event, arg, at=at):
            def inside(frame, event, arg):
                if event == "line" and frame.f_lineno == at:
                    sys.settrace(None)
                    raise KeyboardInterrupt
                return inside

            return inside if frame.f_code is code else None

        before = sys.gettrace()
        sys.settrace(trace)
        with suppress(KeyboardInterrupt):
            step(torch.ones(4, 3), torch.zeros(4, 2))
        sys.settrace(before)
        step(torch.ones(4, 3), torch.zeros(4, 2))
    step.close()
