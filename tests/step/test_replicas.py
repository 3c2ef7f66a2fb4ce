"""Parameters that are frozen, or another step's: they take no room in the buckets, and stay where they are."""

import copy
from types import SimpleNamespace

import pytest
import torch
from fakes.graphs import give_graphs, without_gpu
from fakes.nets import cpu
from fakes.traces import buckets, traced
from step.adversaries import Adversaries
from step.nets import Branches, Constrained, Linear, Pair, batches, here, mse
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from mgpu_core import TrainStep, optim
from mgpu_core.step.forward_backward import any_has_graph
from mgpu_core.trace import tracer
from mgpu_core.trace.events import Span


def adamw(parameters):
    return AdamW(parameters, lr=0.01)


def summed(ranks, net, call):
    """The names of the parameters whose gradients the call sums; one rank alone has them where they are."""
    trace = traced(call)
    if ranks == 1:
        return {name for name, each in net.named_parameters() if each.grad is not None}
    return {name for names in buckets(trace) for name in names}


def frozen_body():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)).double()
    net[0].requires_grad_(False)
    return net


def assert_equal_through_a_thaw(pair, at):
    """Of the body, before step number ``at`` of twice as many."""
    for i, (x, y) in enumerate(batches(2 * at, 9)):
        for each in (pair.net, pair.alone):
            each[0].requires_grad_(i >= at)
        pair.both(x, y)
        assert pair.far() < 1e-12


@pytest.mark.parametrize("is_known", [True, False])
def test_what_is_frozen_takes_no_room(ranks, is_known):
    """A body of a million weights that is frozen is neither moved nor summed, whether the optimizer has it or not."""
    net = frozen_body()
    pair = Pair(net, lambda p: adamw([each for each in p if is_known or each.requires_grad]), ranks)
    memory, seen = net[0].weight.data_ptr(), set()
    net[0].register_forward_hook(lambda module, *_: seen.add(module.weight.data_ptr()))
    for batch in batches(4, 9):
        assert summed(ranks, net, lambda batch=batch: pair.both(*batch)) == {"1.weight", "1.bias"}
    assert pair.far() < 1e-12
    assert pair.same_gradients()
    assert seen == {net[0].weight.data_ptr()} == {memory}


def test_what_is_frozen_when_others_are_thawed(ranks):
    """The new layout does not hold it, and it gets memory of its own."""
    torch.manual_seed(0)
    net = Branches().double()
    net.second.requires_grad_(False)
    pair = Pair(net, adamw, ranks)
    for i, (x, y) in enumerate(batches(9, 8)):
        if i in (3, 6):
            for each in (pair.net, pair.alone):
                each.first.requires_grad_(i == 6)
                each.second.requires_grad_(True)
        found = summed(ranks, net, lambda x=x, y=y: pair.both(x, 2, y))
        assert pair.far() < 1e-12
    assert found >= {"first.weight", "second.weight"}


def call(pair, x, y):
    """One call of a window, in the step and alone."""
    pair.step(x, 2, y)
    (mse(pair.alone(x, 2), y) / pair.step.accumulate).backward()


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_is_thawed_is_laid_out_then(ranks, is_known, accumulate):
    """Also between two calls that accumulate."""
    torch.manual_seed(0)
    net = Branches().double()
    net.second.requires_grad_(False)
    pair = Pair(net, lambda p: adamw([q for q in p if is_known or q.requires_grad]), ranks, accumulate=accumulate)
    for i, (x, y) in enumerate(batches(12, 8)):
        if i == 5:
            for each, of in ((pair.net, pair.optimizer), (pair.alone, pair.reference)):
                each.second.requires_grad_(True)
                if not is_known:
                    of.add_param_group({"params": list(each.second.parameters()), "lr": 0.1})
        found = summed(ranks, net, lambda x=x, y=y: call(pair, x, y))
        if i % accumulate == accumulate - 1:
            pair.reference.step()
            pair.reference.zero_grad()
            assert ("second.weight" in found) == (i >= 5)
    assert pair.far() < 1e-12


