"""Parameters in shards on four devices: whose memory is there when, and what is left after failures of all kinds."""

import copy
import gc
import time
from contextlib import nullcontext

import pytest
import torch
from fakes.tensors import numbers
from step.nets import mse
from torch import distributed, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mgpu_core import Pipeline, TrainStep, parameters_on_meta
from mgpu_core.optim import SGD, Adam, AdamW, Lion
from mgpu_core.trace import tracer

FOUR = ["fake:0", "fake:1", "fake:2", "fake:3"]
TEAMS = [["fake:0"], ["fake:0"] * 3, ["fake:1", "fake:0"], ["fake:0", "fake:1", "fake:0", "fake:2"], FOUR]
OPTIMIZERS = {
    "momentum": lambda p: SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "amsgrad": lambda p: Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: AdamW(p, lr=0.01),
    "lion": lambda p: Lion(p, lr=0.01, weight_decay=0.1),
}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width=8, layers=4, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.last = nn.Linear(width, 2)
        self.register_buffer("offset", torch.ones(4))
        self.hook = self.ways = None

    def forward(self, x):
        x = self.first(x + self.offset)
        for number, block in enumerate(self.blocks):
            if self.hook is not None:
                self.hook(self, number)
            way = self.ways and self.ways[number]
            x = block(x) if way is None else checkpoint(block, x, use_reentrant=way == "reentrant")
        return self.last(x)


def batch(seed, rows=12):
    generator = torch.Generator("cpu").manual_seed(seed)
    return tuple(torch.randn(rows, n, generator=generator, dtype=torch.float64, device="cpu") for n in (4, 2))


def step_of(net, devices=FOUR, make=OPTIMIZERS["adamw"], loss=mse, **settings):
    settings = {"shard": "parameters", "bucket_nbytes": 1} | settings
    return TrainStep(net, loss, make([p for p in net.parameters() if p.requires_grad]), devices, **settings)


def pair(devices=FOUR, make=OPTIMIZERS["adamw"], net=Net, **settings):
    """A step in shards, and one of copies over the same devices."""
    nets = [net().double().to(devices[0]) for _ in range(2)]
    return step_of(nets[0], devices, make, **settings), step_of(nets[1], devices, make, **settings | {"shard": None})


def assert_same(one, other, atol=1e-12):
    with one.full_parameters(), other.full_parameters():
        for mine, theirs in zip(one.module.parameters(), other.module.parameters(), strict=True):
            torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=0, atol=atol)


def train(steps, count=3, rows=12):
    for seed in range(count):
        losses = [float(step(*batch(seed, rows))) for step in steps]
        assert losses[0] == pytest.approx(losses[-1], rel=1e-9)


def allocated():
    gc.collect()
    return [torch.fake.memory_allocated(index) for index in range(4)]


