"""Mixed precision: autocast in the ranks, a loss scale that adapts, updates that all ranks skip at once."""

import warnings

import pytest
import torch
from fakes.nets import cpu
from step.nets import Linear, mse
from torch import nn
from torch.optim import SGD, AdamW

from mgpu_core import TrainStep, optim
from mgpu_core.step.grad_scaler import INITIAL, LossScale


class Watch(Linear):
    def __init__(self):
        super().__init__()
        self.dtypes = []

    def forward(self, x):
        out = super().forward(x)
        self.dtypes.append(out.dtype)
        return out


class _Look(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.append(torch.is_autocast_enabled("cpu"))
        return grad, None


@pytest.mark.parametrize("workers", ["threads", "caller"])
@pytest.mark.parametrize("loss_on", ["ranks", "gathered"])
def test_a_backward_runs_without_autocast(ranks, loss_on, workers):
    class Seen(Linear):
        def forward(self, x):
            return _Look.apply(super().forward(x), seen)

    net, seen = Seen(), []
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.5), cpu(ranks), loss_on=loss_on, workers=workers)
    with torch.autocast("cpu", torch.bfloat16):
        step(torch.ones(8, 3), torch.zeros(8, 2))
    assert seen == [False] * ranks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_forwards_compute_in_half_and_parameters_stay_whole(dtype, ranks):
    net = Watch()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.5), cpu(ranks), amp_dtype=dtype)
    while step.steps == 0:  # the first scales are too large for float16, and are skipped
        loss = step(torch.ones(24, 3), torch.zeros(24, 2))
    assert net.dtypes[-ranks:] == [dtype] * ranks
    assert loss.dtype == torch.float32
    assert net.last.weight.dtype == net.last.weight.grad.dtype == torch.float32
    # Small whole numbers are exact in half precision, the scale is a power of two and leaves no trace.
    alone = Linear()
    mse(alone(torch.ones(6, 3)), torch.zeros(6, 2)).backward()
    assert torch.allclose(net.last.weight.grad, alone.last.weight.grad, rtol=1e-2)


def test_an_overflow_on_one_rank_skips_the_update_of_all(ranks):
    net = nn.Linear(1, 1, bias=False)
    nn.init.ones_(net.weight)
    step = TrainStep(net, lambda o, y: (o * y).sum(), AdamW(net.parameters()), cpu(ranks), reduction="sum",
                     amp_dtype=torch.float16)  # fmt: skip
    x, y = torch.ones(ranks, 1), torch.full((ranks, 1), 0.5)
    step(x, y)
    assert torch.equal(net.weight.grad, torch.full((1, 1), ranks / 2))
    before, state = net.weight.clone(), float(step.optimizer.state[net.weight]["step"])
    y[-1] = 3.0  # 65536 * 3 is more than float16 holds
    step(x, y)
    assert step.loss_scale.scale == INITIAL / 2
    assert (step.loss_scale.skipped, step.steps) == (1, 1)
    assert torch.equal(before, net.weight)
    assert net.weight.grad is None
    assert float(step.optimizer.state[net.weight]["step"]) == state
    step(x, x / 8)
    assert not torch.equal(before, net.weight)


def test_the_scale_grows_and_is_resumed():
    scale = LossScale(torch.float16)
    for _ in range(1999):
        scale.went_well()
    assert scale.scale == INITIAL
    other = LossScale(torch.float16)
    other.load_state_dict(scale.state_dict())
    other.went_well()
    assert other.scale == 2 * INITIAL
    assert LossScale(torch.bfloat16).scale == 1


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_state_without_a_scale_begins_with_a_new_one(dtype):
    net = Linear()
    whole, half = (
        TrainStep(net, mse, SGD(net.parameters(), lr=0.5), cpu(2), amp_dtype=each) for each in (dtype, torch.float16)
    )
    state = whole.state_dict()
    half.load_state_dict(state)
    assert half.loss_scale.scale == INITIAL
    half.loss_scale.overflowed()
    kept = half.state_dict()
    whole.load_state_dict(kept)
    assert whole.loss_scale.scale == 1
    half.load_state_dict(state)
    half.load_state_dict(kept)
    assert (half.loss_scale.scale, half.loss_scale.skipped) == (INITIAL / 2, 1)


def test_a_loss_that_is_nan_ends_in_an_error():
    net = Linear()
    step = TrainStep(net, lambda o, y: (o * y).sum(), SGD(net.parameters(), lr=0.1), cpu(2), reduction="sum",
                     amp_dtype=torch.float16)  # fmt: skip
    before = net.last.weight.clone()
    x, y = torch.ones(4, 3), torch.full((4, 2), float("nan"))
    for _ in range(17):
        step(x, y)
    assert step.loss_scale.scale == 0.5
    with pytest.raises(FloatingPointError, match=r"not finite at a loss scale of 0\.5"):
        step(x, y)
    assert torch.equal(before, net.last.weight)
    assert step.steps == 0


def test_other_dtypes_are_refused():
    net = Linear()
    with pytest.raises(TypeError, match=r"amp_dtype must be torch\.bfloat16 or torch\.float16, not torch\.float32"):
        TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(2), amp_dtype=torch.float32)


@pytest.mark.parametrize("clip_norm", [None, 0.25])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_ours_scale_in_the_kernel_as_torch_before_it(name, ranks, clip_norm):
    torch.manual_seed(0)
    ends = []
    for module in (torch.optim, optim):
        net = Linear().double()
        nn.init.constant_(net.last.weight, 0.5)
        nn.init.zeros_(net.last.bias)
        make = getattr(module, name)
        step = TrainStep(net, mse, make(net.parameters(), lr=0.1), cpu(ranks), amp_dtype=torch.float16,
                         clip_norm=clip_norm)  # fmt: skip
        for rows in (8, 5, 8, 3) * 4:
            step(torch.ones(rows, 3).double(), torch.zeros(rows, 2).double())
        assert (getattr(step.optimizer, "flat", None) is not None) == (module is optim)
        ends.append((step.steps, step.loss_scale.scale, [each.detach() for each in net.parameters()]))
    assert ends[0][:2] == ends[1][:2]
    for one, other in zip(*(each[2] for each in ends), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "count"), [(torch.float16, 1), (torch.bfloat16, 0), (None, 0)])
def test_float16_on_cpus_is_said_to_be_slow(dtype, count):
    net = Linear().cpu()
    with warnings.catch_warnings(record=True, action="always") as caught:
        TrainStep(net, mse, SGD(net.parameters(), lr=1), ["cpu"] * 2, amp_dtype=dtype)
    assert [str(each.message) for each in caught] == [
        "float16 is slow on CPUs, most of which emulate it: use bfloat16"
    ] * count
