"""Settings, modules, losses and states that no step can have are refused, and nothing changes."""

import copy
import pickle
import threading

import pytest
import torch
from fakes.nets import cpu
from step.nets import Linear, assert_same, mse, state_of
from torch import nn
from torch.optim import SGD

from mgpu_core import DataParallel, TrainStep


def net_and(**settings):
    net = Linear()
    return TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(2), **settings)


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"reduction": "max"}, ValueError, "reduction must be one of mean, sum, weighted"),
        ({"accumulate": 0}, ValueError, "accumulate"),
        ({"accumulate": 1.5}, ValueError, "accumulate"),
        ({"clip_norm": -1.0}, ValueError, "clip_norm"),
        ({"clip_norm": float("nan")}, ValueError, "clip_norm"),
        ({"comm_dtype": torch.int8}, TypeError, "comm_dtype"),
        ({"algorithm": "magic"}, ValueError, "algorithm must be one of"),
        ({"shard": "yes"}, ValueError, 'shard must be None, "optimizer" or "parameters", not \'yes\''),
        ({"shard": True}, ValueError, 'shard must be None, "optimizer" or "parameters", not True'),
        ({"shares": [1]}, ValueError, "2 ranks, 1 shares"),
        ({"rng": "mine"}, ValueError, "rng"),
        ({"bucket_nbytes": 0}, ValueError, "bucket_nbytes"),
    ],
)
def test_settings_that_no_step_can_have(settings, error, text):
    with pytest.raises(error, match=text):
        net_and(**settings)


def test_an_optimizer_over_other_parameters():
    net, other = Linear(), Linear()
    with pytest.raises(ValueError, match=r"parameter 0 of the optimizer's group 0, of shape \(2, 3\), is not one of"):
        TrainStep(net, mse, SGD(other.parameters(), lr=0.1), cpu(2))
    with pytest.raises(TypeError, match="optimizer must be"):
        TrainStep(net, mse, 0.1, cpu(2))


def test_things_that_are_no_module_or_loss():
    net = Linear()
    optimizer = SGD(net.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"pass what it wraps, `net\.module`"):
        TrainStep(DataParallel(net, cpu(2)), mse, optimizer, cpu(2))
    with pytest.raises(TypeError, match="net must be"):
        TrainStep(mse, mse, optimizer, cpu(2))
    with pytest.raises(TypeError, match="loss_fn must be callable"):
        TrainStep(net, "mse", optimizer, cpu(2))
    with pytest.raises(ValueError, match="has parameters of its own"):
        TrainStep(net, nn.Linear(2, 1), optimizer, cpu(2))
    lazy = nn.LazyLinear(2)
    with pytest.raises(ValueError, match="uninitialized"):
        TrainStep(lazy, mse, SGD(lazy.parameters(), lr=0.1), cpu(2))


def test_inputs_that_do_not_fit():
    step = net_and()
    with pytest.raises(ValueError, match=r"inputs\[0\] has shape \(4, 3\).*target has shape \(5, 2\)"):
        step(torch.zeros(4, 3), torch.zeros(5, 2))
    with pytest.raises(TypeError, match="target as its last positional argument"):
        step()
    step(torch.zeros(4, 3), torch.zeros(4, 2))


def test_a_step_is_not_copied_or_saved():
    net = Linear()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(1))
    for call in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"save step\.state_dict\(\)"):
            call(step)


def test_settings_that_may_change_and_those_that_stay():
    step = net_and(clip_norm=2.0)
    before = step.accumulate, step.clip_norm, step.shares, step.optimizer
    for name, value in {"accumulate": 0, "clip_norm": -1.0, "shares": [1.0]}.items():
        with pytest.raises(ValueError, match=name):
            setattr(step, name, value)
    names = "module loss_fn optimizer team dim reduction amp_dtype comm_dtype bucket_nbytes algorithm"
    for name in [*names.split(), "shard", "rng", "capture"]:
        with pytest.raises(AttributeError, match=f"{name} of a step stays as it was given: make a new step"):
            setattr(step, name, getattr(step, name))
    assert (step.accumulate, step.clip_norm, step.shares, step.optimizer) == before
    for wrong in ("a", True, float("nan")):
        with pytest.raises(ValueError, match="clip_norm must be a positive number"):
            step.clip_norm = wrong
    step.error_if_nonfinite = None
    assert step.error_if_nonfinite is True  # on the CPU
    step.accumulate, step.clip_norm, step.error_if_nonfinite = 2, None, False
    assert (step.accumulate, step.clip_norm, step.error_if_nonfinite) == (2, None, False)
    with pytest.raises(AttributeError):
        step.loss_scale = 1.0


