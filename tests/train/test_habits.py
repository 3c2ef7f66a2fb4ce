"""What users do besides calling the step: old habits, edits, steps of their own, references everywhere."""

import copy
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import weakref
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fakes.nets import cpu
from mgpu_core.entries import Span
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook
from train.nets import RANKS, Branches, Linear, Pair, batches, mse

from mgpu_core import Replicate, SyncBatchNorm, TrainStep, convert_sync_batchnorm, optim, record
from mgpu_core.device.clock import RankClock
from mgpu_core.device.team import Team
from mgpu_core.train.forward_backward import any_has_graph


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=torch.tensor(0.1)), lambda p: AdamW(p, lr=torch.tensor(0.01))])
def test_a_learning_rate_in_a_tensor_follows_its_scheduler(make, ranks):
    torch.manual_seed(0)
    pair = Pair(Branches().double(), make, ranks)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (pair.optimizer, pair.reference)]
    for x, y in batches(5, 9):
        pair.both(x, 2, y)
        for each in schedules:
            each.step()
    assert pair.far() < 1e-6  # the tensor is float32


@pytest.mark.parametrize("make", [lambda p: AdamW(p, lr=0.01), lambda p: SGD(p, lr=0.05, momentum=0.9)])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_step_of_the_users_own_between_two(make, ranks):
    torch.manual_seed(0)
    pair = Pair(Branches().double(), make, ranks)
    for i, (x, y) in enumerate(batches(8, 9)):
        if i == 4:  # by hand, and with a layer that the steps had not used before
            for net, optimizer in ((pair.net, pair.optimizer), (pair.alone, pair.reference)):
                optimizer.zero_grad()
                mse(net(x, 2), y).backward()
                optimizer.step()
        else:
            pair.both(x, 0 if i < 4 else 2, y)
    assert pair.far() < 1e-9


@pytest.mark.parametrize("make", [lambda p: AdamW(p, lr=0.01), lambda p: SGD(p, lr=0.05, momentum=0.9)])
def test_a_state_that_was_cleared_begins_anew(make):
    torch.manual_seed(0)
    pair = Pair(Branches().double(), make, 2)
    for i, (x, y) in enumerate(batches(6, 9)):
        if i == 3:
            pair.optimizer.state.clear()
            pair.reference.state.clear()
        pair.both(x, 2, y)
    assert pair.far() < 1e-9
    assert len(pair.optimizer.state) == len(pair.reference.state)


def test_momentum_that_sleeps_through_a_rebuild():
    torch.manual_seed(0)
    pair = Pair(Branches().double(), lambda p: SGD(p, lr=0.05, momentum=0.9), 2)
    for i, (x, y) in enumerate(batches(9, 9)):
        for each in (pair.optimizer, pair.reference):
            each.param_groups[0]["momentum"] = 0.0 if 3 <= i < 6 else 0.9
        if i == 4:
            pair.step.rebuild()
        pair.both(x, 2, y)
    assert pair.far() < 1e-9


def test_parameters_that_change_their_group():
    torch.manual_seed(0)

    def make(net):
        first, last = list(net.first.parameters()), list(net.last.parameters())
        return SGD([{"params": first, "lr": 0.1}, {"params": last, "lr": 0.01}])

    net = Branches().double()
    alone = copy.deepcopy(net)
    optimizer, reference = make(net), make(alone)
    step = TrainStep(net, mse, optimizer, cpu(2))
    for i, (x, y) in enumerate(batches(6, 9)):
        if i == 3:
            for each in (optimizer, reference):
                one, other = each.param_groups
                one["params"], other["params"] = other["params"], one["params"]
        step(x, 0, y)
        reference.zero_grad()
        mse(alone(x, 0), y).backward()
        reference.step()
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(net.parameters(), alone.parameters(), strict=True))


