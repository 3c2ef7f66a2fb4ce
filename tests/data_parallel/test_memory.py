"""Every forward pass has memory of its own, earlier graphs stay valid, and nothing outlives its graph."""

import copy
import gc
import weakref
from contextlib import suppress

import pytest
import torch
from fakes.collector import no_collector, wake_workers
from fakes.nets import Cnn, Lstm, Spy, cpu, mlp, whole
from fakes.tensors import numbers
from fakes.wrapper import Lambda
from torch import nn

from mgpu_core import DataParallel, Replicate


def test_earlier_graph_that_needs_no_parameter_stays_valid(ranks):
    plain = whole(nn.Linear(2, 2))
    net = copy.deepcopy(plain)

    def play(forward, module):
        optimizer = torch.optim.SGD(module.parameters(), 1.0)
        x = numbers(8, 2)
        first = forward(x)
        forward(x + 1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        forward(x + 2)
        (first * numbers(8, 2)).sum().backward()
        return [module.weight.grad.tolist(), module.bias.grad.tolist(), module.weight.tolist()]

    assert play(DataParallel(net, cpu(ranks)), net) == play(plain, plain)


def test_earlier_graph_that_saved_a_stepped_parameter_raises_as_on_one_device(ranks):
    net = mlp()
    wrapper = DataParallel(net, cpu(ranks))
    x = numbers(8, 4)
    first = wrapper(x)
    wrapper(x).sum().backward()
    torch.optim.SGD(net.parameters(), 0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.sum().backward()


LAYOUTS = {
    "dense": lambda: torch.tensor([2.0, 3.0]),
    "expanded": lambda: torch.tensor([2.0]).expand(2),
    "every other": lambda: torch.tensor([2.0, 0.0, 3.0, 0.0])[::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_earlier_graph_that_saved_a_buffer_survives_other_forwards(ranks, layout):
    net = Lambda(lambda self, x: self.linear(x) * self.scale)
    net.register_buffer("scale", LAYOUTS[layout]())
    wrapper = DataParallel(net, cpu(ranks))
    x = numbers(8, 2)
    first, second = wrapper(x), wrapper(x)
    with torch.no_grad():
        wrapper(x)
    (first + second).sum().backward()
    assert torch.equal(net.linear.bias.grad, 16 * net.scale)


@pytest.mark.several_ranks
def test_parameters_of_the_other_ranks_are_fresh_in_every_forward(ranks):
    spy = Spy()
    wrapper = DataParallel(spy, cpu(ranks))
    x = numbers(8, 2).requires_grad_()
    kept = [wrapper(x) for _ in range(4)]
    weights = [note["weight"] for note in spy.seen]
    assert len(set(weights)) == 4 * (ranks - 1) + 1
    assert weights.count(spy.linear.weight.data_ptr()) == 4
    del kept


@pytest.mark.several_ranks
@pytest.mark.parametrize("rows", [1, 8])
def test_a_module_that_writes_to_its_input_leaves_the_callers_tensor_alone(ranks, rows):
    net = Lambda(lambda self, x, scale, table: self.linear(x.add_(1)) * scale.mul_(2) + table.add_(1))
    x, scale, table = numbers(rows, 2), torch.tensor(3.0), numbers(2)
    kept = [x.clone(), scale.clone(), table.clone()]
    out = DataParallel(net, cpu(ranks))(x, scale, Replicate(table))
    assert torch.equal(out, net.linear(kept[0] + 1) * 6 + kept[2] + 1)
    for tensor, before in zip((x, scale, table), kept, strict=True):
        assert torch.equal(tensor, before)


@pytest.mark.several_ranks
def test_inplace_first_layer(ranks):
    net = nn.Sequential(nn.ReLU(inplace=True), whole(nn.Linear(2, 2)), nn.ReLU(inplace=True))
    x = numbers(8, 2).requires_grad_()
    DataParallel(net, cpu(ranks))(x).sum().backward()
    (wanted,) = torch.autograd.grad(nn.functional.relu(net[1](torch.relu(x))).sum(), x)
    assert torch.equal(x.grad, wanted)
    assert x.min() < 0


@pytest.mark.several_ranks
def test_gathered_outputs_are_fresh(ranks):
    net = Lambda(lambda self, x: self.linear(x) * 0 + 1)
    wrapper = DataParallel(net, cpu(ranks))
    one, two = wrapper(numbers(8, 2)), wrapper(numbers(8, 2))
    with torch.no_grad():
        one.fill_(7)
    assert two.tolist() == [[1, 1]] * 8


def live_tensors():
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


@pytest.mark.parametrize("make", [mlp, Lstm, Cnn])
def test_no_reference_cycles_after_forward_and_backward(ranks, make):
    net = make()
    x = {mlp: numbers(16, 4), Lstm: numbers(16, 3, 4), Cnn: numbers(16, 1, 4, 4)}[make]
    wrapper = DataParallel(net, cpu(ranks))

    def step():
        wrapper(x).sum().backward()
        with torch.no_grad():
            wrapper(x)
        wake_workers()

    def garbage():
        with no_collector():
            tensors = live_tensors()
            for _ in range(3):
                step()
            assert live_tensors() == tensors
            return gc.collect()

    step()
    assert 0 in [garbage() for _ in range(3)]  # threads of other tests may end meanwhile, and not each time


@pytest.mark.several_ranks
def test_replicas_end_with_the_graph(ranks):
    kept = []

    def note(self, x):
        kept.append(weakref.ref(self))
        return self.linear(x)

    wrapper = DataParallel(Lambda(note), cpu(ranks))
    with no_collector():
        out = wrapper(torch.ones(8, 2))
        wake_workers()
        assert [ref() for ref in kept] == [None] * ranks
        del out


def test_a_method_in_an_attribute_works_for_as_long_as_its_replica_lives():
    kept = []

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.run = self.double

        def double(self, x):
            return 2 * x

        def forward(self, x):
            kept.append(self)
            return self.run(x)

    DataParallel(Keeps(), cpu(2))(torch.ones(4, 1))
    methods = [each.run for each in kept]
    assert [run(3) for run in methods] == [6, 6]
    kept.clear()
    for run in methods:
        with pytest.raises(ReferenceError, match="the replica of this method is gone"):
            run(3)


@pytest.mark.several_ranks
def test_memory_of_a_module_that_keeps_its_own_method_is_freed_at_once(ranks):
    # The module is a cycle itself; but its replicas are made anew, with all parameters, in every forward.
    kept = []

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.run = self.own

        def own(self, x):
            kept.append(weakref.ref(self.linear.weight))
            return self.linear(x)

        def forward(self, x):
            return self.run(x)

    wrapper = DataParallel(Keeps(), cpu(ranks))
    with no_collector():
        wrapper(torch.ones(8, 2)).sum().backward()
        wake_workers()
        assert [ref() for ref in kept] == [None] * ranks


@pytest.mark.several_ranks
def test_handled_failure_frees_the_memory_of_the_forward_at_once(ranks):
    kept = []

    def fail(self, x):
        activation = self.linear(x)
        kept.extend([weakref.ref(activation), weakref.ref(self.linear.weight)])
        raise torch.OutOfMemoryError("as a GPU would")

    wrapper = DataParallel(Lambda(fail), cpu(ranks))
    with no_collector():
        with suppress(torch.OutOfMemoryError):
            wrapper(torch.ones(8, 2))
        wake_workers()
        assert [ref() for ref in kept] == [None] * (2 * ranks)