@pytest.mark.parametrize("workers", ["threads", "caller"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("devices", TEAMS, ids=str)
def test_steps_are_those_of_copies(devices, name, workers):
    steps = pair(devices, OPTIMIZERS[name], workers=workers)
    train(steps)
    assert_same(*steps)
    states = [step.optimizer.state_dict()["state"] for step in steps]
    for index, state in states[1].items():
        for key, value in state.items():
            torch.testing.assert_close(states[0][index][key].cpu(), value.cpu(), rtol=0, atol=1e-12)
    train(steps)
    assert_same(*steps)


@pytest.mark.parametrize(
    "settings",
    [
        {"clip_norm": 0.01},
        {"accumulate": 3},
        {"reduction": "sum"},
        {"loss_on": "gathered"},
        {"comm_dtype": torch.float32},
        {"shares": [1, 2, 3, 4]},
        {"bucket_nbytes": 5000},
        {"algorithm": "ring"},
    ],
    ids=str,
)
def test_settings(settings):
    loss = (lambda output, target: ((output - target) ** 2).sum()) if "reduction" in settings else mse
    steps = pair(loss=loss, **settings)
    train(steps, 7)
    for step in steps:
        step.flush()
    assert_same(*steps, atol=1e-6 if "comm_dtype" in settings else 1e-12)


@pytest.mark.parametrize("workers", ["threads", "caller"])
def test_a_block_that_some_ranks_leave_out_in_the_later_calls_of_a_window(workers):
    class Some(Net):
        def forward(self, x):
            x, leaves_out = self.first(x), bool((x[:, 0] > 0).all())
            for number, block in enumerate(self.blocks):
                x = x if leaves_out and number == 1 else block(x)
            return self.last(x)

    steps = pair(net=Some, accumulate=2, workers=workers)
    x, y = batch(0)
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=x.dtype, device="cpu").repeat_interleave(3)
    for sign in (-1, signs, -1, signs, signs, -1):
        x[:, 0] = x[:, 0].abs() * sign
        losses = [float(step(x, y)) for step in steps]
        assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert_same(*steps)


@pytest.mark.parametrize("way", ["amp", "compiled blocks"])
def test_autocast_and_compiled_blocks_have_the_bits_of_copies(way):
    """On the CPU, for which torch compiles, and casts."""
    steps = []
    for shard in ("parameters", None):
        net = Net().to("cpu")
        for block in net.blocks if way == "compiled blocks" else ():
            block.compile(backend="aot_eager")
        dtype = torch.bfloat16 if way == "amp" else None
        steps.append(step_of(net, ["cpu"] * 3, shard=shard, amp_dtype=dtype))
    for seed in range(3):
        x, y = (tensor.float() for tensor in batch(seed))
        losses = [float(step(x, y)) for step in steps]
        assert losses[0] == losses[1]
    assert_same(*steps, atol=0)


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_ranks_without_rows(rows):
    steps = pair()
    train(steps, 4, rows)
    assert_same(*steps)


@pytest.mark.parametrize("way", ["plain", "reentrant"])
def test_checkpoints_of_some_blocks_and_a_block_that_is_called_twice(way):
    class Twice(Net):
        def forward(self, x):
            x = super().forward(x)
            return self.last(self.blocks[1](self.first(torch.cat([x, x], 1))))

    steps = pair(net=Twice)
    for step in steps:
        step.module.ways = [None, way, way, None]
    train(steps)
    assert_same(*steps)


class Towers(nn.Module):
    """Two towers in turns, experts of which some get no row, a teacher without gradients, an output nobody uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.right = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.teacher = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        with torch.no_grad():
            target = self.teacher[1](self.teacher[0](x))
        left, right = x, x
        for one, other in zip(self.left, self.right, strict=True):
            left, right = one(left) + right, other(right)
        self.right[0](x)
        expert = self.experts[int(x.sum() > 0)]
        return self.last(left * right - target + expert(x))


@pytest.mark.parametrize("devices", TEAMS, ids=str)
def test_towers_experts_and_teachers(devices):
    steps = pair(devices, net=Towers)
    train(steps, 5)
    assert_same(*steps)


class Penalty(nn.Module):
    """The loss has a gradient of the outputs by the inputs in it."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            output = self.net(x)
            (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return output + slope.square().mean(1, keepdim=True)


def test_a_gradient_of_a_gradient():
    steps = pair(net=Penalty)
    train(steps)
    assert_same(*steps)


class Inplace(nn.Module):
    """Blocks that write their input or output, hand inputs through, and nest their outputs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)) for _ in range(3))
        self.nested = nn.ModuleList(Nested() for _ in range(3))
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        passed = {"x": x}
        for block in self.nested:
            passed = block(passed, scale=[x])
        return self.last(passed["x"] + passed["y"][0])


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, passed, scale):
        return {"x": self.one(passed["x"]), "y": (self.two(scale[0]), None), "same": scale[0]}


def test_blocks_that_write_nest_and_hand_through():
    steps = pair(net=Inplace)
    train(steps)
    assert_same(*steps)


def test_one_set_of_bits_in_twenty_runs():
    def run():
        step = step_of(Net().double().to("fake:0"))
        for seed in range(3):
            step(*batch(seed))
        with step.full_parameters():
            return torch.cat([p.detach().reshape(-1).cpu() for p in step.module.parameters()]).numpy().tobytes()

    assert len({run() for _ in range(20)}) == 1


@pytest.mark.parametrize("way", [None, "plain"])
def test_memory_between_steps_and_during_one(way):
    """Blocks of 33 KiB times 16: parameters, gradients and two moments in quarters; then the root and two blocks."""
    before = allocated()
    net = Net(width=128, layers=16).to("fake:0")
    net.ways = [way] * 16
    nbytes = [sum(p.nbytes for p in block.parameters()) for block in (net, *net.blocks)]
    root = nbytes[0] - sum(nbytes[1:])
    x, y = (tensor.float() for tensor in batch(0, 4))
    step = step_of(net, FOUR, OPTIMIZERS["adamw"])
    step(x, y)
    between = [now - then for now, then in zip(allocated(), before, strict=True)]
    assert max(between) <= 4 * nbytes[0] / 4 * 1.05
    torch.fake.reset_peak_memory_stats()
    step(x, y)
    most = [torch.fake.max_memory_allocated(index) - then for index, then in enumerate(before)]
    # Of the block at work and the one before: values, gradients, and their sum on its way to the parts.
    allowed = 2 * root + 2 * 3 * nbytes[1]
    assert max(most) <= 4 * nbytes[0] / 4 * 1.05 + allowed, (most, between, nbytes[:2])
    for _ in range(3):
        step(x, y)
    assert allocated() == [b + n for b, n in zip(before, between, strict=True)]


def test_reading_outside_is_an_error_that_says_how():
    net = Net().double().to("fake:0")
    step = step_of(net)
    weight = net.blocks[2].up.weight
    shape, names = weight.shape, list(net.state_dict())
    for read in (
        weight.sum,
        lambda: weight + 1,
        weight.tolist,
        lambda: print(weight),
        weight.cpu,
        lambda: weight.zero_(),
    ):
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"blocks.2 have no memory now.*step.full_parameters"):
            read()
    with pytest.raises(RuntimeError, match="layers outside of the blocks have no memory"):
        net(torch.ones(1, 4, dtype=torch.float64, device="fake:0"))
    step(*batch(0))
    assert net.blocks[2].up.weight is weight
    assert (weight.shape, weight.dtype, list(net.state_dict())) == (shape, torch.float64, names)
    assert all(p.grad is None for p in net.parameters())
    net.hook = lambda net, number: net.blocks[3].up.weight.sum()
    with pytest.raises(RuntimeError, match=r"parameters of blocks\.3 have no memory now"):
        step(*batch(1))
    net.hook = lambda net, number: net.blocks[3].forward(
        torch.ones(1, 8, dtype=torch.float64, device=net.offset.device)
    )
    with pytest.raises(RuntimeError, match=r"parameters of blocks\.3 have no memory now"):
        step(*batch(1))


def test_a_view_of_another_block_s_weight_is_explained():
    net = Net().double().to("fake:0")
    net.hook = lambda net, number: number == 2 and net.blocks[3].up.weight.t() @ net.blocks[3].up.weight
    step = step_of(net, ["fake:0", "fake:1"])
    for call in (step, step.evaluate):
        with pytest.raises(RuntimeError, match=r"of size 0|blocks\.3") as caught:
            call(*batch(0))
        notes = [*getattr(caught.value, "__notes__", ()), *getattr(caught.value.__cause__, "__notes__", ())]
        assert "blocks.3" in str(caught.value) or any("call the block, block(x)" in note for note in notes)
    net.hook = None
    step(*batch(0))


def test_edits_inside_full_parameters_count():
    steps = pair()
    train(steps)
    for step in steps:
        with step.full_parameters() as net, torch.no_grad():
            net.blocks[1].up.weight.mul_(2)
            net.last.bias.data = torch.ones_like(net.last.bias)
    train(steps)
    with torch.no_grad():
        for step in steps:
            step.module.first.weight.data = torch.ones_like(step.module.first.weight)
    train(steps)
    assert_same(*steps)


def test_a_call_inside_full_parameters():
    steps = pair()
    for step in steps:
        with step.full_parameters() as net:
            with torch.no_grad():
                net.first.weight.add_(1)
            step(*batch(0))
    assert_same(*steps)
    with pytest.raises(RuntimeError, match="no memory"):
        steps[0].module.first.weight.sum()
    with steps[0].full_parameters() as net:
        before = net.first.weight.clone()
        with steps[0].full_parameters():
            assert torch.equal(net.first.weight, before)
        assert torch.equal(steps[0].state_dict()["module"]["first.weight"].cpu(), before.cpu())
        assert torch.equal(net.first.weight, before)


class Stop(Exception):
    pass


def fail(net, number):
    if number == 3 and net.offset.device.index == 2:
        raise Stop


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        if gradient.device.index == 1:
            raise Stop
        return gradient


@pytest.mark.parametrize("where", ["forward", "backward", "update", "nan", "interrupt"])
@pytest.mark.parametrize("workers", ["threads", "caller"])
def test_a_failure_leaves_all_as_before(where, workers):
    steps = pair(workers=workers, accumulate=2)
    train(steps, 4)
    handles = []
    for step in steps:
        net, before = step.module, allocated()
        x, y = batch(9)
        kind = Stop
        if where == "forward":
            net.hook = fail
        elif where == "backward":
            handles.append(net.blocks[2].register_forward_hook(lambda module, args, out: FailsBackward.apply(out)))
        elif where == "update":
            handles.append(step.optimizer.register_step_pre_hook(lambda *_: (_ for _ in ()).throw(Stop)))
            step(x, y)
        elif where == "nan":
            x = x * float("nan")
            step.error_if_nonfinite = True
            step(x, y)
            kind = FloatingPointError
        else:
            net.hook = interrupt
            kind = KeyboardInterrupt
        with pytest.raises(kind):
            step(x, y)
        net.hook, x = None, None
        until = time.monotonic() + 20  # autograd's threads of other devices let go of the backward a little later
        while max(now - then for now, then in zip(allocated(), before, strict=True)) > 0:
            assert time.monotonic() < until
    for handle in handles:
        handle.remove()
    assert_same(*steps)
    train(steps, 4)
    assert_same(*steps)


def interrupt(net, number):
    if number == 2 and net.offset.device.index == 0:
        raise KeyboardInterrupt


def test_out_of_memory_while_a_block_is_filled(monkeypatch):
    from mgpu_core.step import held_blocks

    steps = pair()
    train(steps)
    calls, usual = [], held_blocks.restore_memory

    def full(tensor, text):
        if "blocks.2" in text and tensor.device.index == 3:
            calls.append(text)
            raise torch.OutOfMemoryError("fake:3 has no memory left")
        usual(tensor, text)

    monkeypatch.setattr(held_blocks, "restore_memory", full)
    before = allocated()
    with pytest.raises(RuntimeError, match="fake:3 has no memory left"):
        steps[0](*batch(9))
    monkeypatch.undo()
    assert calls
    assert allocated() == before
    train(steps)
    assert_same(*steps)


def test_states_go_between_teams_and_kinds_of_shards():
    steps = pair()
    train(steps)
    states = [copy.deepcopy(step.state_dict()) for step in steps]
    assert states[0]["module"]["last.weight"].shape == (2, 8)
    kinds = (FOUR[:3], "parameters"), (FOUR[:1], None), (FOUR, "optimizer"), (FOUR, "parameters")
    others = [step_of(Net(seed=1).double().to("fake:0"), devices, shard=shard) for devices, shard in kinds]
    for other, state in zip(others, [states[0], states[0], states[0], states[1]], strict=True):
        other.load_state_dict(state)
    train([*steps, *others], 2)
    for other in others:
        assert_same(steps[0], other)


def test_evaluate_check_rebuild_and_close():
    steps = pair()
    train(steps)
    losses = [float(step.evaluate(*batch(5))) for step in steps]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert steps[0].check_loss(*batch(5)).agrees
    for step in steps:
        step.check_replicas()
        step.sync_parameters()
        step.rebuild()
    train(steps)
    assert_same(*steps)
    for step in steps:
        step.close()
    for mine, theirs in zip(steps[0].module.parameters(), steps[1].module.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=0, atol=1e-12)
        assert mine.device == torch.device("fake:0")
        mine.grad = theirs.grad = torch.ones_like(mine)
    for step in steps:
        step.optimizer.step()
    for mine, theirs in zip(steps[0].module.parameters(), steps[1].module.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=0, atol=1e-12)


def test_parameters_that_are_frozen_thawed_and_replaced():
    steps = pair()
    train(steps)
    for change in (
        lambda net: net.blocks[1].requires_grad_(False),
        lambda net: net.blocks[1].requires_grad_(True),
        lambda net: net.blocks[2].up.bias.requires_grad_(False),
    ):
        for step in steps:
            change(step.module)
        train(steps, 2)
        assert_same(*steps)
    sharded = step_of(frozen(Net().double().to("fake:0")))
    copies = step_of(frozen(Net().double().to("fake:0")), shard=None)
    train([sharded, copies], 2)
    for step in (sharded, copies):
        step.module.requires_grad_(True)
        step.optimizer.add_param_group({"params": list(step.module.blocks[0].parameters())})
    train([sharded, copies], 2)
    assert_same(sharded, copies)
    for step in (sharded, copies):
        step.module.blocks[3].down.weight = nn.Parameter(torch.ones(8, 16, dtype=torch.float64, device="fake:0"))
    train([sharded, copies], 2)
    assert_same(sharded, copies)


def frozen(net):
    net.blocks[:2].requires_grad_(False)
    return net


class Odd(nn.Module):
    """Dtypes mixed in a block, a shared weight, one of one element, one of none, a whole number and a complex one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.blocks[1].weight = self.blocks[0].weight
        self.blocks[2].small = nn.Parameter(torch.ones(4))
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.number = nn.Parameter(torch.tensor(3), requires_grad=False)
        self.phase = nn.Parameter(torch.tensor(1j), requires_grad=False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            if hasattr(block, "small"):
                x = x * self.scale
        return (x * self.number * self.phase.abs())[:, :2] + self.empty.sum()


def test_odd_parameters():
    def odd():
        net = Odd()
        for parameter in net.parameters():
            if parameter.dtype.is_floating_point and parameter is not net.blocks[2].small:
                parameter.data = parameter.data.double()
        return net

    nets = [odd().to("fake:0") for _ in range(2)]
    steps = step_of(nets[0]), step_of(nets[1], shard=None)
    train(steps)
    for step in steps:
        with torch.no_grad():
            step.module.number.fill_(2)
    train(steps)
    assert_same(*steps)


@pytest.mark.parametrize("home", ["cpu", "fake:3"])
def test_a_module_that_lies_elsewhere(home):
    net = Net().double().to(home)
    parameters = list(net.parameters())
    steps = step_of(net), step_of(Net().double().to("fake:0"), shard=None)
    assert all(now is then for now, then in zip(net.parameters(), parameters, strict=True))
    assert net.offset.device == torch.device("fake:0")
    train(steps)
    assert_same(*steps)


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"shard": "yes"}, ValueError, "shard must be None"),
        ({"capture": True}, ValueError, "does not go with capture=True"),
        ({"static_graph": True}, ValueError, "does not go with static_graph=True"),
        (
            {"make": lambda p: torch.optim.SGD(p, lr=1.0)},
            ValueError,
            r'shard="parameters" is for .*not for torch.optim',
        ),
        ({"devices": ["fake:0", "cpu"]}, ValueError, "devices of one kind"),
    ],
)
def test_what_it_refuses(change, kind, text):
    net = Net().to("fake:0")
    with pytest.raises(kind, match=text):
        step_of(net, **change)
    assert bool(torch.isfinite(net.first.weight).all())


