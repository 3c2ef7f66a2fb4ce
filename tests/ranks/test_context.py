"""State of the caller's thread reaches the ranks, or is refused by name: each test fails with plain threads."""

import pytest
import torch
from fakes.nets import cpu
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from mgpu_core import DataParallel, parallel_apply

pytestmark = pytest.mark.several_ranks


class Report(nn.Module):
    """Calls a function in every rank and gives back what it says, as a leaf."""

    def __init__(self, ask):
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.ask = ask

    def forward(self, x):
        return self.linear(x), self.ask()


def asked(ranks, ask):
    """Return what every rank says; they must agree, or gather refuses."""
    return DataParallel(Report(ask), cpu(ranks))(torch.ones(ranks, 1))[1]


# Saved-tensor hooks.


class Square(nn.Module):
    def forward(self, x):
        return x * x


def test_saved_tensors_hooks_reach_every_rank(ranks):
    packed, unpacked = [], []

    def pack(tensor):
        packed.append(tensor[0, 0].item())
        return tensor.clone()

    def unpack(tensor):
        unpacked.append(tensor[0, 0].item())
        return tensor * 10

    x = torch.arange(1.0, ranks + 1).view(-1, 1).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = DataParallel(Square(), cpu(ranks))(x)
    out.sum().backward()
    rows = [float(row) for row in range(1, ranks + 1) for _ in range(2)]
    assert sorted(packed) == sorted(unpacked) == rows
    assert x.grad.view(-1).tolist() == [20.0 * row for row in range(1, ranks + 1)]


def test_save_on_cpu():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model, x = DataParallel(net, cpu(3)), torch.ones(7, 3)
    with torch.autograd.graph.save_on_cpu():
        model(x).sum().backward()
    got = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    net(x).sum().backward()
    for one, other in zip(got, net.parameters(), strict=True):
        torch.testing.assert_close(one, other.grad)