@pytest.mark.parametrize("which", ["own", "all"])
def test_step_hooks_registered_later_are_called(which):
    net = Linear()
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    step = TrainStep(net, mse, optimizer, cpu(2))
    x, y = torch.ones(4, 3), torch.zeros(4, 2)
    step(x, y)
    calls = []
    register = optimizer.register_step_post_hook
    if which == "all":
        register = register_optimizer_step_post_hook
    handle = register(lambda *_: calls.append(1))
    try:
        step(x, y)
    finally:
        handle.remove()
    step(x, y)
    assert calls == [1]
    assert step._loop.optimizer_step.memory is not None


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_in_a_window_does_no_harm(ranks, to_none):
    torch.manual_seed(0)
    net, alone = Linear().double(), Linear().double()
    optimizer = SGD(net.parameters(), lr=0.1)
    step = TrainStep(net, mse, optimizer, cpu(ranks), accumulate=2)
    data = list(batches(2, [6, 6], columns=3))
    for x, y in data:
        optimizer.zero_grad(set_to_none=to_none)
        step(x, y)
    mse(alone(torch.cat([x for x, _ in data])), torch.cat([y for _, y in data])).backward()
    assert torch.allclose(net.last.weight.grad, alone.last.weight.grad)


def test_a_backward_of_the_users_own_is_no_business_of_ours():
    torch.manual_seed(0)
    net = Branches().double()
    alone = copy.deepcopy(net)
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.0), cpu(2), bucket_nbytes=1)
    for each in (net, alone):
        mse(each(torch.ones(2, 4).double(), 2), torch.zeros(2, 2).double()).backward()
    assert step._loop.reducer._ready == []
    ((x, y),) = batches(1, 8)
    step(x, 2, y)
    step(x, 1, y)
    alone.zero_grad()
    step.optimizer.zero_grad(set_to_none=False)
    for each in (net, alone):
        mse(each(x, 2), y).backward()
    for a, b in zip(net.parameters(), alone.parameters(), strict=True):
        assert b.grad is None or torch.allclose(a.grad, b.grad)


def test_one_rank_has_the_users_hooks_whenever_they_come():
    net, calls = Linear(), []
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.5), cpu(1))
    net.last.register_forward_hook(lambda *_: calls.append(1))
    step(torch.ones(4, 3), torch.ones(4, 2))
    assert calls == [1]


class Collector:
    def __init__(self):
        self.rows, self.lock = 0, threading.Lock()

    def hook(self, module, args, output):
        with self.lock:
            self.rows += len(output)

    __call__ = hook


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("way", ["method", "object", "partial"])
def test_a_hook_of_somebody_elses_sees_all_ranks(ranks, way):
    collector, net = Collector(), Linear()
    hooks = {"method": collector.hook, "object": collector, "partial": partial(Collector.hook, collector)}
    net.last.register_forward_hook(hooks[way])
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.5), cpu(ranks))
    step(torch.ones(8, 3), torch.ones(8, 2))
    assert collector.rows == 8


class Merging(nn.Linear):
    """Adds its low-rank part to its weights for as long as it evaluates."""

    def __init__(self):
        super().__init__(3, 2)
        self.weight.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(1, 3)), nn.Parameter(torch.randn(2, 1))
        self.merged = False

    def train(self, mode=True):
        super().train(mode)
        if self.merged == mode:
            self.weight.data += (-1 if mode else 1) * (self.up.data @ self.down.data)
            self.merged = not mode
        return self

    def forward(self, x):
        out = super().forward(x)
        return out if self.merged else out + x @ self.down.T @ self.up.T


@pytest.mark.parametrize("ranks", RANKS)
def test_a_module_whose_train_changes_more_than_its_mode(ranks):
    torch.manual_seed(0)
    net = nn.Sequential(Merging(), nn.Tanh())
    step = TrainStep(net, mse, SGD([net[0].down, net[0].up], lr=0.1), cpu(ranks))
    x, y = torch.randn(8, 3), torch.randn(8, 2)
    for _ in range(2):
        with torch.no_grad():
            expected = mse(net(x), y)
        assert torch.allclose(step(x, y), expected, atol=1e-6)
        net.eval()
        with torch.no_grad():
            expected = mse(net(x), y)
        assert torch.allclose(step.evaluate(x, y), expected, atol=1e-6)
        net.train()


