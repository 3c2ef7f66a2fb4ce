"""Replicate: twins wired to their own rank's tensors, whatever the module does with its attributes."""

import inspect
import io
from types import MethodType

import pytest
import torch
from fakes.nets import Cnn, Lstm, Polynomial, Spy, Tied, cpu, mlp, whole
from torch import nn

from mgpu_core import _core, replicate
from mgpu_core.parallel.replicate_modules import plain_copies
from mgpu_core.ranks.team import Team


class Own(nn.Linear):
    """As torch documents it: a module with a say in how it is copied."""

    calls = 0

    def _replicate_for_data_parallel(self):
        Own.calls += 1
        replica = super()._replicate_for_data_parallel()
        replica.mark = Own.calls
        return replica


class Counting(nn.Linear):
    """A module that looks at what is assigned to it."""

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        self.__dict__.setdefault("assigned", []).append(name)


class Methods(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = whole(nn.Linear(2, 2))
        self.run = self.own
        self.below = self.inner.forward
        self.foreign = [].append
        self.inner.forward = MethodType(type(self.inner).forward, self.inner)

    def own(self, x):
        return self.below(x) * 2

    def forward(self, x):
        return self.run(x)


def tensors_of(replica):
    """The parameters of a twin by their names, tied ones by all of theirs."""
    return dict(replica.named_parameters(remove_duplicate=False))


@pytest.mark.parametrize("make", [mlp, Cnn, Lstm, Tied, Spy])
def test_twins_hold_equal_tensors_rank_0_the_originals(make, ranks):
    net = make()
    replicas = replicate(net, cpu(ranks))
    assert len(replicas) == ranks
    for rank, replica in enumerate(replicas):
        assert type(replica) is type(net)
        assert replica is not net
        found = tensors_of(replica)
        assert found.keys() == dict(net.named_parameters(remove_duplicate=False)).keys()
        for name, tensor in net.named_parameters(remove_duplicate=False):
            copy = found[name]
            module, _, last = name.rpartition(".")
            assert getattr(replica.get_submodule(module), last) is copy
            assert torch.equal(copy, tensor)
            assert isinstance(copy, nn.Parameter)
            assert not copy.is_leaf
            assert copy.requires_grad
            assert (copy.data_ptr() == tensor.data_ptr()) == (rank == 0), name
        for name, buffer in net.named_buffers():
            copy = replica.get_buffer(name)
            assert torch.equal(copy, buffer)
            assert (copy.data_ptr() == buffer.data_ptr()) == (rank == 0), name


def test_twins_share_no_memory_with_each_other():
    replicas = replicate(Cnn(), cpu(5))
    pointers = [tensor.data_ptr() for replica in replicas for tensor in tensors_of(replica).values()]
    assert len(pointers) == len(set(pointers)) == 5 * 6


def test_submodules_are_the_twins_of_this_rank():
    net = mlp()
    one, two = replicate(net, cpu(2))
    assert not {*map(id, one.modules())} & ({*map(id, two.modules())} | {*map(id, net.modules())})
    assert len(list(one.modules())) == len(list(net.modules()))


def test_a_module_that_comes_twice_has_one_twin():
    shared = nn.Linear(2, 2)
    net = nn.Sequential(shared, nn.ReLU(), shared)
    for replica in replicate(net, cpu(3)):
        assert replica[0] is replica[2]


def test_tied_weights_are_one_tensor():
    for replica in replicate(Tied(), cpu(3)):
        assert replica.out.weight is replica.embedding.weight


def test_shared_buffer_is_one_tensor():
    net = nn.ModuleList([nn.Module(), nn.Module()])
    net[0].register_buffer("table", torch.ones(2))
    net[1].register_buffer("table", net[0].table)
    for replica in replicate(net, cpu(2)):
        assert replica[0].table is replica[1].table


def test_gradients_are_summed_over_the_ranks():
    net = whole(nn.Linear(2, 2))
    for rank, replica in enumerate(replicate(net, cpu(3))):
        (replica.weight.sum() * (rank + 1)).backward()
    assert net.weight.grad.tolist() == [[6, 6], [6, 6]]
    assert net.bias.grad is None


def test_detached_twins_have_no_graph():
    for replica in replicate(mlp(), cpu(3), detach=True)[1:]:
        assert not any(tensor.requires_grad for tensor in tensors_of(replica).values())


def test_detached_by_name_and_position():
    assert replicate(network=mlp(), devices=cpu(2), detach=True)[1][0].weight.grad_fn is None
    assert replicate(mlp(), cpu(2))[1][0].weight.grad_fn is not None


@pytest.mark.cpu_only("gives a replica, or adds up, tensors of several ranks without moving them")
def test_own_way_of_copying_is_called_once_per_rank():
    Own.calls = 0
    replicas = replicate(nn.Sequential(Own(2, 2), nn.ReLU()), cpu(3))
    assert sorted(replica[0].mark for replica in replicas) == [1, 2, 3]
    assert replicas[1][0](torch.ones(1, 2)).shape == (1, 2)


@pytest.mark.cpu_only("gives a replica, or adds up, tensors of several ranks without moving them")
def test_own_setattr_sees_the_tensors():
    for replica in replicate(Counting(2, 2), cpu(2)):
        assert replica.assigned[-2:] == ["weight", "bias"]
        assert replica(torch.ones(1, 2)).requires_grad


@pytest.mark.cpu_only("gives a replica, or adds up, tensors of several ranks without moving them")
def test_bound_methods_are_bound_to_the_twin():
    net = Methods()
    x = torch.tensor([[1.0, 2.0]])
    for replica in replicate(net, cpu(3)):
        assert replica.run.__self__ is replica
        assert replica.below.__self__ is replica.inner
        assert replica.inner.forward.__self__ is replica.inner
        assert replica.foreign is net.foreign
        assert torch.equal(replica(x), net(x))
    assert net.run.__self__ is net


def test_bound_methods_of_a_twin_are_methods():
    replica = replicate(Methods(), cpu(2))[1]
    assert replica.run.__func__ is Methods.own
    assert list(inspect.signature(replica.run).parameters) == ["x"]


def test_bound_methods_of_a_twins_twin_are_its_own():
    for twin in replicate(Methods(), cpu(2)):
        for again in replicate(twin, cpu(2)):
            assert again.run.__self__ is again


def test_absent_parameters_buffers_and_children_stay_none():
    net = nn.Linear(2, 2, bias=False)
    net.register_buffer("table", None)
    net.register_module("child", None)
    for replica in replicate(net, cpu(2)):
        assert replica.bias is replica.table is replica.child is None


def test_frozen_parameters_and_integer_buffers():
    net = Cnn()
    net.conv.weight.requires_grad_(False)
    for rank, replica in enumerate(replicate(net, cpu(3))):
        assert not replica.conv.weight.requires_grad or rank == 0
        assert replica.conv.weight.grad_fn is None
        assert replica.norm.num_batches_tracked.dtype is torch.int64
        assert replica.conv.bias.requires_grad


def test_buffers_that_require_grad():
    net = nn.Module()
    net.register_buffer("scale", torch.tensor([2.0, 3.0], requires_grad=True))
    for rank, replica in enumerate(replicate(net, cpu(3))):
        (replica.scale * (rank + 1)).sum().backward()
    assert net.scale.grad.tolist() == [6, 6]


LAYOUTS = {
    "expanded": lambda: torch.tensor([[1.0], [2.0]]).expand(2, 3),
    "every other": lambda: torch.arange(12.0).reshape(2, 6)[:, ::2],
    "transposed": lambda: torch.arange(6.0).reshape(3, 2).t(),
    "channels_last": lambda: torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "empty": lambda: torch.empty(0, 3),
    "scalar": lambda: torch.tensor(3.0),
    "conjugated": lambda: torch.tensor([1 + 2j]).conj(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["parameter", "frozen", "buffer"])
def test_any_layout_is_copied_and_the_original_not_written(kind, layout):
    tensor = LAYOUTS[layout]()
    net = nn.Module()
    if kind == "buffer":
        net.register_buffer("t", tensor)
    else:
        net.t = nn.Parameter(tensor, requires_grad=kind == "parameter")
    before = net.t._version
    for replica in replicate(net, cpu(3)):
        assert torch.equal(replica.t, tensor)
        assert replica.t.shape == tensor.shape
    # Writing the original to itself would make every older graph that saved it invalid.
    assert net.t._version == before


@pytest.mark.cpu_only("gives a replica, or adds up, tensors of several ranks without moving them")
def test_channels_last_stays():
    net = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    for replica in replicate(net, cpu(3)):
        assert replica.weight.is_contiguous(memory_format=torch.channels_last)


def test_sparse_buffer_is_copied_as_in_torch():
    # torch's broadcast_coalesced takes sparse tensors: a graph network may keep its adjacency matrix as a buffer.
    net = nn.Linear(2, 2)
    net.register_buffer("adjacency", torch.eye(2).to_sparse())
    for replica in replicate(net, cpu(2)):
        assert replica.adjacency.to_dense().tolist() == [[1, 0], [0, 1]]


def test_writes_of_rank_0_to_its_buffers_reach_the_original():
    net = nn.Module()
    net.register_buffer("count", torch.zeros(1))
    for rank, replica in enumerate(replicate(net, cpu(3))):
        replica.count.add_(rank + 1)
    assert net.count.item() == 1


def test_writes_to_rank_0s_parameters_reach_the_original():
    net = whole(nn.Linear(1, 1))
    replica = replicate(net, cpu(2))[0]
    with torch.no_grad():
        replica.weight.fill_(7)
    assert net.weight.item() == 7


def test_lazy_modules_are_refused_before_anything_is_copied():
    net = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))
    _core.reset_counters()
    with pytest.raises(ValueError, match="Run a dummy forward pass"):
        replicate(net, cpu(2))
    assert _core.counters() == {}


