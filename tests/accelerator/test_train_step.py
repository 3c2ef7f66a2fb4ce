"""What a TrainStep does between devices: sums, values that travel, twins of an optimizer."""

import copy
import gc

import pytest
import torch
from fakes.tensors import numbers
from fakes.traces import buckets, traced
from step.adversaries import Adversaries
from step.nets import Branches, Constrained, Linear, Pair, batches, mse
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

from mgpu_core import Error, TrainStep, comm

FAKES = ["fake:0", "fake:1", "fake:2"]
TEAMS = [FAKES, ["fake:0", "fake:1", "fake:0"], ["fake:0", "cpu"], ["fake:1", "fake:1", "fake:3", "cpu", "fake:3"]]


def adamw(parameters):
    return AdamW(parameters, lr=0.01)


def step_of(net, devices, make=lambda p: SGD(p, lr=0.5), **settings):
    return TrainStep(net.to(devices[0]), mse, make(net.parameters()), devices, **settings)


@pytest.mark.parametrize("devices", TEAMS)
@pytest.mark.parametrize(
    "make",
    [
        adamw,
        lambda p: SGD(p, lr=0.05, momentum=0.9, nesterov=True),
        lambda p: torch.optim.RMSprop(p, lr=0.001),
    ],
)
def test_all_devices_hold_the_same_bits(devices, make):
    with torch.device(devices[0]):  # where a torch optimizer keeps its counts of steps
        torch.manual_seed(0)
        net = Branches().double()
        alone = copy.deepcopy(net)
        step, reference = step_of(net, devices, make), make(alone.parameters())
        for i, (x, y) in enumerate(batches(12, 11)):
            step(x, i % 3, y)
            reference.zero_grad()
            mse(alone(x, i % 3), y).backward()
            reference.step()
            step.check_replicas()
    assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(net.parameters(), alone.parameters(), strict=True))


@pytest.mark.parametrize("devices", TEAMS)
@pytest.mark.parametrize("rows", [1, 2])
def test_devices_without_rows_add_nothing(devices, rows):
    """After batches for all of them, whose sums are still there, bucket by bucket."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    alone = copy.deepcopy(net).to(devices[0])
    step = step_of(net, devices, bucket_nbytes=1)
    optimizer = SGD(alone.parameters(), lr=0.5)
    for count in (10, rows, 10, rows):
        x, y = (torch.randn(count, n, dtype=torch.float64, device="cpu") for n in (3, 2))
        step(x, y)
        optimizer.zero_grad()
        mse(alone(x.to(devices[0])), y.to(devices[0])).backward()
        optimizer.step()
        step.check_replicas()
    for one, other in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("workers", ["threads", "caller"])
def test_a_rank_keeps_no_gradients_but_those_of_two_buckets(workers):
    """Also one that is ahead of the others: its device adds them up without waiting."""
    net = nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(16)])
    step = step_of(net, [*FAKES, "fake:3"], bucket_nbytes=1, workers=workers)
    batch = [torch.randn(16, 128, device="cpu") for _ in range(2)]
    for _ in range(3):
        step(*batch)
    gc.collect()
    before = [torch.fake.memory_allocated(index) for index in range(4)]
    torch.fake.reset_peak_memory_stats()
    step(*batch)
    more = [torch.fake.max_memory_allocated(index) - then for index, then in enumerate(before)]
    activations = 2 * 16 * 4 * 128 * 4
    assert max(more) <= 2 * net[0].weight.nbytes + activations


@pytest.mark.parametrize("devices", TEAMS)
@pytest.mark.parametrize("freezes", [True, False])
def test_two_steps_share_a_net(devices, freezes):
    """What one of them updates travels to the other's devices."""
    both = Adversaries(devices, freezes)
    rounds = []
    trace = traced(lambda: rounds.extend(map(both.round, range(5))))
    assert rounds == [True] * 5
    assert any(name.startswith("maker") for names in buckets(trace) for name in names)


