"""Several processes train as one device with all their rows does: SGD and AdamW, every reduction, ragged rows."""

import copy

import pytest
import torch
from fakes import accelerator
from fakes.nets import whole
from processes.fragile import values_of
from processes.world import run
from step.nets import Branches, Linear, batches, mse
from torch import nn
from torch.distributed import group
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

from mgpu_core import TrainStep

pytestmark = pytest.mark.processes

OPTIMIZERS = {
    "momentum": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: AdamW(parameters, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
}


def step_of(net, loss_fn, optimizer, ranks=2, **settings):
    return TrainStep(net, loss_fn, optimizer, ["cpu"] * ranks, process_group=group.WORLD, **settings)


def far(one, other):
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def rows_of(process, processes, tensor):
    """A process's part of a batch: the first has more where they cannot be equal."""
    return torch.tensor_split(tensor, processes)[process]


def branches():
    torch.manual_seed(5)
    return Branches().double()


def train_branches(process, processes, name, ranks, rows, settings):
    torch.manual_seed(process)  # each its own: the values of process 0 are taken
    net = branches() if process == 0 else Branches().double()
    optimizer = OPTIMIZERS[name](net.parameters())
    step = step_of(net, mse, optimizer, ranks, bucket_nbytes=200, **settings)
    for i, (x, y) in enumerate(batches(30, rows)):
        way = i % 3 if i < 15 else (i + process) % 3  # later the processes use other branches
        step(rows_of(process, processes, x), way, rows_of(process, processes, y))
    step.check_replicas()
    return values_of(net), [each.grad is None for each in net.parameters()], step.steps


def train_alone(processes, name, rows, accumulate=1, clip_norm=None):
    net = branches()
    optimizer = OPTIMIZERS[name](net.parameters())
    for i, (x, y) in enumerate(batches(30, rows)):
        if i % accumulate == 0:
            optimizer.zero_grad()
            total = sum(len(each) for each, _ in list(batches(30, rows))[i : i + accumulate])
        for process in range(processes):
            way = i % 3 if i < 15 else (i + process) % 3
            part, wanted = rows_of(process, processes, x), rows_of(process, processes, y)
            if len(part):
                (mse(net(part, way), wanted) * (len(part) / total)).backward()
        if (i + 1) % accumulate == 0:
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
            optimizer.step()
    return values_of(net)


@pytest.mark.parametrize("rows", [12, [12, 7, 9, 5]], ids=["even", "ragged"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_one_device(name, rows):
    found = run(train_branches, 2, name, 2, rows, {})
    alone = train_alone(2, name, rows)
    assert far(found[0][0], alone) < 1e-9
    for values, without_grad, steps in found:
        assert all(map(torch.equal, values, found[0][0]))
        assert without_grad == found[0][1]
        assert steps == 30
    assert found[0][1] == [False, False, False, False, True, True, False, False]  # `rare` is used by nobody


def test_three_processes_of_one_rank():
    found = run(train_branches, 3, "momentum", 1, [12, 7, 9, 5], {}, processes=3)
    assert far(found[0][0], train_alone(3, "momentum", [12, 7, 9, 5])) < 1e-9
    assert all(all(map(torch.equal, values, found[0][0])) for values, _, _ in found)


def test_accumulated_and_clipped():
    settings = {"accumulate": 3, "clip_norm": 0.5}
    found = run(train_branches, 2, "momentum", 2, [12, 7, 9, 5], settings)
    assert far(found[0][0], train_alone(2, "momentum", [12, 7, 9, 5], **settings)) < 1e-9
    assert found[1][2] == 10


class Twice(nn.Module):
    """A layer in two checkpoints, whose gradients come twice."""

    def __init__(self):
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = torch.tanh(checkpoint(self.shared, x, use_reentrant=True))
        return self.last(x)


def train_windows(process, processes, makes_twice, counts):
    """Two calls for an update, the last ones with fewer rows than ranks."""
    torch.manual_seed(3)
    net = (Twice() if makes_twice else nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))).double()
    alone = copy.deepcopy(net)
    step = step_of(net, mse, SGD(net.parameters(), lr=0.1), 3, accumulate=2, bucket_nbytes=1, workers="caller")
    optimizer = SGD(alone.parameters(), lr=0.1)
    rows = [sum(counts[i : i + 2]) for i in range(0, len(counts), 2)]
    for i, count in enumerate(counts):
        x, y = torch.randn(count * processes, 4).double(), torch.randn(count * processes, 1).double()
        step(rows_of(process, processes, x), rows_of(process, processes, y))
        (mse(alone(x), y) * (count / rows[i // 2])).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    return far(values_of(net), values_of(alone))


@pytest.mark.parametrize("makes_twice", [False, True])
def test_windows_whose_last_call_has_fewer_rows_than_ranks(makes_twice):
    assert max(run(train_windows, 2, makes_twice, (6, 6, 6, 2, 3, 1))) < 1e-12


def reduced(process, reduction):
    """Whole numbers: two updates, exact."""
    net = whole(nn.Linear(3, 2)).double()

    def loss_fn(output, target):
        wrong = (output - target) ** 2 * (target > -2)
        return (wrong.sum(), (target > -2).sum()) if reduction == "weighted" else wrong.sum()

    step = step_of(net, loss_fn, SGD(net.parameters(), lr=1.0), reduction=reduction)
    x = torch.arange(24.0, dtype=torch.float64).reshape(8, 3) % 5 - 2
    y = torch.arange(16.0, dtype=torch.float64).reshape(8, 2) % 7 - 3
    losses = [float(step(x[:5], y[:5])) if process == 0 else float(step(x[5:], y[5:])) for _ in range(2)]
    return values_of(net), losses


@pytest.mark.parametrize("reduction", ["sum", "weighted"])
def test_sums_and_weights_over_all_processes(reduction):
    found = run(reduced, reduction)
    net = whole(nn.Linear(3, 2)).double()
    x = torch.arange(24.0, dtype=torch.float64).reshape(8, 3) % 5 - 2
    y = torch.arange(16.0, dtype=torch.float64).reshape(8, 2) % 7 - 3
    optimizer = SGD(net.parameters(), lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        wrong = (net(x) - y) ** 2 * (y > -2)
        (wrong.sum() / ((y > -2).sum() if reduction == "weighted" else 1)).backward()
        optimizer.step()
    alone = values_of(net)
    for values, _ in found:
        assert far(values, alone) <= (1e-9 * float(alone[0].abs().max()) if reduction == "weighted" else 0)


class Order(nn.Module):
    """Three layers whose gradients come in the other order where it is told so."""

    def __init__(self, is_turned):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(3))
        self.is_turned = is_turned
        whole(self)

    def forward(self, x):
        for layer in reversed(self.layers) if self.is_turned else self.layers:
            x = layer(x)
        return x


def train_in_another_order(process):
    net = Order(is_turned=process == 1).double()
    step = step_of(net, lambda output, target: (output * target).sum(), SGD(net.parameters(), lr=1 / 64),
                   reduction="sum", bucket_nbytes=1)  # fmt: skip
    for i in range(3):
        step(torch.full((4, 3), i % 2 + 1.0).double(), torch.ones(4, 3).double())
    return values_of(net)


def test_buckets_that_become_ready_in_another_order_do_not_mix():
    found = run(train_in_another_order)
    nets = [Order(is_turned).double() for is_turned in (False, True)]
    for i in range(3):
        for net in nets:
            net.zero_grad()
            net(torch.full((4, 3), i % 2 + 1.0).double()).sum().backward()
        with torch.no_grad():
            for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
                a -= (a.grad + b.grad) / 64
                b.copy_(a)
    for values in found:
        assert far(values, values_of(nets[0])) < 1e-9
        assert all(map(torch.equal, values, found[0]))


def train_mixed(process, dtype):
    """With whole numbers of 8 bits beside the weights, which nobody trains."""
    net = Linear()
    net.scale = nn.Parameter(torch.ones(4, dtype=torch.int8), requires_grad=False)
    if dtype is not None:
        net.to(dtype)
    step = step_of(net, lambda output, target: (output * target).sum(), SGD(net.parameters(), lr=1.0), reduction="sum")
    for _ in range(2):
        step(torch.full((2, 3), float(process + 1), dtype=dtype), torch.ones(2, 2, dtype=dtype))
    return [each.float() for each in values_of(net)]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
def test_every_dtype(dtype):
    found = run(train_mixed, dtype)
    weights = whole(Linear()).last.weight.detach() - 2 * (2 * 1 + 2 * 2)
    for _, values, _ in found:
        assert torch.equal(values, weights)


def train_narrow(process):
    net = Linear()
    step = step_of(
        net, lambda output, target: (output * target).sum(), SGD(net.parameters(), lr=1.0), reduction="sum",
        comm_dtype=torch.bfloat16,
    )  # fmt: skip
    for _ in range(2):
        step(torch.full((2, 3), 1 + 2**-12 if process == 0 else 4.0), torch.ones(2, 2))
    return values_of(net)


def test_messages_in_another_dtype():
    found = run(train_narrow)
    weights = whole(Linear()).last.weight.detach() - 2 * (2 * 1 + 2 * 4)  # what was more than 1 is lost on the way
    for values in found:
        assert torch.equal(values[0], weights)


def two_layers_alone(rows):
    """What one device has after two updates of two layers by rows of these numbers."""
    net = whole(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    x = torch.tensor(rows).unsqueeze(1).expand(len(rows), 3)
    for _ in range(2):
        net.zero_grad()
        net(x).sum().backward()
        with torch.no_grad():
            for each in net.parameters():
                each -= each.grad
    return values_of(net)


def overflow(process):
    net = whole(nn.Linear(2, 1))
    optimizer = SGD(net.parameters(), lr=1.0)
    step = step_of(net, lambda output, target: (output.float() * target).sum(), optimizer, 1, reduction="sum",
                   amp_dtype=torch.float16, error_if_nonfinite=False)  # fmt: skip
    scales, before = [], values_of(net)
    step(torch.ones(2, 2), torch.full((2, 1), 1e30 if process == 1 else 1.0))
    scales.append(step.loss_scale.scale)
    kept = all(map(torch.equal, values_of(net), before))
    step(torch.ones(2, 2), torch.full((2, 1), 0.25))
    return kept, [*scales, step.loss_scale.scale], step.steps, values_of(net)


def test_an_overflow_in_one_process_skips_the_update_of_all():
    found = run(overflow)
    for kept, scales, steps, values in found:
        assert kept
        assert scales == [2.0**15, 2.0**15]
        assert steps == 1
        assert all(map(torch.equal, values, found[0][3]))


def resume(process, state):
    net = Branches().double()
    step = step_of(net, mse, OPTIMIZERS["adamw"](net.parameters()))
    if state is not None:
        step.load_state_dict(state)
    for x, y in batches(4, 9, seed=0 if state is None else 1):
        step(rows_of(process, 2, x), 2, rows_of(process, 2, y))
    return step.state_dict()


def test_a_state_goes_on_in_another_number_of_processes():
    saved = run(resume, None)[0]
    found = run(resume, saved)
    net = branches()
    alone = TrainStep(net, mse, OPTIMIZERS["adamw"](net.parameters()), ["cpu"] * 3)
    alone.load_state_dict(copy.deepcopy(saved))
    for x, y in batches(4, 9, seed=1):
        alone(x, 2, y)
    for state in found:
        assert state["steps"] == alone.steps == 8
        assert far(list(state["module"].values()), list(net.state_dict().values())) < 1e-9


def call_no_hook(process):
    net, seen = whole(Linear()), []
    step = step_of(net, mse, SGD(net.parameters(), lr=1.0))
    step.register_comm_hook(seen.append)
    step(torch.ones(2, 3), torch.ones(2, 2))
    return seen


def test_a_hook_is_not_called_for_the_sums_over_processes():
    assert run(call_no_hook) == [[], []]


def train_unevenly(process, ranks):
    net = branches()
    step = step_of(net, mse, OPTIMIZERS["momentum"](net.parameters()), ranks)
    x, y = next(iter(batches(1, 11)))
    rows = slice(0, 7) if process == 0 else slice(7, 11)
    for _ in range(3):
        step(x[rows], 2, y[rows])
    return values_of(net)


@pytest.mark.parametrize("ranks", [1, 2])
def test_seven_rows_and_four(ranks):
    net = branches()
    optimizer = OPTIMIZERS["momentum"](net.parameters())
    x, y = next(iter(batches(1, 11)))
    for _ in range(3):
        optimizer.zero_grad()
        mse(net(x, 2), y).backward()
        optimizer.step()
    for values in run(train_unevenly, ranks):
        assert far(values, values_of(net)) < 1e-15


def evaluate(process):
    net = Linear()
    step = step_of(net, mse, SGD(net.parameters(), lr=1.0))
    return float(step.evaluate(torch.full((2, 3), float(process)), torch.zeros(2, 2)))


def test_evaluation_is_each_process_s_own():
    net = Linear()
    with torch.no_grad():
        wanted = [float(mse(net(torch.full((2, 3), float(process))), torch.zeros(2, 2))) for process in range(2)]
    assert run(evaluate) == wanted


def train_on_two_devices(process, is_hooked):
    """A hook sums over the devices of a process, and never over the processes."""
    accelerator.register()
    net = whole(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    optimizer = SGD(net.parameters(), lr=1.0)
    step = TrainStep(
        net, lambda output, target: (output * target).sum(), optimizer, ["cpu", "fake:0", "fake:0"], reduction="sum",
        process_group=group.WORLD, bucket_nbytes=1,
    )  # fmt: skip

    def hook(bucket):
        total = sum(each.cpu() for each in bucket.tensors)
        for each in bucket.tensors:
            each.copy_(total)

    step.register_comm_hook(hook if is_hooked else None)
    for _ in range(2):
        step(torch.full((3, 3), float(process + 1)), torch.ones(3, 2))
    step.check_replicas()
    return values_of(net)


@pytest.mark.timeout(900)  # the first run compiles
@pytest.mark.parametrize("is_hooked", [False, True])
def test_sums_reach_every_device_of_every_process(is_hooked):
    if reason := accelerator.what_is_missing():
        pytest.skip(reason)
    accelerator.compile_before()
    found = run(train_on_two_devices, is_hooked)
    wanted = two_layers_alone([1.0, 1.0, 1.0, 2.0, 2.0, 2.0])
    for values in found:
        assert all(map(torch.equal, values, wanted))