@pytest.mark.cpu_only("gives a replica, or adds up, tensors of several ranks without moving them")
@pytest.mark.filterwarnings("ignore")
def test_script_module_inside_a_python_module():
    net = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    outer = nn.Sequential(net, nn.Linear(2, 2))
    for replica in replicate(outer, cpu(2)):
        assert replica(torch.ones(1, 2)).shape == (1, 2)


@pytest.mark.cpu_only("gives a replica, or adds up, tensors of several ranks without moving them")
def test_a_twin_of_a_twin():
    net = Polynomial()
    x = torch.ones(1, 3)
    for twin in replicate(net, cpu(2)):
        for again in replicate(twin, cpu(2)):
            again(x).sum().backward()
    plain = Polynomial()
    (plain(x).sum() * 4).backward()
    assert torch.equal(net.first.weight.grad, plain.first.weight.grad)


def test_replicas_can_be_saved_and_loaded():
    for net in (mlp(), Cnn(), Methods()):
        stream = io.BytesIO()
        replicas = replicate(net, cpu(2))
        torch.save(replicas, stream)
        stream.seek(0)
        loaded = torch.load(stream, weights_only=False)
        for replica, other in zip(replicas, loaded, strict=True):
            for name, tensor in tensors_of(replica).items():
                assert torch.equal(tensors_of(other)[name], tensor)