def test_nccl_over_several_devices_of_a_process_is_refused(tmp_path, monkeypatch):
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        group = distributed.group.WORLD
        monkeypatch.setattr(distributed, "get_backend", lambda _: "nccl")
        with pytest.raises(ValueError, match="over 4 devices of a process"):
            step_of(Net().double(), process_group=group)
    finally:
        distributed.destroy_process_group()


def test_modules_that_it_refuses():
    pipe = Pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), FOUR[:2], chunks=2)
    with pytest.raises(ValueError, match="Pipeline does not take shard"):
        TrainStep(pipe, mse, AdamW(pipe.parameters()), shard="parameters")
    net = nn.Sequential(nn.Embedding(9, 4, max_norm=0.1), nn.Linear(4, 2)).to("fake:0")
    step = TrainStep(net, mse, AdamW(net.parameters()), FOUR, shard="parameters")
    with pytest.raises(RuntimeError, match=r"writes parameter 0.weight in place"):
        step(torch.arange(8), numbers(8, 2))
    net = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2)).to("fake:0")
    step = TrainStep(net, mse, AdamW(net.parameters()), FOUR, shard="parameters")
    with pytest.raises(Exception, match=r"gradient of 0.weight is sparse"):
        step(torch.arange(8), numbers(8, 2))