class Following(Linear):
    """Moves a copy of its weights in each forward."""

    def __init__(self):
        super().__init__()
        self.average = nn.Parameter(torch.zeros(2, 3), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            self.average.lerp_(self.last.weight, 0.5)
        return super().forward(x)


def test_a_forward_that_writes_a_parameter(ranks):
    """One rank alone may; several that share its memory would each do it, at the same time."""
    net = Following()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.5), cpu(ranks))
    batch = torch.ones(8, 3), torch.ones(8, 2)
    for call in (step, step.evaluate, step):
        if ranks == 1:
            call(*batch)
        else:
            with pytest.raises(RuntimeError, match=r"the forward of rank 0 writes parameter average in place"):
                call(*batch)
    assert step.steps == (2 if ranks == 1 else 0)


@pytest.mark.several_ranks
def test_an_embedding_that_renormalises_its_rows(ranks):
    net = nn.Embedding(4, 3, max_norm=0.1)
    step = TrainStep(net, lambda output, _: output.sum(), SGD(net.parameters(), lr=0.5), cpu(ranks), reduction="sum")
    with pytest.raises(RuntimeError, match="writes parameter weight in place"):
        step(torch.arange(4), torch.zeros(4))


def test_a_loss_without_a_gradient():
    net = Linear()
    step = TrainStep(net, lambda out, y: y.sum(), SGD(net.parameters(), lr=0.1), cpu(2))
    with pytest.raises(RuntimeError, match="does not depend on any parameter"):
        step(torch.zeros(4, 3), torch.zeros(4, 2))


@pytest.mark.parametrize("returned", [lambda loss: loss, lambda loss: (loss,), lambda loss: (loss, 1, 1)])
def test_a_weighted_loss_that_is_no_pair(returned):
    net = Linear()
    optimizer = SGD(net.parameters(), lr=0.1)
    step = TrainStep(net, lambda *pair: returned(mse(*pair)), optimizer, cpu(2), reduction="weighted")
    with pytest.raises(TypeError, match=r"needs \(sum, weight\)"):
        step(torch.zeros(4, 3), torch.zeros(4, 2))


def test_a_module_that_deepcopy_refuses():
    net = Linear()
    net.lock = threading.Lock()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(2))
    step(torch.zeros(4, 3), torch.ones(4, 2))
    assert step.steps == 1


@pytest.mark.parametrize("call", ["__call__", "evaluate", "check_loss", "flush", "rebuild", "state_dict", "close"])
def test_a_step_inside_a_step(call):
    net = Linear()
    steps = []
    batch = (torch.zeros(4, 3), torch.zeros(4, 2)) if call in ("__call__", "evaluate", "check_loss") else ()

    def loss_fn(output, target):
        getattr(steps[0], call)(*batch)

    steps.append(TrainStep(net, loss_fn, SGD(net.parameters(), lr=0.1), cpu(2)))
    with pytest.raises(RuntimeError, match="already running"):
        steps[0](torch.zeros(4, 3), torch.zeros(4, 2))


@pytest.mark.parametrize("wrong", [{}, {"format": "x"}, None])
def test_a_state_of_another_kind(wrong):
    with pytest.raises(ValueError, match="wanted a state with the mark"):
        net_and().load_state_dict(wrong)


def test_a_state_that_does_not_fit_changes_nothing():
    step = net_and()
    step(torch.ones(4, 3), torch.zeros(4, 2))
    before = state_of(step)
    for change, text in (
        (lambda s: s["module"].pop("last.weight"), "no last.weight"),
        (lambda s: s["module"].update(extra=torch.ones(1)), "has extra"),
        (lambda s: s["module"].update({"last.bias": torch.ones(7)}), r"last\.bias is \(7,\) in the state and \(2,\)"),
        (lambda s: s["optimizer"]["param_groups"][0]["params"].pop(), "groups of"),
    ):
        state = step.state_dict()
        change(state)
        with pytest.raises(ValueError, match=text):
            step.load_state_dict(state)
        assert_same(before, state_of(step))


def test_an_attribute_of_the_module_is_no_argument():
    net = Linear()
    net.dim = torch.tensor([1, 2])
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(2))
    step(torch.zeros(4, 3), torch.zeros(4, 2))
    assert step.steps == 1


def test_a_time_limit_that_is_none_is_told_and_the_step_goes_on(monkeypatch):
    net = Linear()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(2))
    monkeypatch.setenv("MGPU_CORE_TIMEOUT", "nonsense")
    with pytest.raises(ValueError, match="MGPU_CORE_TIMEOUT must be"):
        step(torch.zeros(4, 2), torch.zeros(4, 2))
    monkeypatch.delenv("MGPU_CORE_TIMEOUT")
    step(torch.zeros(4, 3), torch.zeros(4, 2))
    assert step.steps == 1