@pytest.mark.parametrize("make", [adamw, lambda p: SGD(p, lr=0.1, momentum=0.9)])
def test_the_last_group_may_be_frozen(ranks, make):
    def groups(parameters):
        body, body_bias, head, head_bias = parameters
        return make([{"params": [head, head_bias]}, {"params": [body, body_bias]}])

    assert_equal_through_a_thaw(Pair(frozen_body(), groups, ranks), at=3)


class Buffered(torch.optim.Optimizer):
    """Its state is views of one buffer, which it keeps besides."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})
        self.flat = torch.zeros(100, dtype=torch.float64)

    @torch.no_grad()
    def step(self):
        begin = 0
        self.flat.mul_(0.9)
        for group in self.param_groups:
            for p in group["params"]:
                view = self.flat[begin : begin + p.numel()].view(p.shape)
                begin += p.numel()
                if p.grad is not None:
                    self.state[p].setdefault("m", view).add_(p.grad)
                    p.sub_(self.state[p]["m"], alpha=group["lr"])


def test_an_optimizers_own_state_stays_its_own(ranks):
    assert_equal_through_a_thaw(Pair(frozen_body(), Buffered, ranks), at=4)


def test_a_state_of_an_own_optimizer_is_loaded_twice():
    """Torch adds a number to the defaults of the optimizer when it loads, which no group of the state has."""
    net = Linear()
    step = TrainStep(net, mse, Buffered(net.parameters()), cpu(2))
    step(here(torch.ones(4, 3)), here(torch.zeros(4, 2)))
    state = step.state_dict()
    for _ in range(2):
        step.load_state_dict(state)
    assert step.steps == 1


@pytest.mark.parametrize("is_first", [True, False])
def test_what_is_frozen_between_two_calls_has_its_gradient(ranks, is_first):
    """Of the call before; also where the first update, or another parameter, makes another layout necessary."""
    torch.manual_seed(0)
    of_second = (2, 3)
    pair = Pair(
        Branches().double(), lambda p: adamw([q for i, q in enumerate(p) if i not in of_second]), ranks, accumulate=2
    )
    for i, (x, y) in enumerate(batches(6, 8)):
        call(pair, x, y)
        if i == (0 if is_first else 2):
            for each, of in ((pair.net, pair.optimizer), (pair.alone, pair.reference)):
                each.first.requires_grad_(False)
                of.add_param_group({"params": list(each.second.parameters()), "lr": 0.1})
        if i % 2:
            pair.reference.step()
            for a, b in zip(pair.net.parameters(), pair.alone.parameters(), strict=True):
                assert (a.grad is None) == (b.grad is None)
                assert a.grad is None or torch.allclose(a.grad, b.grad, atol=1e-12)
            pair.alone.zero_grad()
    assert pair.far() < 1e-12


def test_the_state_of_what_is_frozen_stays():
    """It was trained before, its state came with a checkpoint, and it may be trained again."""
    torch.manual_seed(0)
    pair = Pair(Branches().double(), adamw, 2)
    for phase in range(3):
        for net in (pair.net, pair.alone):
            net.first.requires_grad_(phase != 1)
        pair.step.rebuild()
        for x, y in batches(3, 8, seed=phase):
            found = summed(2, pair.net, lambda x=x, y=y: pair.both(x, 2, y))
        assert ("first.weight" in found) == (phase != 1)
        one, other = (each.state_dict()["state"] for each in (pair.optimizer, pair.reference))
        assert one.keys() == other.keys()
        assert all(torch.allclose(one[i][kind], each) for i in one for kind, each in other[i].items())
    assert pair.far() < 1e-12


@pytest.mark.parametrize("freezes", [True, False])
def test_two_steps_share_a_net(ranks, freezes):
    both = Adversaries(cpu(ranks), freezes)
    assert all(both.round(seed) for seed in range(5))
    memory = [each.data_ptr() for each in both.judge.parameters()]
    both.making.close()
    assert [each.data_ptr() for each in both.judge.parameters()] == memory  # they are the other step's
    both.judging.rebuild()
    both.making = TrainStep(both.making.module, both.making.loss_fn, both.making.optimizer, cpu(ranks))
    assert all(both.round(seed) for seed in range(5, 8))


def test_one_parameter_for_two_optimizers(ranks):
    """Each has it in memory of its own, and takes its values back from the other's."""
    torch.manual_seed(0)
    net = Linear().double()
    alone = copy.deepcopy(net)
    steps = [TrainStep(net, mse, SGD(net.parameters(), lr=lr, momentum=0.9), cpu(ranks)) for lr in (0.1, 0.2)]
    references = [SGD(alone.parameters(), lr=lr, momentum=0.9) for lr in (0.1, 0.2)]
    for i, (x, y) in enumerate(batches(6, 9, columns=3)):
        steps[i % 2](x, y)
        references[i % 2].zero_grad()
        mse(alone(x), y).backward()
        references[i % 2].step()
        assert torch.allclose(net.last.weight, alone.last.weight, rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", [adamw, lambda p: SGD(p, lr=0.05, momentum=0.9)])
def test_a_parameter_leaves_the_optimizer_and_comes_back(make, ranks):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 2)).double()
    pair = Pair(net, lambda p: make(list(p)[:4]), ranks)
    for i, (x, y) in enumerate(batches(10, 9)):
        for each, optimizer in ((pair.net, pair.optimizer), (pair.alone, pair.reference)):
            group = optimizer.param_groups[0]["params"]
            if i == 2:
                del group[2]
            if i == 4:  # which is laid out anew
                optimizer.add_param_group({"params": list(each[2].parameters())})
            if i == 7:
                group.append(each[1].weight)
        pair.both(x, y)
        assert pair.far() < 1e-12
        assert pair.same_state()
    pair.step.check_replicas()