def test_a_ban_on_hooks_reaches_every_rank(ranks):
    def ask():
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return True

    assert asked(ranks, ask) is True
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"), pytest.raises(RuntimeError, match="not here"):
        asked(ranks, ask)
    assert asked(ranks, ask) is True


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_around_the_wrapper_keeps_nothing_and_finds_every_tensor_again(ranks, reentrant):
    """A checkpoint knows a saved tensor by its index among all: ranks that save in any order would mix them up."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    model, x = DataParallel(net, cpu(ranks)), torch.randn(ranks * 5, 4, dtype=torch.float64, requires_grad=True)
    model(x).square().sum().backward()
    wanted = [x.grad.clone(), *(p.grad.clone() for p in net.parameters())]
    for _ in range(10):
        x.grad = None
        net.zero_grad()
        calls = []
        handle = net[0].register_forward_hook(lambda *_, calls=calls: calls.append(1))
        out = checkpoint(model, x, use_reentrant=reentrant)
        assert len(calls) == ranks
        out.square().sum().backward()
        handle.remove()
        assert len(calls) == 2 * ranks, "the forward did not run again: its tensors had been kept"
        for one, other in zip([x.grad, *(p.grad for p in net.parameters())], wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


# The default device.


def test_a_default_device_of_the_team_is_the_ranks_own(ranks):
    with torch.device("cpu"):
        assert asked(ranks, lambda: str(torch.ones(1).device)) == "cpu"


def test_another_default_device_stays(ranks):
    with torch.device("meta"):
        assert asked_outside_meta(ranks) == "meta"
    assert asked_outside_meta(ranks) == "cpu"


def asked_outside_meta(ranks):
    with torch.device("cpu"):
        model, x = DataParallel(Report(lambda: str(torch.ones(1).device)), cpu(ranks)), torch.ones(ranks, 1)
    return model(x)[1]


def test_set_default_device_of_the_calling_thread_reaches_the_ranks():
    model, x = DataParallel(Report(lambda: str(torch.ones(1).device)), cpu(2)), torch.ones(2, 1)
    torch.set_default_device("meta")
    try:
        found = model(x)[1]
    finally:
        torch.set_default_device(None)
    assert found == "meta"
    assert model(x)[1] == "cpu"


# Modes and transforms.


class Doubling(TorchFunctionMode):
    """Makes every tensor of ones a tensor of twos."""

    mgpu_core_thread_safe = True

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ones else result


class Counting(TorchDispatchMode):
    mgpu_core_thread_safe = True

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class UnsafeFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class UnsafeDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_safe_function_mode_is_active_in_every_rank(ranks):
    with Doubling():
        assert asked(ranks, lambda: torch.ones(1).item()) == 2
    assert asked(ranks, lambda: torch.ones(1).item()) == 1


def test_a_safe_dispatch_mode_is_active_in_every_rank(ranks):
    model, x = DataParallel(nn.Sigmoid(), cpu(ranks)), torch.ones(ranks, 1)
    with Counting() as mode:
        model(x)
    assert mode.seen.count(torch.ops.aten.sigmoid.default) == ranks
    before = len(mode.seen)
    model(x)
    assert len(mode.seen) == before


def test_modes_keep_their_order():
    class Adding(Doubling):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            return result + 1 if func is torch.ones else result

    with Doubling(), Adding():
        here = torch.ones(1).item()
        assert asked(2, lambda: torch.ones(1).item()) == here == 3
    with Adding(), Doubling():
        assert asked(2, lambda: torch.ones(1).item()) == torch.ones(1).item() == 4


def test_safe_modes_and_random_streams_go_together():
    model, x = DataParallel(nn.Dropout(0.5), cpu(3)), torch.ones(9, 5)

    def run():
        torch.manual_seed(0)
        return model(x)

    plain = run()
    with Counting() as mode:
        assert torch.equal(run(), plain)
    assert mode.seen.count(torch.ops.aten.bernoulli_.float) == 3


def functions(model, x):
    with UnsafeFunctions():
        model(x)


def dispatch(model, x):
    with UnsafeDispatch():
        model(x)


def grad(model, x):
    torch.func.grad(lambda x: model(x).sum())(x)


def vmap(model, x):
    torch.func.vmap(model)(x[None])


def jvp(model, x):
    torch.func.jvp(model, (x,), (x,))


REFUSED = {
    functions: "UnsafeFunctions is an active TorchFunctionMode",
    dispatch: "UnsafeDispatch is an active TorchDispatchMode",
    grad: "torch.func.grad",
    vmap: "torch.func.vmap",
    jvp: "torch.func.jvp",
}


@pytest.mark.parametrize("way", REFUSED, ids=lambda way: way.__name__)
def test_what_may_not_leave_its_thread_is_refused_by_name_before_anything_runs(ranks, way):
    calls = []
    net = nn.Linear(2, 2)
    net.register_forward_hook(lambda *_: calls.append(1))
    model, x = DataParallel(net, cpu(ranks)), torch.ones(ranks, 2)
    with pytest.raises(TypeError, match=REFUSED[way]):
        way(model, x)
    assert not calls
    assert model(x).shape == (ranks, 2)  # and nothing is left behind


@pytest.mark.parametrize("way", REFUSED, ids=lambda way: way.__name__)
def test_one_rank_runs_in_its_callers_thread_with_all_of_it(way):
    way(DataParallel(nn.Linear(2, 2), cpu(1)), torch.ones(3, 2))


def test_parallel_apply_refuses_too():
    with UnsafeDispatch(), pytest.raises(TypeError, match="mgpu_core_thread_safe = True"):
        parallel_apply([nn.Identity()] * 2, [torch.ones(1)] * 2)


def test_a_rank_that_changes_its_stacks_changes_nothing_for_the_next_call():
    def leave_a_mode_behind():
        Doubling().__enter__()
        return True

    assert asked(2, leave_a_mode_behind)
    with Doubling():
        assert asked(2, lambda: torch.ones(1).item()) == 2
    assert asked(2, lambda: torch.ones(1).item()) == 1
