"""Our optimizers outside a TrainStep, against torch's classes of the same names."""

import copy
import io
import pickle

import pytest
import torch

import mgpu_core
from mgpu_core import optim
from mgpu_core.optim import flat_state

CASES = {
    "plain": ("SGD", {"lr": 0.1}),
    "decay": ("SGD", {"lr": 0.1, "weight_decay": 0.01, "maximize": True}),
    "momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "adam": ("Adam", {"lr": 0.01, "weight_decay": 0.1}),
    "amsgrad": ("Adam", {"lr": 0.01, "amsgrad": True, "maximize": True}),
    "adamw": ("AdamW", {"lr": 0.01, "betas": (0.8, 0.9)}),
    "decoupled": ("Adam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
}
STATEFUL = ["momentum", "nesterov", "adam", "amsgrad", "adamw"]
SHAPES = [(3, 4), (5,), (), (2, 0), (2, 3, 2, 2)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def parameters_of(dtype=torch.float32, seed=0):
    generator = torch.Generator("cpu").manual_seed(seed)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(dtype) for shape in SHAPES]
    made[-1] = made[-1].to(memory_format=torch.channels_last)
    return [torch.nn.Parameter(each.to(torch.get_default_device())) for each in made]


def give_gradients(parameters, seed, without=()):
    for i, (parameter, other) in enumerate(zip(parameters, parameters_of(parameters[0].dtype, seed), strict=True)):
        parameter.grad = None if i in without else other.detach()


def pair(case, dtype=torch.float32, groups=False):
    """Torch's optimizer and ours over equal parameters."""
    name, options = CASES[case]
    made = []
    for module in (torch.optim, optim):
        parameters = parameters_of(dtype)
        given = [{"params": parameters[:2], "lr": 0.05}, {"params": parameters[2:]}] if groups else parameters
        made.append((parameters, getattr(module, name)(given, **options)))
    return made


def step(made, seed, without=()):
    for parameters, optimizer in made:
        give_gradients(parameters, seed, without)
        optimizer.step()


def check(made):
    (theirs, _), (ours, _) = made
    tolerance = TOLERANCE[theirs[0].dtype]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_steps(case, dtype):
    if dtype == torch.float16 and CASES[case][0] != "SGD":
        pytest.skip("torch rounds squares to float16 in between")
    made = pair(case, dtype, groups=True)
    for seed in range(1, 5):
        step(made, seed, without=(1,) if seed == 1 else (0, 4) if seed == 3 else ())
    check(made)


def other_order(gradient):
    """The last dimension the slowest in memory, or the other way round: not as the parameter lies."""
    if gradient.dim() == 4:
        return gradient.contiguous()
    return gradient.T.contiguous().T if gradient.dim() == 2 else gradient


LAYOUTS = {
    "in another order": other_order,
    "expanded": lambda gradient: gradient.flatten()[:1].sum().expand_as(gradient),
    "with gaps": lambda gradient: torch.stack([gradient, gradient + 1], -1)[..., 0],
    "behind an element": lambda gradient: (
        torch.empty(gradient.numel() + 1, dtype=gradient.dtype)[1:]
        .as_strided(gradient.shape, gradient.stride(), 1)
        .copy_(gradient)
    ),
    "negated": lambda gradient: torch._neg_view(-gradient),
    "with a graph": lambda gradient: gradient.clone().requires_grad_() * 1,
}


def give_gradients_laid_out(parameters, seed, layout):
    give_gradients(parameters, seed, without=(seed,))
    for each in parameters:
        if each.grad is not None:
            each.grad = LAYOUTS[layout](each.grad)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", ["plain", "nesterov", "adam", "adamw"])
def test_gradients_in_any_layout(case, layout, dtype):
    if dtype == torch.float16 and CASES[case][0] != "SGD":
        pytest.skip("torch rounds squares to float16 in between")
    made = pair(case, dtype)
    for seed in range(3):
        for parameters, optimizer in made:
            give_gradients_laid_out(parameters, seed, layout)
            optimizer.step()
    check(made)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_lion_in_any_layout(layout, dtype):
    """The bits of gradients that lie as their parameters do."""
    made = [(each, optim.Lion(each, lr=0.1, weight_decay=0.5)) for each in (parameters_of(dtype), parameters_of(dtype))]
    for seed in range(3):
        for is_plain, (parameters, optimizer) in enumerate(made):
            give_gradients_laid_out(parameters, seed, layout)
            for each in parameters:
                if is_plain and each.grad is not None:
                    each.grad = torch.empty_like(each).copy_(each.grad).detach()
            optimizer.step()
    for one, other in zip(made[0][0], made[1][0], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("case", CASES)
def test_parameters_of_two_dtypes(case):
    name, options = CASES[case]
    made = []
    for module in (torch.optim, optim):
        parameters = [*parameters_of(torch.float64)[:2], *parameters_of(torch.float32)[2:]]
        made.append((parameters, getattr(module, name)(parameters, **options)))
    for seed in range(1, 4):
        for parameters, optimizer in made:
            for i, each in enumerate(parameters):
                each.grad = None if i == seed else parameters_of(each.dtype, seed)[i].detach()
            optimizer.step()
    for one, other in zip(made[1][0], made[0][0], strict=True):
        assert one.dtype == other.dtype
        tolerance = TOLERANCE[one.dtype]
        torch.testing.assert_close(one.detach(), other.detach(), rtol=tolerance, atol=tolerance)


def is_in_a_flat_buffer(parameter, optimizer):
    flats = [values for flat in optimizer.flat.flats for values in flat.values]
    return any(0 <= parameter.data_ptr() - each.data_ptr() < each.nbytes for each in flats)


@pytest.mark.parametrize("case", CASES)
def test_what_is_frozen_takes_no_room(case):
    """It is laid out when it is thawed, and gets memory of its own when it is frozen again; states are kept."""
    made = pair(case, torch.float64)
    (ours, optimizer), changing = made[1], made[1][0][0]
    memory = changing.data_ptr()
    for seed, is_frozen in enumerate([True, True, False, False, True, True, False]):
        for parameters, _ in made:
            parameters[0].requires_grad_(not is_frozen)
        step(made, seed, without=(0,) if is_frozen else ())
        assert is_in_a_flat_buffer(changing, optimizer) is not is_frozen
        assert all(is_in_a_flat_buffer(each, optimizer) for each in ours[1:] if each.numel())
        if seed < 4:  # later its own memory may be where it was at first
            assert (changing.data_ptr() == memory) is (seed < 2)
        assert changing.untyped_storage().nbytes() == changing.nbytes
        check(made)
        theirs, found = (tensors_of_state(each) for _, each in made)
        assert theirs.keys() == found.keys()
        for key, value in theirs.items():
            torch.testing.assert_close(found[key], value, rtol=1e-12, atol=1e-12)


def tensors_of_state(optimizer):
    """By parameter and kind, what is there; torch names momentum that it does not have."""
    state = optimizer.state_dict()["state"]
    return {(i, kind): each for i, entry in state.items() for kind, each in entry.items() if each is not None}


@pytest.mark.parametrize("direction", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_state_dicts_go_both_ways(case, direction):
    """After two steps of the one, a fresh one of the other class goes on from its state."""
    made = pair(case, groups=True)
    for seed in (1, 2):
        step(made, seed, without=(1,))
    state = made[1 - direction][1].state_dict()
    buffer = io.BytesIO()
    torch.save(state, buffer)
    assert buffer.tell() < 12000
    parameters, _ = made[direction]
    kind = type(made[direction][1])
    fresh = kind([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=7.0)
    fresh.load_state_dict(torch.load(io.BytesIO(buffer.getvalue())))
    made[direction] = parameters, fresh
    for seed in (3, 4):
        step(made, seed)
    check(made)
    ours, theirs = made[1][1].state_dict(), made[0][1].state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert {i: set(each) for i, each in ours["state"].items()} == {i: set(each) for i, each in theirs["state"].items()}
    for i, entry in theirs["state"].items():
        for name, value in entry.items():
            found = ours["state"][i][name]
            assert (found.dtype, found.device, found.shape) == (value.dtype, value.device, value.shape)
            torch.testing.assert_close(found, value, rtol=2e-6, atol=2e-6)


def test_the_state_is_empty_before_a_step_and_shows_views_after_it():
    parameters = parameters_of()
    optimizer = optim.Adam(parameters, lr=0.5)
    assert not optimizer.state
    give_gradients(parameters, 1, without=(2,))
    optimizer.step()
    assert parameters[2] not in optimizer.state
    entry = optimizer.state[parameters[0]]
    assert entry["step"] == 1
    assert entry["exp_avg"].shape == parameters[0].shape
    for each in entry.values():  # a write in place counts
        each.zero_()
    before = parameters[0].detach().clone()
    for each in parameters:
        each.grad = torch.ones_like(each)
    optimizer.step()
    torch.testing.assert_close(parameters[0].detach(), before - 0.5)
    assert entry["step"] == 1
    assert optimizer.state[parameters[1]]["step"] == 2


def test_parameters_lie_in_one_buffer_each_with_a_storage_of_its_own():
    parameters = parameters_of()
    optimizer = optim.SGD(parameters, lr=0.5)
    give_gradients(parameters, 1)
    optimizer.step()
    assert [each.data_ptr() - parameters[0].data_ptr() for each in parameters[1:3]] == [512, 1024]
    assert parameters[0].untyped_storage().nbytes() == 48
    assert parameters[4].stride() == parameters_of()[4].stride()


def test_a_group_that_gets_momentum_later():
    made = pair("plain")
    step(made, 1)
    for _, optimizer in made:
        optimizer.param_groups[0].update(momentum=0.9, dampening=0.5)
    for seed in (2, 3):
        step(made, seed, without=(1,) if seed == 2 else ())
    check(made)


@pytest.mark.parametrize("case", STATEFUL)
def test_a_group_that_is_added(case):
    made = pair(case)
    step(made, 1)
    late = [torch.nn.Parameter(torch.ones(3)) for _ in made]
    for (parameters, optimizer), parameter in zip(made, late, strict=True):
        optimizer.add_param_group({"params": [parameter], "lr": 0.25})
        parameter.grad = torch.full((3,), 0.5)
        give_gradients(parameters, 2)
        optimizer.step()
    check(made)
    torch.testing.assert_close(late[0], late[1])


@pytest.mark.parametrize("case", STATEFUL)
def test_parameters_that_move_keep_their_state(case):
    made = pair(case)
    step(made, 1)
    for parameters, _ in made:
        for each in parameters[:3]:
            each.data = each.data.clone()
    step(made, 2)
    check(made)
    parameters, optimizer = made[1]
    for each in parameters:
        each.data = each.data.double()
    give_gradients(parameters, 3)
    before = [each.detach().clone() for each in parameters]
    optimizer.step()
    assert {value.dtype for entry in optimizer.state.values() for value in entry.values()} <= {
        torch.float64,
        torch.int64,
    }
    assert all(not torch.equal(one, each) for one, each in zip(before, parameters, strict=True) if each.numel())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
@pytest.mark.parametrize("case", STATEFUL)
def test_copies_go_on_alone(case, copied):
    made = pair(case)
    step(made, 1)
    parameters, twin = copied(made[1])
    step(made, 2)
    give_gradients(parameters, 2)
    twin.step()
    check([made[0], (parameters, twin)])
    check(made)


def test_schedulers_and_a_learning_rate_in_a_tensor():
    made = pair("adamw")
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for _, optimizer in made]
    for seed in (1, 2, 3):
        step(made, seed)
        for each in schedulers:
            each.step()
    check(made)
    parameter, rate = torch.nn.Parameter(torch.zeros(2)), torch.tensor(0.5)
    optimizer = optim.SGD([parameter], lr=rate)
    parameter.grad = torch.ones(2)
    optimizer.step()
    rate.fill_(0.25)
    optimizer.step()
    assert parameter.tolist() == [-0.75] * 2


def test_hooks_and_closures_run_once():
    parameter, calls = torch.nn.Parameter(torch.zeros(2)), []
    optimizer = optim.SGD([parameter], lr=1.0)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure():
        optimizer.zero_grad()
        loss = (parameter * torch.tensor([1.0, 2.0])).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 0
    assert calls == ["before", "after"]
    assert parameter.tolist() == [-1.0, -2.0]


def test_gradients_that_stay_and_parameters_that_are_frozen():
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = optim.SGD(parameters, lr=1.0)
    parameters[0].requires_grad_(False)
    for turn in range(3):
        optimizer.zero_grad(set_to_none=False)
        if turn == 2:
            parameters[0].requires_grad_(True)
        sum((each * 2).sum() for each in parameters if each.requires_grad).backward()
        optimizer.step()
    assert [each.tolist() for each in parameters] == [[-2.0] * 2, [-6.0] * 2]


def test_lion():
    parameters, truth = parameters_of(torch.float64), [each.detach().clone() for each in parameters_of(torch.float64)]
    optimizer = optim.Lion(parameters, lr=0.1, weight_decay=0.5)
    averages = [torch.zeros_like(each) for each in truth]
    for seed in range(1, 4):
        give_gradients(parameters, seed)
        optimizer.step()
        for p, m, other in zip(truth, averages, parameters, strict=True):
            move = torch.sign(0.9 * m + 0.1 * other.grad)
            p.sub_(0.1 * (move + 0.5 * p))
            m.mul_(0.99).add_(other.grad, alpha=0.01)
    for one, other in zip(parameters, truth, strict=True):
        torch.testing.assert_close(one.detach(), other, rtol=1e-12, atol=1e-12)
    fresh = optim.Lion(parameters, lr=3.0)
    fresh.load_state_dict(optimizer.state_dict())
    torch.testing.assert_close(fresh.state[parameters[0]]["exp_avg"], averages[0], rtol=1e-12, atol=1e-12)


def test_refusals():
    parameter = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="differentiable=True is for torch"):
        optim.SGD([parameter], differentiable=True)
    with pytest.raises(ValueError, match="all groups must have the same amsgrad"):
        optim.Adam([{"params": [parameter]}, {"params": [torch.nn.Parameter(torch.zeros(1))], "amsgrad": True}])
    with pytest.raises(ValueError, match="betas must lie in"):
        optim.Lion([parameter], betas=(0.9, 1.0))
    with pytest.raises(ValueError, match="must not be negative"):
        optim.Lion([parameter], lr=-1.0)
    numbers = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    numbers.grad = torch.ones_like(numbers)
    with pytest.raises(TypeError, match=r"use torch\.optim's"):
        optim.SGD([numbers]).step()
    table = torch.nn.Embedding(3, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match=r"torch\.optim\.SparseAdam"):
        optim.Adam(table.parameters()).step()


def test_a_step_by_hand_counts_as_a_write():
    """A graph that has saved a parameter raises torch's version error, and other holders of the memory can tell."""
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = optim.SGD([parameter], lr=0.5)
    for _ in range(2):
        parameter.grad = torch.ones(4)
        before, loss = parameter._version, (parameter * parameter).sum()
        optimizer.step()
        assert parameter._version > before
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_step_that_loads_a_state_first(ranks):
    net = torch.nn.Linear(2, 1)
    torch.nn.init.ones_(net.weight)
    optimizer = mgpu_core.optim.SGD(net.parameters(), lr=0.5, momentum=0.5)
    step = mgpu_core.TrainStep(net, lambda output, _: output.sum(), optimizer, ["cpu"] * ranks, reduction="sum")
    step(torch.ones(2, 2), torch.ones(2))
    state, original, before = optimizer.state_dict(), optimizer.step, net.weight.detach().clone()
    optimizer.step = lambda *args: (optimizer.load_state_dict(state), original(*args))[1]
    step(torch.ones(2, 2), torch.ones(2))
    assert (before - net.weight).tolist() == [[1.5, 1.5]]  # the gradient is 2, and the momentum before was 2


def test_momentum_that_could_not_be_given_memory_once(monkeypatch):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = mgpu_core.optim.SGD([parameter], lr=1.0)
    parameter.grad = torch.ones(3)
    optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0.5
    with monkeypatch.context() as patch:
        patch.setattr(flat_state.DeviceState, "set_steps", fails)
        with pytest.raises(MemoryError):
            optimizer.step()
    optimizer.step()
    assert parameter.tolist() == [-1.0] * 3


def fails(*_):
    raise MemoryError


def test_an_optimizer_that_there_is_not_is_told_of_with_those_that_there_are():
    with pytest.raises(AttributeError, match="has no 'RMSprop', but SGD, Adam, AdamW and Lion"):
        _ = mgpu_core.optim.RMSprop