def test_a_frozen_parameter_with_a_hook():
    net = Linear()
    net.last.weight.register_hook(lambda grad: grad * 2)
    net.last.weight.requires_grad_(False)
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(2))
    step(torch.ones(4, 3), torch.zeros(4, 2))
    assert net.last.weight.grad is None


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_mean_without_rows(ranks):
    net, alone = Linear(), Linear()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.0), cpu(ranks))
    x, y = torch.ones(4, 3), torch.zeros(4, 2)
    loss = step(Replicate(x), Replicate(y))
    wanted = mse(alone(x), y)
    wanted.backward()
    assert torch.allclose(loss, wanted.detach())
    assert torch.allclose(net.last.weight.grad, alone.last.weight.grad)


def test_weights_beyond_half_precision():
    net = nn.Linear(2, 2, bias=False).half()
    nn.init.ones_(net.weight)
    step = TrainStep(
        net, lambda o, y: (o.sum(), y.numel() * 50_000), SGD(net.parameters(), lr=0.0), cpu(2), reduction="weighted"
    )
    loss = step(torch.ones(4, 2).half() * 4, torch.ones(4))
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(4 * 2 * 2 * 4 / 200_000, rel=1e-2)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_inputs_with_a_graph_of_the_callers(ranks):
    torch.manual_seed(0)
    encoder, net = nn.Linear(3, 3).double(), Linear().double()
    other, alone = copy.deepcopy(encoder), copy.deepcopy(net)
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(ranks))
    ((x, y),) = batches(1, 6, columns=3)
    step(encoder(x), y)
    mse(alone(other(x)), y).backward()
    assert torch.allclose(encoder.weight.grad, other.weight.grad)
    assert torch.allclose(net.last.weight.grad, alone.last.weight.grad)


def test_optimizers_and_modes_that_no_step_can_have():
    net = Linear()
    with pytest.raises(TypeError, match="LBFGS"):
        TrainStep(net, mse, torch.optim.LBFGS(net.parameters()), cpu(2))
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(2))
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        step(torch.ones(4, 3), torch.zeros(4, 2))
    with torch.no_grad():
        step(torch.ones(4, 3), torch.zeros(4, 2))
    assert step.steps == 1


def test_expanded_buffers_do_not_hide_a_failure():
    class Net(Linear):
        def __init__(self):
            super().__init__()
            self.register_buffer("wide", torch.zeros(1).expand(4))

        def forward(self, x):
            raise KeyError("mine")

    net = Net()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(1))
    with pytest.raises(KeyError, match="mine"):
        step(torch.ones(4, 3), torch.zeros(4, 2))


# States.


def test_a_state_of_another_optimizer_changes_nothing():
    net, other = Linear(), Linear()
    step = TrainStep(net, mse, AdamW(net.parameters()), cpu(2))
    theirs = TrainStep(other, mse, SGD(other.parameters(), lr=0.5), cpu(2))
    for each in (step, theirs):
        each(torch.ones(4, 3), torch.zeros(4, 2))
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match="another optimizer than AdamW"):
        step.load_state_dict(theirs.state_dict())
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    step(torch.ones(4, 3), torch.zeros(4, 2))


def test_a_state_loaded_in_a_window_stays_when_the_next_call_fails():
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(2), accumulate=2)
    state = step.state_dict()
    state["module"]["0.running_mean"].fill_(7)
    step(torch.randn(4, 3), torch.zeros(4, 2))
    step.load_state_dict(state)
    with pytest.raises(ValueError, match="differ in their number of rows"):
        step(torch.randn(4, 3), torch.zeros(5, 2))
    assert net[0].running_mean.tolist() == [7, 7, 7]


# What is left behind.


def test_nothing_keeps_a_step_alive():
    net = Linear()
    step = TrainStep(net, mse, Adam(net.parameters()), cpu(2))
    optimizer = step.optimizer
    step(torch.ones(4, 3), torch.zeros(4, 2))
    net.trainer = step
    step.register_comm_hook(lambda bucket, of=step: None)
    gone = weakref.ref(step)
    del net, step
    gc.collect()
    assert gone() is None
    assert not optimizer._optimizer_load_state_dict_post_hooks