class Mapped(Net):
    def forward(self, x):
        return torch.func.vmap(lambda row: self.last(self.blocks[0](self.first(row))))(x)


def test_a_transform_of_torch_func_is_refused():
    step = step_of(Mapped().double().to("fake:0"))
    with pytest.raises(RuntimeError, match=r"inside a transform of torch.func"):
        step(*batch(0))


def test_the_users_hooks_see_whole_sums():
    seen = []
    steps = pair()
    for step in steps:
        step.module.blocks[1].up.bias.register_hook(lambda g: seen.append(g.detach().cpu().clone()) or g * 0.5)
        step.module.blocks[0].register_forward_pre_hook(lambda module, args: module.up.weight.sum() and None)
    train(steps)
    assert len(seen) == 6
    for mine, theirs in zip(seen[::2], seen[1::2], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    assert_same(*steps)


def test_nothing_is_left_of_a_step_that_is_dropped():
    before = allocated()
    step = step_of(Net().double().to("fake:0"))
    step(*batch(0))
    del step
    assert allocated() == before


def test_a_recording_names_fills():
    step = step_of(Net().double().to("fake:0"))
    step(*batch(0))
    with tracer.tracing() as recorded:
        step(*batch(1))
    names = {getattr(event, "step", None) for event in recorded.events}
    assert {"fill", "reduce_scatter"} <= names


def test_weights_are_read_into_the_shards(tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    whole = Net().double()
    save_file(
        {name: tensor.cpu().contiguous() for name, tensor in whole.state_dict().items()}, tmp_path / "w.safetensors"
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with parameters_on_meta():
        net = Net(seed=1)
    torch.set_default_dtype(before)
    parameters = list(net.parameters())
    step, other = step_of(net), step_of(Net().double().to("fake:0"), shard=None)
    with pytest.raises(RuntimeError, match=r"first.weight came without memory.*step.load_weights"):
        step(*batch(0))
    step.load_state_dict(other.state_dict())
    step.load_weights(tmp_path)
    assert all(now is then for now, then in zip(net.parameters(), parameters, strict=True))
    train([step, other])
    assert_same(step, other)
    for each in (step, other):
        each.load_weights(tmp_path / "w.safetensors")
    train([step, other])
    assert_same(step, other)


@pytest.mark.parametrize("end", ["close", "rebuild"])
@pytest.mark.parametrize("inside", [False, True])
def test_edits_count_at_the_end_of_a_step(end, inside):
    steps = pair()
    for step in steps:
        with step.full_parameters() if inside else nullcontext(), torch.no_grad():
            step.module.last.bias.data = torch.full_like(step.module.last.bias, 7)
            getattr(step, end)()
    for step in steps:
        with nullcontext() if end == "close" else step.full_parameters():
            assert step.module.last.bias.tolist() == [7, 7]


@pytest.mark.parametrize("is_hooked", [False, True])
def test_gradients_of_the_user_s_own_in_a_window_do_not_count(is_hooked):
    steps = pair(accumulate=2)
    for step in steps:
        if is_hooked:
            step.module.blocks[1].up.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        step(*batch(0))
        with step.full_parameters() as net:
            x, y = (tensor.to("fake:0") for tensor in batch(1))
            mse(net(x), y).backward()
        step(*batch(2))
    assert_same(*steps)


class Holders(nn.Module):
    """Blocks in containers that are never called."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]) for _ in range(3))
        self.stages = nn.ModuleList(nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Tanh()}) for _ in range(2))
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        for one, two in self.layers:
            x = x + two(one(x))
        for stage in self.stages:
            x = stage["b"](stage["a"](x))
        return self.last(x)


def test_containers_that_are_never_called():
    steps = pair(net=Holders)
    train(steps)
    assert_same(*steps)


def test_a_loss_that_calls_the_net_itself_is_refused_in_threads():
    net = Net().double().to("fake:0")
    x = torch.ones(2, 4, dtype=torch.float64, device="fake:0")
    step = step_of(
        net, ["fake:0"] * 3, loss=lambda output, y: mse(output, y) + net(x).square().mean(), workers="threads"
    )
    with pytest.raises(RuntimeError, match="thread of another one"):
        step(*batch(0))
    train([step_of(Net().double().to("fake:0"), ["fake:0"] * 3)])