@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=0.5, momentum=0.9), lambda p: Adam(p, lr=0.1)])
def test_a_forward_that_puts_a_parameter_elsewhere(make, ranks):
    torch.manual_seed(0)
    pair = Pair(Constrained().double(), make, ranks)
    for x, y in batches(6, [12, 1, 7]):
        loss, wanted = pair.both(x, y)
        assert abs(loss - wanted) < 1e-9
        assert pair.far() < 1e-9
        weight = pair.net.first.weight
        assert weight.untyped_storage().nbytes() == weight.nbytes
    pair.step.check_replicas()
    assert pair.same_state()


def test_it_is_put_back_where_the_step_fails(ranks):
    torch.manual_seed(0)
    pair = Pair(Constrained().double(), lambda p: SGD(p, lr=0.5), ranks)
    for i, (x, y) in enumerate(batches(6, 8)):
        pair.net.fails = i == 3
        for call in (pair.step, pair.step.evaluate) if i == 3 else ():
            with pytest.raises(ValueError, match="as asked"):
                call(x, y)
        pair.net.fails = False
        if i == 3:
            weight = pair.net.first.weight
            assert weight.untyped_storage().nbytes() == weight.nbytes
        pair.both(x, y)
        assert pair.far() < 1e-9
        pair.step.evaluate(x, y)


@pytest.mark.parametrize("other", [torch.ones(1, 1), torch.ones(1, dtype=torch.float64)])
def test_one_of_another_shape(other):
    class Growing(Linear):
        def __init__(self):
            super().__init__()
            self.scale, self.grows = nn.Parameter(torch.ones(1)), False

        def forward(self, x):
            if self.grows:
                self.scale.data = other
            return super().forward(x) * self.scale

    net = Growing()
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.5), cpu(2))
    batch = torch.ones(4, 3), torch.ones(4, 2)
    step(*batch)
    net.grows = True
    with pytest.raises(RuntimeError, match=r"scale was given another shape, dtype or device.*step\.rebuild\(\)"):
        step(*batch)
    assert step.steps == 1
    net.grows = False
    net.scale.data = torch.ones(1)
    step(*batch)
    assert step.steps == 2