@pytest.mark.parametrize("make", [partial(optim.SGD, momentum=1.0), optim.Adam, optim.Lion])
def test_an_optimizer_that_loads_an_empty_state_starts_anew(make):
    net = Linear()
    optimizer = make(net.parameters(), lr=1.0)
    fresh, first = optimizer.state_dict(), [each.detach().clone() for each in net.parameters()]
    step = TrainStep(net, mse, optimizer, cpu(2))
    found = []
    for _ in range(2):
        with torch.no_grad():
            list(map(torch.Tensor.copy_, net.parameters(), first))
        optimizer.load_state_dict(fresh)
        step(torch.ones(4, 3), torch.zeros(4, 2))
        found.append(net.last.weight.detach().clone())
    assert torch.equal(*found)


@pytest.mark.parametrize("make", [SGD, optim.SGD])
def test_a_closed_step_leaves_the_optimizer_alone(make):
    net = Linear()
    optimizer = make(net.parameters(), lr=1.0)
    step = TrainStep(net, mse, optimizer, cpu(2))
    step(torch.ones(4, 3), torch.zeros(4, 2))
    step.close()
    assert not optimizer._optimizer_step_pre_hooks
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in net.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


@pytest.mark.parametrize("wrap", ["step", "drop-in"])
def test_synchronised_layers_leave_nothing(wrap):
    from mgpu_core import DataParallel

    net = nn.Sequential(nn.Linear(4, 4), SyncBatchNorm(4), nn.Linear(4, 2))
    outputs = []
    net[1].register_forward_hook(lambda module, args, out: outputs.append(weakref.ref(out)))
    x, y = torch.randn(8, 4), torch.zeros(8, 2)
    if wrap == "step":
        step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(2))
        run = lambda: step(x, y)  # noqa: E731
    else:
        model = DataParallel(net, cpu(2))
        run = lambda: mse(model(x), y).backward()  # noqa: E731
    for _ in range(3):
        run()
    gc.collect()
    assert len(outputs) >= 3
    assert all(each() is None for each in outputs)


def test_a_layer_with_two_names_is_converted_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.BatchNorm1d(2)
            self.b, self.inner = self.a, nn.Sequential(self.a)

    net = Twice()
    calls = []
    net.a.register_forward_hook(lambda *_: calls.append(1))
    convert_sync_batchnorm(net)
    assert isinstance(net.a, SyncBatchNorm)
    assert net.a is net.b is net.inner[0]
    net.a(torch.randn(3, 2))
    assert calls == [1]


def test_close_ends_the_threads_of_smaller_batches_too():
    teams = [Team.of(cpu(count)) for count in (5, 3, 2)]

    def threads():
        return {thread for team in teams for thread in team.workers.threads()}

    for team in teams:  # other tests have had them, too; of those a thread may still be at work
        team.close()
    before = threads()
    net = Linear()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(5))
    for count in (5, 3, 2):
        step(torch.ones(count, 3), torch.zeros(count, 2))
    mine = threads() - before
    assert len(mine) == 10
    step.close()
    until = time.monotonic() + 10
    while threads() & mine and time.monotonic() < until:
        time.sleep(0.01)
    assert not threads() & mine


def test_a_clock_that_was_not_stopped_says_nothing():
    clock = RankClock(torch.device("cpu"))
    assert clock.seconds() is None
    clock.start()
    assert clock.seconds() is None
    clock.stop()
    assert clock.seconds() > 0


def test_shares_survive_a_failure_and_few_rows():
    net = Linear()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(2), shares="auto")
    x, y = torch.ones(4, 3), torch.zeros(4, 2)
    step(x, y)
    with pytest.raises(RuntimeError):
        step(x[:, :2], y)
    step(x[:1], y[:1])
    for _ in range(12):
        step(x, y)
    assert sum(each.share for each in step.plan()) == pytest.approx(1)