@pytest.mark.parametrize("devices", TEAMS)
def test_what_is_frozen_does_not_travel(devices):
    """Nor is it the step's; and what is thawed is trained on all devices."""
    torch.manual_seed(0)
    net = Branches().double().to(devices[0])
    net.second.requires_grad_(False)
    pair = Pair(net, adamw, devices)
    memory = net.second.weight.data_ptr()
    for i, batch in enumerate(batches(8, 11)):
        x, y = (each.to(devices[0]) for each in batch)
        if i == 4:
            assert net.second.weight.data_ptr() == memory
            for each in (net, pair.alone):
                each.second.requires_grad_(True)
        summed = buckets(traced(lambda x=x, y=y: pair.both(x, 2, y)))
        assert any("second.weight" in names for names in summed) == (i >= 4)
        pair.step.check_replicas()
    assert pair.far() < 1e-9


@pytest.mark.parametrize("make", [torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adagrad, torch.optim.Adamax])
def test_twins_of_an_optimizer_are_made_anew_at_a_thaw(make):
    """With all that torch keeps in other dtypes, and on the CPU."""
    torch.manual_seed(0)
    net = Branches().double().to("fake:0")
    net.second.requires_grad_(False)
    pair = Pair(net, make, FAKES)
    for i, (x, y) in enumerate(batches(8, 11)):
        if i == 4:
            for each in (net, pair.alone):
                each.second.requires_grad_(True)
        pair.both(x, 2, y)
        pair.step.check_replicas()
    assert pair.far() < 1e-9


@pytest.mark.parametrize("when", ["pre", "post"])
def test_what_a_hook_of_the_optimizer_writes_travels(when):
    net = Linear()
    step = step_of(net, FAKES)
    bias = net.last.bias

    def write(*_):
        bias.data.fill_(7)

    getattr(step.optimizer, f"register_step_{when}_hook")(write)
    step(numbers(6, 3), numbers(6, 2))
    step.check_replicas()
    assert (bias.tolist() == [7, 7]) == (when == "post")


def test_twins_of_an_optimizer_follow_its_groups():
    net = Linear()
    step = step_of(net, FAKES, lambda parameters: SGD([{"params": [each]} for each in parameters], lr=0.5))
    step(numbers(6, 3), numbers(6, 2))
    members = step.optimizer.param_groups[1]["params"]
    step.optimizer.add_param_group({"params": [members.pop()], "lr": 0.0})
    weight, bias = (each.detach().clone() for each in net.parameters())
    step(numbers(6, 3) + 1, numbers(6, 2))
    step.check_replicas()
    assert torch.equal(net.last.bias, bias)
    assert not torch.equal(net.last.weight, weight)


@pytest.mark.parametrize("devices", TEAMS)
def test_a_forward_that_puts_a_parameter_elsewhere(devices):
    """What rank 0 has put there, all devices have."""
    torch.manual_seed(0)
    pair = Pair(Constrained().double().to(devices[0]), adamw, devices)
    for x, y in batches(5, [11, 1]):
        pair.both(x.to(devices[0]), y.to(devices[0]))
        pair.step.check_replicas()
        assert pair.far() < 1e-9
        assert all(each.untyped_storage().nbytes() == each.nbytes for each in pair.net.parameters())


@pytest.mark.parametrize("devices", TEAMS)
def test_where_ranks_put_other_values_the_first_ones_count(devices):
    class Own(Linear):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x):
            self.scale.data = x[:1, 0].clone()
            return super().forward(x) * self.scale

    net = Own().to(devices[0])
    step = step_of(net, devices, lambda p: SGD(p, lr=0.0))
    for first in (3, 5, 7):
        step(torch.arange(30.0).reshape(10, 3) + first, torch.ones(10, 2))
        assert net.scale.item() == first
        step.check_replicas()


