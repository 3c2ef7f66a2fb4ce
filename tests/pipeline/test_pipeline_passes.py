"""TrainStep over a pipeline: the numbers of the whole net after many steps, with every option that makes sense."""

import copy
import gc
import re
import warnings
import weakref

import pytest
import torch
from fakes.nets import cpu
from fakes.stacks import STACKS, Gpt, loss_fn, mse, resnet
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from mgpu_core import Pipeline, TrainStep, optim
from mgpu_core.pipeline.visits import Visit

OPTIMIZERS = {
    "torch": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "ours": lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def differing(net, reference, tolerance=1e-6):
    """The names of parameters that are not equal but for the order of sums."""
    pairs = zip(net.named_parameters(), reference.parameters(), strict=True)
    return [
        name for (name, own), other in pairs if not torch.allclose(own.cpu(), other.cpu(), rtol=tolerance, atol=1e-12)
    ]


def steps(name, stages, optimizer="torch", options=None, **more):
    """A step over a pipeline, one over the whole net on a device, and the batch."""
    stack = STACKS[name]
    net, options = stack.net(), options or {}
    whole, make = copy.deepcopy(net).to(cpu(1)[0]), OPTIMIZERS[optimizer]
    pipeline = Pipeline(net, cpu(stages), split_points=stack.points(stages), **more)
    piped = TrainStep(pipeline, loss_fn, make(pipeline.parameters()), **options)
    alone = TrainStep(whole, loss_fn, make(whole.parameters()), cpu(1), **options)
    return piped, alone, (stack.x.to(cpu(1)[0]), stack.target.to(cpu(1)[0]))


FEW = [(2, 3, "1f1b", "never"), (3, 8, "1f1b", "always"), (3, 3, "gpipe", "never")]
MANY = [
    pytest.param(stages, chunks, schedule, checkpoint, marks=pytest.mark.slow)
    for stages in (1, 2, 3, 4)
    for chunks in (1, 3, 8)
    for schedule in ("1f1b", "gpipe")
    for checkpoint in ("never", "except_last", "always")
    if (stages, chunks, schedule, checkpoint) not in FEW
]


@pytest.mark.parametrize(("stages", "chunks", "schedule", "checkpoint"), FEW + MANY)
@pytest.mark.parametrize("name", STACKS)
def test_twenty_steps_are_those_of_the_whole_net(name, stages, chunks, schedule, checkpoint):
    piped, alone, batch = steps(name, stages, chunks=chunks, schedule=schedule, checkpoint=checkpoint)
    for _ in range(20):
        loss, outputs = piped(*batch, return_outputs=True)
        wanted, whole = alone(*batch, return_outputs=True)
        assert float(loss) == pytest.approx(float(wanted), rel=1e-6)
    first, second = (each["logits"] if name == "lstm" else each for each in (outputs, whole))
    assert torch.allclose(first.cpu(), second.cpu(), rtol=1e-6)
    assert differing(piped.module, alone.module) == []
    assert float(piped.evaluate(*batch)) == pytest.approx(float(alone.evaluate(*batch)), rel=1e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "options", [{"accumulate": 3}, {"clip_norm": 0.05}, {"clip_norm": 0.05, "accumulate": 2}, {"workers": "caller"}]
)
def test_options_of_the_update_mean_the_same(optimizer, options):
    piped, alone, (x, target) = steps("gpt", 3, optimizer, options, chunks=3)
    for rows in (8, 5, 8, 3, 8, 7):
        loss = piped(x[:rows], target[:rows])
        assert float(loss) == pytest.approx(float(alone(x[:rows], target[:rows])), rel=1e-6)
    assert piped.flush() == alone.flush()
    assert piped.steps == alone.steps
    assert differing(piped.module, alone.module) == []


def test_weighted_losses_are_those_of_all_rows():
    def weighted(output, target):
        keep = target != 3
        return nn.functional.cross_entropy(output[keep], target[keep], reduction="sum"), keep.sum()

    stack = STACKS["gpt"]
    nets = [stack.net(), stack.net().to(cpu(1)[0])]
    pipeline = Pipeline(nets[0], cpu(2), split_points=["blocks.2"], chunks=3)
    found = []
    for net, devices in ((pipeline, None), (nets[1], cpu(1))):
        step = TrainStep(net, weighted, torch.optim.SGD(net.parameters(), lr=0.1), devices, reduction="weighted")
        x, target = stack.x.to(cpu(1)[0]), stack.target.to(cpu(1)[0])
        found.append([float(step(x, target)) for _ in range(4)])
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert differing(pipeline, nets[1]) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_runs_inside_the_stages(dtype):
    seen = []

    class Spy(nn.Linear):
        def forward(self, x):
            output = super().forward(x)
            seen.append(output.dtype)
            return output

    net = Pipeline([Spy(4, 4), Spy(4, 4)], cpu(2), chunks=2)
    step = TrainStep(net, mse, torch.optim.SGD(net.parameters(), lr=0.1), amp_dtype=dtype)
    x = torch.ones(4, 4, device=cpu(1)[0])
    losses = [float(step(x, x)) for _ in range(3)]
    assert set(seen) == {dtype}
    assert losses[0] > losses[2]
    assert step.steps == 3


def test_a_state_loads_into_a_step_of_the_whole_net_and_back():
    piped, alone, batch = steps("gpt", 3, "ours", chunks=2)
    for _ in range(2):
        piped(*batch)
    alone.load_state_dict(piped.state_dict())
    for _ in range(2):
        assert float(piped(*batch)) == pytest.approx(float(alone(*batch)), rel=1e-6)
    piped.load_state_dict(alone.state_dict())
    assert differing(piped.module, alone.module, 0) == []
    assert piped.steps == alone.steps == 4


class Failing(nn.Module):
    """Fails, if it is told to, in the fourth micro-batch of a call."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.fails, self.calls = kind, False, 0

    def forward(self, x):
        self.calls += 1
        if self.fails and self.calls % 4 == 0:
            if self.kind == "forward":
                self.fail()
            x.register_hook(self.fail)
        return x * 1

    def fail(self, *_):
        raise KeyError("told to")


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_stage_that_fails_leaves_everything_as_it_was(kind):
    failing = Failing(kind)
    parts = [nn.Linear(2, 2), failing, nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))]
    net = Pipeline(parts, cpu(3), chunks=4)
    step = TrainStep(net, mse, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    x = torch.rand(8, 2, device=cpu(1)[0])
    step(x, x)
    failing.fails = True
    before = copy.deepcopy(step.state_dict())
    with pytest.raises(KeyError, match=f"in stage 1, micro-batch 3, on device {net.device_ids[1]}"):
        step(x, x)
    after = step.state_dict()
    assert all(torch.equal(before["module"][name], each) for name, each in after["module"].items())
    assert step.steps == 1
    failing.fails = False
    step(x, x)
    assert step.steps == 2


class Held(torch.autograd.Function):
    """The identity; its graph holds as many bytes as the input has numbers between forward and backward."""

    @staticmethod
    def forward(ctx, x, live):
        memory = torch.empty(x.numel(), dtype=torch.uint8, device="cpu")
        live.append((memory.nbytes, StorageWeakRef(memory.untyped_storage())))
        ctx.save_for_backward(memory)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        assert ctx.saved_tensors
        return grad, None


class Holding(nn.Module):
    """Notes the most bytes that were alive at once."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.live, self.most = [], 0

    def forward(self, x):
        output = Held.apply(x * self.weight, self.live)
        self.most = max(self.most, sum(nbytes for nbytes, memory in self.live if not memory.expired()))
        return output


@pytest.mark.parametrize(
    ("schedule", "checkpoint", "wanted"),
    [("1f1b", "never", [3, 2, 1]), ("gpipe", "never", [8, 8, 8]), ("1f1b", "always", [0, 0, 0])],
)
def test_memory_of_micro_batches_in_flight(schedule, checkpoint, wanted):
    parts = [Holding() for _ in range(3)]
    net = Pipeline(parts, cpu(3), chunks=8, schedule=schedule, checkpoint=checkpoint)
    step = TrainStep(net, mse, torch.optim.SGD(net.parameters(), lr=0.1))
    x = torch.ones(8, 100, device=cpu(1)[0])
    for _ in range(2):
        step(x, x)
    assert [part.most for part in parts] == [100 * count for count in wanted]


def test_a_step_is_made_anew_from_a_changed_net():
    x = torch.rand(8, 2, dtype=torch.float64, device=cpu(1)[0])
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).double()
    pipeline = Pipeline(net, cpu(2), chunks=2)
    step = TrainStep(pipeline, mse, torch.optim.SGD(net.parameters(), lr=0.1))
    step(x, x)
    net[1] = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)).double().to(cpu(2)[1])
    step.optimizer.param_groups[0]["params"] = list(net.parameters())
    step.rebuild()
    whole = copy.deepcopy(net).to(cpu(1)[0])
    alone = TrainStep(whole, mse, torch.optim.SGD(whole.parameters(), lr=0.1), cpu(1))
    assert float(step(x, x)) == pytest.approx(float(alone(x, x)), rel=1e-9)
    assert differing(pipeline, whole) == []