SCRIPT = r"""
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


@pytest.mark.slow
def test_ctrl_c_twice_breaks_the_step_but_says_so():
    child = subprocess.Popen([sys.executable, "-P", "-c", textwrap.dedent(SCRIPT)], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "slow\n"
    time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    time.sleep(0.4)
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=60)
    assert out.splitlines()[-2:] == ["Error True", "done 2"]
    assert os.WEXITSTATUS(child.returncode) == 0


@pytest.mark.parametrize(("nbytes", "hooked"), [(10_000, False), (1, True)])
def test_backward_stops_for_python_only_where_there_are_buckets_to_send_early(nbytes, hooked):
    net = Linear()
    step = TrainStep(net, mse, torch.optim.SGD(net.parameters(), lr=1.0), cpu(2), bucket_nbytes=nbytes)
    for _ in range(2):
        step(torch.ones(4, 3), torch.ones(4, 2))
        net.last.bias.requires_grad_(not net.last.bias.requires_grad)  # frozen and thawed
        hooks = [bool(each._post_accumulate_grad_hooks) for each in net.parameters()]
        assert hooks == [hooked, hooked]


class InPlace(nn.Module):
    """Writes into its input, as a normalisation of images may."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2))

    def forward(self, x):
        return self.net(x.sub_(0.5).div_(2))


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_modules_that_write_into_their_input(ranks):
    net = InPlace()
    alone = copy.deepcopy(net)
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.0), cpu(ranks))
    x = torch.randn(16, 3)
    wanted = mse(alone(x.clone()), torch.zeros(16, 2))
    for _ in range(50):  # the ranks write at once
        assert torch.allclose(step(x.clone(), torch.zeros(16, 2)), wanted)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_target_that_is_no_tensor_goes_to_every_rank(ranks):
    net = Linear()
    target = np.zeros((2, 3))
    seen = []
    step = TrainStep(net, lambda output, given: (seen.append(given), output.sum())[1], SGD(net.parameters(), lr=0.0),
                     cpu(ranks))  # fmt: skip
    for _ in range(2):  # the first call is checked, by calls of the loss on all rows
        seen.clear()
        step(torch.ones(6, 3), target)
    assert len(seen) == ranks
    assert all(each is target for each in seen)


def test_an_interrupt_behind_an_update_leaves_its_running_statistics(monkeypatch):
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(2))
    step(torch.randn(8, 3), torch.zeros(8, 2))
    prepare = step._loop.optimizer_step.prepare

    def interrupted(*update):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        return prepare(*update)

    before = net[1].running_mean.clone()
    monkeypatch.setattr(step._loop.optimizer_step, "prepare", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step(torch.randn(8, 3), torch.zeros(8, 2))
    assert step.steps == 2
    assert net[1].num_batches_tracked == 2
    assert not torch.equal(net[1].running_mean, before)


def test_a_hook_changes_between_updates():
    net = Linear()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(2), accumulate=2)
    step(torch.ones(4, 3), torch.zeros(4, 2))
    with pytest.raises(RuntimeError, match="between updates"):
        step.register_comm_hook(print)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("make", [SGD, optim.SGD])
def test_a_left_over_step_of_the_optimizer_is_told_of(make, ranks):
    net = Linear()
    optimizer = make(net.parameters(), lr=0.1)
    step = TrainStep(net, mse, optimizer, cpu(ranks))
    x, y = torch.ones(4, 3), torch.ones(4, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            step(x, y)
            optimizer.zero_grad()
            mse(net(x), y).backward()  # a step of the user's own
            optimizer.step()
            step(x, y)
    with pytest.warns(UserWarning, match=r"optimizer\.step\(\) after a TrainStep's call updates a second time") as told:
        optimizer.step()
    assert [each.filename for each in told] == [__file__]
    step.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_a_left_over_backward_is_torchs_error():
    net = Linear()
    step = TrainStep(net, mse, optim.SGD(net.parameters(), lr=0.1), cpu(2))
    with pytest.raises(RuntimeError, match="does not require grad"):
        step(torch.ones(4, 3), torch.ones(4, 2)).backward()


@pytest.mark.parametrize("wants", [False, True])
@pytest.mark.parametrize("nested", [lambda x: ((x,), {}), lambda x: (([x],), {}), lambda x: ((), {"x": x})])
def test_inputs_of_a_graph_are_found_in_any_nest(nested, wants):
    inputs, kwargs = nested(torch.ones(2, requires_grad=wants))
    assert any_has_graph([None, SimpleNamespace(inputs=inputs, kwargs=kwargs)]) == wants


def test_a_recording_names_the_optimizers_kernel():
    net = Linear()
    step = TrainStep(net, mse, optim.SGD(net.parameters(), lr=0.1), cpu(2))
    with record.recording() as story:
        step(torch.ones(4, 3), torch.zeros(4, 2))
    assert [each.step for each in story.entries if isinstance(each, Span) and "sgd" in each.step] == ["sgd"]