def test_ctrl_c_while_moved_values_travel(monkeypatch):
    net = Branches().double()
    net.second.requires_grad_(False)
    step = step_of(net, FAKES, adamw)
    (x, y), *_ = batches(1, 11)
    step(x, 2, y)
    net.second.weight.data = net.second.weight.data * 2

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("mgpu_core.step.replicas.dispatch.broadcast_into", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step(x, 2, y)
    monkeypatch.undo()
    step(x, 2, y)
    step.check_replicas()


@pytest.mark.parametrize("devices", TEAMS)
def test_values_of_others_may_be_other_tensors(devices):
    """Torch counts no write there: that they lie elsewhere is what says so."""
    net = Branches().double()
    net.second.requires_grad_(False)
    step = step_of(net, devices, adamw)
    for x, y in batches(3, 11):
        step(x, 2, y)
        net.second.weight.data = net.second.weight.data * 2
    step(x, 2, y)
    step.check_replicas()
    net.second.weight.data = torch.ones_like(net.second.weight).requires_grad_(False)
    step(x, 2, y)
    step.check_replicas()


def test_a_device_that_differs_is_named():
    net = Linear()
    step = step_of(net, FAKES)
    step(numbers(6, 3), numbers(6, 2))

    def spoil(module, args, output):
        if str(output.device) == "fake:2":
            module.weight.data.add_(1)  # nobody counts this

    with net.last.register_forward_hook(spoil):
        step.evaluate(numbers(6, 3), numbers(6, 2))
    with pytest.raises(Error, match=r"parameter last\.weight of rank 2 on fake:2 differs from fake:0's"):
        step.check_replicas()
    step.sync_parameters()
    step.check_replicas()


def weights_in(step):
    """The values of the weights that an evaluation has on each device."""
    seen = set()

    def look(module, args, output):
        seen.update((str(output.device), value) for value in module.weight.flatten().tolist())

    with step.module.last.register_forward_hook(look):
        step.evaluate(numbers(6, 3), numbers(6, 2))
    return seen


@pytest.mark.parametrize("steps_before", [0, 1])
def test_values_changed_in_place_travel(steps_before):
    net = Linear()
    step = step_of(net, FAKES)
    for _ in range(steps_before):
        step(numbers(6, 3), numbers(6, 2))
    with torch.no_grad():
        net.last.weight.fill_(3)
    assert weights_in(step) == {(device, 3.0) for device in FAKES}
    net.last.weight.data.fill_(4)  # nobody counts this
    step.sync_parameters()
    assert weights_in(step) == {(device, 4.0) for device in FAKES}
    step.check_replicas()


def test_ranks_that_share_another_device_start_with_what_was_loaded():
    """A checkpoint is loaded into a step that has not made one yet."""
    seen = []

    class Sees(Linear):
        def forward(self, x):
            seen.append(self.last.weight.eq(3).all().item())
            return super().forward(x)

    net, trained = Sees(), Linear()
    step = step_of(net, ["fake:0", "fake:1", "fake:1"])
    with torch.no_grad():
        trained.last.weight.fill_(3)
    step.module.load_state_dict(trained.state_dict())
    step(numbers(6, 3), numbers(6, 2))
    assert seen == [True] * 3


def test_values_that_have_yet_to_travel_are_no_difference():
    net = Linear()
    step = step_of(net, FAKES)
    step(numbers(6, 3), numbers(6, 2))
    with torch.no_grad():
        net.last.weight.fill_(3)
    step.check_replicas()
    assert weights_in(step) == {(device, 3.0) for device in FAKES}


@pytest.mark.parametrize(
    "make",
    [
        lambda p: SGD(p, lr=0.5, momentum=0.5),
        lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
        lambda p: torch.optim.Adagrad(p, lr=0.01),
    ],
)
def test_all_devices_hear_of_a_step_of_the_users_own(make):
    """It has moved the state of the first device alone."""
    net = Linear()
    step = step_of(net, FAKES, make)
    for _ in range(2):
        step(numbers(6, 3), numbers(6, 2))
        net.zero_grad()
        mse(net(numbers(6, 3)), numbers(6, 2)).backward()
        step.optimizer.step()
        step(numbers(6, 3), numbers(6, 2))
        step.check_replicas()


def test_a_state_on_the_default_device_is_each_devices_own():
    """Torch keeps counts of steps on the default device, and none of another device is any good to a twin."""
    with torch.device("fake:0"):
        net = Linear()
        make = lambda p: torch.optim.RMSprop(p, lr=0.01, foreach=True)  # noqa: E731
        step = step_of(net, FAKES, make)
        mse(net(numbers(6, 3)), numbers(6, 2)).backward()
        step.optimizer.step()
        step(numbers(6, 3), numbers(6, 2))
        step.check_replicas()


def test_a_loaded_state_travels():
    torch.manual_seed(0)
    net, other = Branches(), Branches()
    make = lambda p: AdamW(p, lr=0.01)  # noqa: E731
    step, resumed = step_of(net, FAKES, make), step_of(other, ["fake:2", "fake:1"], make)
    data = [(x.to("fake:0"), y.to("fake:0")) for x, y in batches(6, 12, dtype=torch.float32)]
    for x, y in data[:3]:
        step(x, 2, y)
    resumed.load_state_dict(step.state_dict())
    for x, y in data[3:]:
        step(x, 2, y)
        resumed(x.to("fake:2"), 2, y.to("fake:2"))
        resumed.check_replicas()
    pairs = zip(net.parameters(), other.parameters(), strict=True)
    assert all(torch.allclose(a.cpu(), b.cpu(), atol=1e-5) for a, b in pairs)


def pairs(count):
    generator = torch.Generator("cpu").manual_seed(1)
    settings = {"generator": generator, "dtype": torch.float64, "device": "cpu"}
    return [[torch.randn(11, n, **settings) for n in (3, 2)] for _ in range(count)]


TORCHS_OWN = [torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adagrad, torch.optim.Adamax, torch.optim.RMSprop]


@pytest.mark.parametrize("default", ["cpu", "fake:0"])
@pytest.mark.parametrize("kind", TORCHS_OWN)
def test_each_devices_twin_counts_its_own_steps(kind, default):
    """Also where there is a state already: it was loaded, the step was rebuilt, or the optimizer made it at once."""
    with torch.device(default):  # where torch keeps the counts
        settings = {"lr_decay": 0.1} if kind is torch.optim.Adagrad else {}
        net = Linear().double()
        alone = copy.deepcopy(net).cpu()
        step = step_of(net, FAKES, lambda p: kind(p, lr=0.05, **settings))
        reference = kind(alone.parameters(), lr=0.05, **settings)
        for i, (x, y) in enumerate(pairs(6)):
            if i == 2:
                step.load_state_dict(step.state_dict())
            if i == 4:
                step.rebuild()
            step(x, y)
            reference.zero_grad()
            mse(alone(x), y).backward()
            reference.step()
            step.check_replicas()
    for own, other in zip(net.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(own.cpu(), other, atol=1e-9)
        assert float(step.optimizer.state[own]["step"]) == float(reference.state[other]["step"]) == 6


class Noisy(SGD):
    """A class of the user's own: it draws numbers, and counts."""

    calls = 0

    def step(self, closure=None):
        self.calls += 1
        if self.calls == 3:
            raise ArithmeticError("the third")
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(torch.rand(parameter.shape, device="cpu").to(parameter.device), alpha=0.01)
        return super().step(closure)


def halves(optimizer, *_):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.mul_(0.5)


@torch.no_grad()
def clamps(optimizer, *_):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.clamp_(-0.2, 0.2)


def with_hooks(parameters):
    made = SGD(parameters, lr=0.05, momentum=0.9)
    made.register_step_pre_hook(halves)
    made.register_step_post_hook(clamps)
    return made


@pytest.mark.filterwarnings("ignore:the fused kernels do not serve")
@pytest.mark.parametrize("make", [lambda p: Noisy(p, lr=0.05), with_hooks])
@pytest.mark.parametrize("devices", TEAMS)
def test_what_an_optimizer_does_besides_happens_once(make, devices):
    torch.manual_seed(0)
    net = Linear().double()
    alone = copy.deepcopy(net).cpu()
    step, reference = step_of(net, devices, make), make(alone.parameters())
    for i, (x, y) in enumerate(pairs(5)):
        reference.zero_grad()
        mse(alone(x), y).backward()
        draws = torch.get_rng_state()
        if i == 2 and isinstance(reference, Noisy):
            for call in (lambda each=(x, y): step(*each), reference.step):
                with pytest.raises(ArithmeticError, match="the third"):
                    call()
            step.check_replicas()
            continue
        step(x, y)
        torch.set_rng_state(draws)
        reference.step()
        step.check_replicas()
    assert all(torch.allclose(a.cpu(), b, atol=1e-9) for a, b in zip(net.parameters(), alone.parameters(), strict=True))


def test_a_forward_that_writes_into_a_parameter_is_rank_0s():
    class Centred(Linear):
        def __init__(self):
            super().__init__()
            self.centre = nn.Parameter(torch.zeros(3), requires_grad=False)

        def forward(self, x):
            with torch.no_grad():
                self.centre.copy_(x.mean(0))
            return super().forward(x - self.centre)

    net = Centred()
    step = step_of(net, FAKES)
    x = numbers(6, 3)
    step(x, numbers(6, 2))
    assert torch.equal(net.centre.cpu(), x[:2].mean(0))
    step.check_replicas()


def test_a_hook_takes_the_place_of_the_all_reduce():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    alone = copy.deepcopy(net)
    step = step_of(net, FAKES, bucket_nbytes=1)
    seen = []

    def hook(bucket):
        assert [str(each.device) for each in bucket.tensors] == FAKES
        assert all(each.dim() == 1 for each in bucket.tensors)
        seen.append((bucket.index, tuple(bucket.parameters), bucket.is_last))
        comm.all_reduce(bucket.tensors)
        for each in bucket.tensors:
            each.mul_(2)

    step.register_comm_hook(hook)
    step(numbers(6, 3), numbers(6, 2))
    mse(alone(numbers(6, 3)), numbers(6, 2)).backward()
    for mine, theirs in zip(net.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(mine.grad, 2 * theirs.grad, atol=1e-4)
    assert [index for index, _, _ in seen] == [0, 1, 2, 3]
    assert [last for _, _, last in seen] == [False, False, False, True]
    assert seen[0][1] in (("1.weight",), ("1.bias",))
    step.register_comm_hook(None)
    step(numbers(6, 3), numbers(6, 2))
    assert len(seen) == 4


def test_a_hook_gets_whole_buckets_where_a_checkpoint_makes_gradients_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.shared = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)

        def forward(self, x):
            x = self.first(x)
            for _ in range(2):
                x = torch.tanh(checkpoint(self.shared, x, use_reentrant=True))
            return x

    net, seen = Twice().double(), []
    alone = copy.deepcopy(net).to("fake:0")
    step = step_of(net, FAKES, bucket_nbytes=1, workers="caller")
    batch = [torch.randn(6, 3, dtype=torch.float64, device="cpu") for _ in range(2)]

    def hook(bucket):
        seen.append(tuple(bucket.parameters))
        comm.all_reduce(bucket.tensors)

    step.register_comm_hook(hook)
    for _ in range(2):
        alone.zero_grad()
        mse(alone(batch[0].to("fake:0")), batch[1].to("fake:0")).backward()
        with torch.no_grad():
            for param in alone.parameters():
                param -= 0.5 * param.grad
        step(*batch)
        for mine, theirs in zip(net.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-12)
    assert len(seen) == 2 * len(set(seen)) == 6


def test_gradients_travel_in_comm_dtype():
    net = Linear()
    sent = []
    step = step_of(net, FAKES, comm_dtype=torch.bfloat16)
    step.register_comm_hook(lambda bucket: (sent.append(bucket.tensors[0].dtype), comm.all_reduce(bucket.tensors)))
    step(numbers(6, 3), numbers(6, 2))
    assert sent == [torch.bfloat16]
    assert net.last.weight.grad.dtype == torch.float32
    exact = net.last.weight.grad.bfloat16().float()
    assert torch.equal(exact, net.last.weight.grad), "what came back were bfloat16 numbers"
    step.check_replicas()


def test_the_module_must_be_on_the_first_device():
    net = Linear().to("fake:1")
    with pytest.raises(RuntimeError, match=r"on fake:0 \(device_ids\[0\]\), but last\.weight is on fake:1"):
        TrainStep(net, mse, SGD(net.parameters(), lr=0.1), FAKES)
    TrainStep(net, mse, SGD(net.parameters(), lr=0.1), ["fake:2"])
    assert str(net.last.weight.device) == "fake:2", "one device moves it"