def test_such_a_step_is_no_graph(monkeypatch):
    give_graphs(monkeypatch, "cpu")
    torch.manual_seed(0)
    pair = Pair(Constrained().double(), lambda p: optim.SGD(p, lr=0.5), 2, capture=True, error_if_nonfinite=False)
    without_gpu(pair.step)
    with pytest.warns(UserWarning, match="not captured: recording it failed .*gives a parameter other memory"):
        distances = [pair.both(x, y) and pair.far() for x, y in batches(8, 8)]
    assert max(distances) < 1e-9
    assert pair.step.graphs.replays == 0


class Lazy(Linear):
    """Makes a buffer when it is first needed, as rotary embeddings and masks do."""

    def forward(self, x):
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.full((3,), 2.0, dtype=x.dtype), persistent=False)
        return super().forward(x * self.scale)


@pytest.mark.parametrize("how", ["whole", "few rows first", "alone first"])
def test_buffers_that_a_forward_makes(ranks, how):
    torch.manual_seed(0)
    pair = Pair(Lazy().double(), lambda p: SGD(p, lr=0.1), ranks)
    if how == "alone first":
        pair.net(torch.ones(2, 3, dtype=torch.float64))
    for x, y in batches(4, [1 if how == "few rows first" else 16, 16], columns=3):
        pair.both(x, y)
        assert pair.far() < 1e-9
    assert "scale" not in pair.net.state_dict()


class Wrapper(Optimizer):
    """As accelerate's and timm's Lookahead: an optimizer without what torch's constructor makes."""

    def __init__(self, inner):
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    def step(self, closure=None):
        self.inner.step()


def test_an_optimizer_around_another_one(ranks):
    torch.manual_seed(0)
    pair = Pair(Linear().double(), lambda p: Wrapper(Adam(p, lr=0.1)), ranks)
    for x, y in batches(4, 8, columns=3):
        pair.both(x, y)
        assert pair.far() < 1e-9
    assert pair.same_state()


def test_each_parameter_has_a_storage_of_its_own():
    """Savers such as safetensors' know tensors by their storage: of those that share one they write the first."""
    net = nn.Sequential(nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last), nn.Flatten(), nn.Linear(12, 2))
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.1), cpu(2))
    step(torch.ones(4, 2, 4, 4), torch.ones(4, 2))
    storages = [each.untyped_storage() for each in net.parameters()]
    assert len({each.data_ptr() for each in storages}) == len(storages)
    assert [each.nbytes() for each in storages] == [each.nbytes for each in net.parameters()]
    addresses = sorted(each.data_ptr() for each in storages)
    assert addresses[-1] - addresses[0] < 2048, "parts of one whole, aligned to 512 bytes"
    weight = net[0].weight.detach()
    expected = weight.clone()
    del step, net, storages
    assert torch.equal(weight, expected)  # the whole lives for as long as a part of it


@pytest.mark.parametrize("wants", [False, True])
@pytest.mark.parametrize("nested", [lambda x: ((x,), {}), lambda x: (([x],), {}), lambda x: ((), {"x": x})])
def test_inputs_of_a_graph_are_found_in_any_nest(nested, wants):
    inputs, kwargs = nested(torch.ones(2, requires_grad=wants))
    assert (
        any_has_graph([SimpleNamespace(inputs=(), kwargs={}), SimpleNamespace(inputs=inputs, kwargs=kwargs)]) == wants
    )


def test_a_trace_names_the_optimizers_kernel():
    net = Linear()
    step = TrainStep(net, mse, optim.SGD(net.parameters(), lr=0.1), cpu(2))
    with tracer.tracing() as buffer:
        step(torch.ones(4, 3), torch.zeros(4, 2))
    assert [each.step for each in buffer.events if isinstance(each, Span) and "sgd" in each.step] == ["sgd"]