@pytest.mark.cpu_only("says cpu, or the core's algorithms, in what it expects; tests/accelerator has its like")
def test_exact_bytes(ranks):
    net = Cnn()
    _core.reset_counters()
    replicate(net, cpu(ranks))
    parameters = 4 * sum(p.numel() for p in net.parameters())
    buffers = 4 * 3 * 2 + 8
    found: dict[int, int] = {}
    for (operation, algorithm, rank), (_, nbytes) in _core.counters().items():
        assert (operation, algorithm) == ("broadcast", "direct")
        found[rank] = found.get(rank, 0) + nbytes
    assert found == dict.fromkeys(range(1, ranks), parameters + buffers)
    _core.reset_counters()
    replicate(net, cpu(ranks), detach=True)
    assert {rank: nbytes for (_, _, rank), (_, nbytes) in _core.counters().items()} == found


def test_plain_copies_have_no_gradients():
    tensors = [torch.ones(2, requires_grad=True), torch.ones(3)]
    found = plain_copies(tensors, Team.of(cpu(2)))
    assert not any(each.requires_grad for row in found for each in row)
    assert found[0][0].data_ptr() == tensors[0].data_ptr()
    assert [[each.tolist() for each in row] for row in found] == [[[1, 1], [1, 1, 1]]] * 2
