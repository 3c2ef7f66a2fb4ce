"""Arguments and stages that cannot work: a clear error, nothing half done, and the pipeline goes on."""

import copy
import os
import signal
import threading
import time

import pytest
import torch
from fakes.nets import cpu
from fakes.stacks import STACKS, Mlp, mse
from torch import nn

from mgpu_core import Pipeline, TrainStep


def x(rows=4, width=2):
    return torch.rand(rows, width, device=cpu(1)[0])


def layers(count):
    return [nn.Linear(2, 2) for _ in range(count)]


@pytest.mark.parametrize(
    ("stages", "options", "message"),
    [
        (nn.Sequential(*layers(2)), {}, "3 parts are more than the 2 layers"),
        (layers(2), {}, "one module per device"),
        (layers(3), {"split_points": ["1", "2"]}, "no split_points"),
        (layers(3), {"chunks": 0}, "chunks"),
        (layers(3), {"chunks": True}, "chunks"),
        (layers(3), {"schedule": "zigzag"}, "schedule must be one of 1f1b, gpipe"),
        (layers(3), {"checkpoint": "sometimes"}, "checkpoint"),
        (layers(3), {"rng": "mine"}, "rng"),
        (STACKS["lstm"].make(), {"memory": [1, 1, 1]}, "no cut into 3 parts keeps to memory"),
        (STACKS["lstm"].make(), {"shares": [1, 1]}, "shares must be 3 positive numbers"),
        (STACKS["lstm"].make(), {"memory": [1]}, "memory must be 3 numbers"),
        (layers(3), {"memory": [1, 1, 1]}, "for a cut that is found"),
        (Mlp(), {"split_points": ["2"]}, "need 2 split points"),
        (Mlp(), {"split_points": ["2", "nothing"]}, "no module of Mlp"),
        (Mlp(), {"split_points": ["4", "2"]}, "'4' is called after '2'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_anything_moves(stages, options, message):
    with pytest.raises(ValueError, match=message):
        Pipeline(stages, cpu(3), **options)
    if isinstance(stages, nn.Module):
        assert {each.device for each in stages.parameters()} == {torch.zeros(0).device}


@pytest.mark.parametrize("devices", [["cuda:0", "cuda:1"], [0, 97], ["cpu", "cuda:97"]])
def test_devices_that_do_not_exist(devices):
    if torch.cuda.is_available() and devices[1] == "cuda:1":
        pytest.skip("they may exist here")
    with pytest.raises(ValueError):
        Pipeline(layers(2), devices)


class Decides(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = layers(2)
        self.never = nn.Linear(2, 2)

    def forward(self, x):
        x = self.first(x)
        if x.sum() > 0:
            x = x + 1
        return self.last(x)


def test_code_may_decide_by_values_and_pass_a_stage():
    decides = Decides()
    whole, batch = copy.deepcopy(decides).to(cpu(1)[0]), x()
    net = Pipeline(decides, cpu(3), split_points=["last", "never"], chunks=1)
    steps = [
        TrainStep(each, mse, torch.optim.SGD(each.parameters(), lr=0.1), devices)
        for each, devices in ((net, None), (whole, cpu(1)))
    ]
    for _ in range(3):
        assert float(steps[0](batch, batch)) == pytest.approx(float(steps[1](batch, batch)), rel=1e-5)
    assert net.never.weight.grad is None


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_batch_normalisation_in_two_stages_is_updated_in_the_order_of_the_calls(schedule):
    norm = nn.BatchNorm1d(2)
    whole, batch = copy.deepcopy(nn.Sequential(norm, norm)).to(cpu(1)[0]), x()
    net = Pipeline([norm, norm], cpu(2), chunks=1, schedule=schedule)
    assert torch.allclose(net(batch).to(batch.device), whole(batch))
    assert torch.allclose(norm.running_var.to(batch.device), whole[0].running_var)


def test_a_module_in_two_stages_stays_one():
    shared = nn.Linear(2, 2)
    whole = copy.deepcopy(nn.Sequential(shared, nn.Tanh(), shared)).to(cpu(1)[0])
    net, batch = Pipeline([shared, nn.Tanh(), shared], cpu(3), chunks=2), x()
    steps = [
        TrainStep(each, mse, torch.optim.SGD(each.parameters(), lr=0.1), devices)
        for each, devices in ((net, None), (whole, cpu(1)))
    ]
    for _ in range(3):
        assert float(steps[0](batch, batch)) == pytest.approx(float(steps[1](batch, batch)), rel=1e-5)
    assert len(list(net.parameters())) == 2


@pytest.mark.parametrize("in_a_step", [True, False])
def test_a_stage_may_write_into_its_input(in_a_step):
    parts = [nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 2)]
    whole, batch = copy.deepcopy(nn.Sequential(*parts)).to(cpu(1)[0]), x()
    net = Pipeline(parts, cpu(3), chunks=2)
    if in_a_step:
        step = TrainStep(net, mse, torch.optim.SGD(net.parameters(), lr=0.0))
        step(batch, batch)
    else:
        mse(net(batch), batch.to(net.device_ids[-1])).backward()
    mse(whole(batch), batch).backward()
    for own, wanted in zip(net.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(own.grad.to(batch.device), wanted.grad)


def test_a_step_without_anything_to_train_is_refused():
    net = Pipeline([nn.Linear(2, 2), nn.Identity()], cpu(2))
    step = TrainStep(net, mse, torch.optim.SGD(net.parameters(), lr=0.1))
    net.requires_grad_(False)
    with pytest.raises(RuntimeError, match="does not depend on any parameter"):
        step(x(), x())


def test_a_stage_without_parameters_whose_input_needs_no_gradient():
    net = Pipeline([nn.Identity(), nn.Tanh(), nn.Linear(2, 2)], cpu(3), chunks=2)
    step = TrainStep(net, mse, torch.optim.SGD(net.parameters(), lr=0.1))
    batch = x()
    assert float(step(batch, batch)) > float(step(batch, batch))


def test_rows_that_disagree_are_refused():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Identity(), nn.Identity()

        def forward(self, a, b):
            return self.last(self.first(a) + b)

    net = Pipeline(Two(), cpu(2), split_points=["last"], chunks=2)
    with pytest.raises(ValueError, match=r"inputs\[0\].*inputs\[1\]"):
        net(x(4), x(3))


@pytest.mark.parametrize("move", [lambda net: net.to("cpu"), lambda net: net.cpu(), lambda net: net.cuda()])
def test_moving_all_parts_to_one_device_is_refused(move):
    net = Pipeline(layers(2), cpu(2))
    with pytest.raises(RuntimeError, match="several devices"):
        move(net)
    assert next(net.double().parameters()).dtype is torch.float64


class Full(nn.Module):
    def __init__(self):
        super().__init__()
        self.is_full = True

    def forward(self, x):
        if self.is_full:
            raise torch.OutOfMemoryError("no memory left")
        return x


@pytest.mark.parametrize("in_a_step", [True, False])
def test_a_stage_out_of_memory_says_so_and_the_pipeline_goes_on(in_a_step):
    full = Full()
    net = Pipeline([nn.Linear(2, 2), full, nn.Linear(2, 2)], cpu(3), chunks=4)
    step = TrainStep(net, mse, torch.optim.SGD(net.parameters(), lr=0.1))
    call = (lambda: step(x(), x())) if in_a_step else (lambda: net(x()))
    with pytest.raises(torch.OutOfMemoryError, match=r"stage 1, micro-batch 0, on device(.|\n)*no memory left"):
        call()
    full.is_full = False
    call()


@pytest.mark.parametrize("in_a_step", [True, False])
def test_ctrl_c_stops_all_stages_and_the_pipeline_goes_on(in_a_step):
    started, inside = threading.Event(), []

    class Slow(nn.Module):
        is_slow = True

        def forward(self, x):
            if self.is_slow:
                inside.append(1)
                started.set()
                time.sleep(0.3)
                inside.pop()
            return x

    slow = Slow()
    net = Pipeline([nn.Linear(2, 2), slow], cpu(2), chunks=8)
    step = TrainStep(net, mse, torch.optim.SGD(net.parameters(), lr=0.1), workers="threads")
    before = {name: each.clone() for name, each in net.state_dict().items()}
    interrupt = threading.Thread(target=lambda: (started.wait(60), os.kill(os.getpid(), signal.SIGINT)))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        step(x(8), x(8)) if in_a_step else net(x(8))
    interrupt.join()
    assert not inside
    assert all(torch.equal(before[name], each) for name, each in net.state_dict().items())
    slow.is_slow = False
    step(x(8), x(8))
    assert net(x(8)).shape == (8, 2)


def test_a_stage_that_waits_for_ever_ends_at_the_time_limit(monkeypatch):
    monkeypatch.setenv("MGPU_CORE_TIMEOUT", "0.5")
    released = threading.Event()

    class Stuck(nn.Module):
        def forward(self, x):
            released.wait(20)
            return x

    net = Pipeline([nn.Identity(), Stuck()], cpu(2), chunks=2)
    with pytest.raises(Exception, match=r"0\.5 s"):
        net(x())
    released.set()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_forty_micro_batches(schedule):
    net = Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], cpu(2), chunks=40, schedule=schedule)
    step = TrainStep(net, mse, torch.optim.SGD(net.parameters(), lr=0.1), workers="threads")
    batch = x(80)
    assert float(step(batch, batch)) > float(step(batch, batch))