@pytest.mark.parametrize("devices", [[cpu(2), cpu(2)], [cpu(2)], cpu(3), cpu(4), [cpu(2), "cpu"]], ids=str)
def test_a_step_runs_on_the_devices_of_its_pipeline_alone(devices):
    net = Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], cpu(2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    own = re.escape(str(list(map(str, net.device_ids))))
    with pytest.raises(ValueError, match=f"the pipeline's own devices, {own}, or left out: a step makes no copies"):
        TrainStep(net, mse, optimizer, devices)
    assert TrainStep(net, mse, optimizer, cpu(2)).team.devices == (net.device_ids[-1],)


def test_layers_that_share_a_weight_run_again_without_a_warning():
    """The graph of the first call is gone when the update moves the weights."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mid, self.head = nn.Embedding(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.mid(self.embed(x)))

    net = Tied()
    pipe = Pipeline(net, cpu(2), split_points=["head"], chunks=2, checkpoint="always")
    step = TrainStep(pipe, nn.functional.cross_entropy, optim.SGD(net.parameters(), 0.1))
    x = torch.arange(4, device=cpu(1)[0])
    with warnings.catch_warnings(action="error"):
        step(x, x)


def test_a_loss_that_compares_rows_is_warned_of():
    net = Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], cpu(2), chunks=2)
    step = TrainStep(net, lambda output, target: output.std(), torch.optim.SGD(net.parameters(), lr=0.1))
    x = torch.rand(8, 2, device=cpu(1)[0])
    with pytest.warns(UserWarning, match="rows"):
        step(x, x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capture": True}, "capture"),
        ({"static_graph": True}, "static_graph"),
        ({"shard": "optimizer"}, "shard"),
        ({"loss_on": "gathered"}, "gathered"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(options, message):
    net = Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], cpu(2))
    with pytest.raises(ValueError, match=message):
        TrainStep(net, mse, torch.optim.SGD(net.parameters(), lr=0.1), **options)


def test_an_input_with_a_graph_is_refused():
    net = Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], cpu(2))
    step = TrainStep(net, mse, torch.optim.SGD(net.parameters(), lr=0.1))
    x = torch.ones(4, 2, device=cpu(1)[0])
    with pytest.raises(ValueError, match="requires grad"):
        step(x.clone().requires_grad_(), x)


def test_deferred_statistics_are_put_back_after_a_failure():
    net = Pipeline([nn.BatchNorm1d(2), nn.Linear(2, 2)], cpu(2), chunks=2, deferred_batch_norm=True)
    step = TrainStep(net, mse, torch.optim.SGD(net.parameters(), lr=0.1))
    x = torch.rand(4, 2, device=cpu(1)[0])
    with pytest.raises(RuntimeError):
        step(x, x.new_zeros(4, 5))
    assert int(net.module[0].num_batches_tracked) == 0
    step(x, x)
    assert int(net.module[0].num_batches_tracked) == 1


def test_a_resnet_with_deferred_statistics_trains_as_micro_batch_by_micro_batch():
    torch.manual_seed(0)
    net = resnet().double()
    whole = copy.deepcopy(net).to(cpu(1)[0])
    x = torch.rand(6, 3, 32, 32, dtype=torch.float64, device=cpu(1)[0])
    target = torch.arange(6, device=cpu(1)[0]) % 4
    pipeline = Pipeline(net, cpu(3), split_points=["layer2", "layer4"], chunks=3, deferred_batch_norm=True)
    step = TrainStep(pipeline, nn.CrossEntropyLoss(), torch.optim.SGD(pipeline.parameters(), lr=0.01))
    step(x, target)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.01)
    for part, labels in zip(x.split(2), target.split(2), strict=True):
        (nn.functional.cross_entropy(whole(part), labels) / 3).backward()
    optimizer.step()
    assert differing(pipeline, whole) == []
    assert int(net.bn1.num_batches_tracked) == 1


def test_dropout_is_reproducible():
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        net = Pipeline(Gpt(dropout=0.2), cpu(3), split_points=["blocks.1", "head"], chunks=4)
        step = TrainStep(net, loss_fn, torch.optim.SGD(net.parameters(), lr=0.1))
        x, target = (each.to(cpu(1)[0]) for each in STACKS["gpt"][1:3])
        found.append([float(step(x, target)) for _ in range(3)])
    assert found[0] == found[1]


@pytest.mark.parametrize("rows", [1, 3, 5, 8])
def test_fewer_rows_make_fewer_micro_batches(rows):
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh()).double()
    whole = copy.deepcopy(net).to(cpu(1)[0])
    pipeline = Pipeline(net, cpu(2), split_points=["1"], chunks=4)
    step = TrainStep(pipeline, mse, torch.optim.SGD(net.parameters(), lr=0.1))
    x = torch.rand(rows, 2, dtype=torch.float64, device=cpu(1)[0])
    alone = TrainStep(whole, mse, torch.optim.SGD(whole.parameters(), lr=0.1), cpu(1))
    assert float(step(x, x)) == pytest.approx(float(alone(x, x)), rel=1e-12)
    assert differing(net, whole) == []


@pytest.mark.parametrize("in_a_step", [True, False])
def test_a_call_leaves_no_cycles(in_a_step):
    net = Pipeline([nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)], cpu(3), chunks=4)
    step = TrainStep(net, mse, torch.optim.SGD(net.parameters(), lr=0.1), workers="threads")
    x = torch.rand(8, 2, device=cpu(1)[0])
    calls = [lambda: step(x, x), lambda: net(x).sum().backward()]
    calls[not in_a_step]()
    gc.collect()
    gc.disable()
    try:
        before = sum(isinstance(each, Visit) for each in gc.get_objects())
        calls[not in_a_step]()
        assert sum(isinstance(each, Visit) for each in gc.get_objects()) == before
    finally:
        gc.enable()


def test_the_last_stage_keeps_one_output():
    live, most = [], []

    def loss_fn(output, target):
        live.append(weakref.ref(output))
        most.append(sum(each() is not None for each in live))
        return mse(output, target)

    net = Pipeline([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)], cpu(3), chunks=8)
    step = TrainStep(net, loss_fn, torch.optim.SGD(net.parameters(), lr=0.1), workers="threads")
    x = torch.rand(8, 2, device=cpu(1)[0])
    for _ in range(3):  # the first one checks the loss, too
        step(x, x)
    assert most[-8:] == [1] * 8
