"""Scatter: who gets which rows, what is copied, what is passed by reference, what is refused."""

from collections import namedtuple
from types import MappingProxyType

import numpy as np
import pytest
import torch
from fakes.nets import chunks, cpu
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

import mgpu_core
from mgpu_core import Replicate, _core, gather, scatter, scatter_kwargs
from mgpu_core.parallel.scatter_inputs import scatter_objects
from mgpu_core.ranks.team import Team

Pair = namedtuple("Pair", "x mask")


def rows_of(parts):
    return [part.tolist() for part in parts]


@pytest.mark.parametrize("rows", [1, 2, 7, 9, 16])
def test_sizes_differ_by_at_most_one(ranks, rows):
    x = torch.arange(rows)
    parts = scatter(x, cpu(ranks))
    assert rows_of(parts) == rows_of(x.split(chunks(rows, ranks)))


def test_nine_rows_use_eight_ranks():
    assert [len(part) for part in scatter(torch.arange(9), cpu(8))] == [2, 1, 1, 1, 1, 1, 1, 1]


def test_tuple_for_a_tensor_and_list_for_the_rest(ranks):
    x = torch.arange(8)
    assert type(scatter(x, cpu(ranks))) is tuple
    for nest in ([x], (x,), {"x": x}, Pair(x, x), 3, None, "text", [], (), {}):
        parts = scatter(nest, cpu(ranks))
        assert type(parts) is list
        assert len(parts) == ranks
        assert all(type(part) is type(nest) for part in parts)


@pytest.mark.several_ranks
def test_non_tensors_go_by_reference(ranks):
    thing = object()
    for part in scatter([thing, {"thing": thing}, torch.arange(8)], cpu(ranks)):
        assert part[0] is thing
        assert part[1]["thing"] is thing


def test_mapping_that_is_no_dict_goes_through():
    # torch passes it by reference; a module that takes one must not stop working.
    parts = scatter([torch.arange(4), MappingProxyType({"temperature": 2})], cpu(2))
    assert [part[1]["temperature"] for part in parts] == [2, 2]


def test_nest_is_cut_at_the_same_rows_everywhere():
    x = torch.arange(10).reshape(5, 2)
    y = torch.arange(5.0)
    parts = scatter([Pair(x, y), {"y": [y]}], cpu(2))
    assert rows_of([part[0].x for part in parts]) == [x[:3].tolist(), x[3:].tolist()]
    assert rows_of([part[0].mask for part in parts]) == [[0, 1, 2], [3, 4]]
    assert rows_of([part[1]["y"][0] for part in parts]) == [[0, 1, 2], [3, 4]]


DTYPES = [
    torch.bool,
    torch.int8,
    torch.int16,
    torch.uint8,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.float64,
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_any_dtype_and_dimension(dtype, dim):
    x = (torch.arange(30).reshape(5, 6) % 3).to(dtype)
    parts = scatter(x, cpu(3), dim)
    wanted = x.split(chunks(x.size(dim), 3), dim)
    assert all(torch.equal(part, chunk) for part, chunk in zip(parts, wanted, strict=True))
    assert torch.equal(gather(parts, "cpu", dim), x)


@pytest.mark.cpu_only("gives a replica, or adds up, tensors of several ranks without moving them")
@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_channels_last_stays(dim):
    x = torch.arange(4.0 * 3 * 5 * 6).reshape(4, 3, 5, 6).to(memory_format=torch.channels_last)
    parts = scatter(x, cpu(2), dim)
    assert all(part.is_contiguous(memory_format=torch.channels_last) for part in parts)
    assert torch.equal(torch.cat(parts, dim), x)


@pytest.mark.cpu_only("gives a replica, or adds up, tensors of several ranks without moving them")
def test_views_of_all_sorts():
    x = torch.arange(24.0).reshape(4, 6)
    for view in (
        x.t(),
        x[:, ::2],
        x.expand(4, 6),
        x[:1].expand(4, 6),
        x[1:3],
        torch.view_as_complex(x.view(4, 3, 2)).conj(),
    ):
        parts = scatter(view, cpu(3))
        assert torch.equal(torch.cat(parts), view)


def objects(x, y, mask):
    return {"inputs": (x,), "kwargs": mask, "target": y}


@pytest.mark.cpu_only("ranks of one device are given views")
@pytest.mark.several_ranks
@pytest.mark.parametrize("shares", [None, "double"])
@pytest.mark.parametrize("rows", [1, 2, 9, 16])
def test_objects_of_a_step_are_cut_into_views(ranks, shares, rows):
    """Bare tensors by the short way, a nest by the long one: the same rows, and no copy."""
    team = Team.of(cpu(ranks))
    shares = None if shares is None else [2.0] + [1.0] * (ranks - 1)
    x, y = torch.arange(3.0 * rows).reshape(rows, 3), torch.arange(rows)
    wanted = [part.tolist() for part in scatter(x, cpu(ranks), shares=shares)]
    for mask in ({}, {"mask": x, "flag": True}):
        parts, counts = scatter_objects(objects(x, y, mask), team.devices, shares=shares)
        assert counts == [len(part) for part in wanted]
        for (args, kwargs, target), part in zip(parts, wanted, strict=True):
            assert type(args) is tuple
            assert args[0].tolist() == part
            assert target.tolist() == [row[0] / 3 for row in part]
            assert kwargs.keys() == mask.keys()
            views = [args[0], target, *(each for each in kwargs.values() if torch.is_tensor(each))]
            assert all(each.untyped_storage().data_ptr() in (x.untyped_storage().data_ptr(),
                       y.untyped_storage().data_ptr()) for each in views)  # fmt: skip


@pytest.mark.cpu_only("ranks of one device are given views")
def test_what_a_graph_goes_through_is_no_view():
    team, x = Team.of(cpu(2)), torch.ones(4, 2, requires_grad=True)
    parts, _ = scatter_objects(objects(x, torch.ones(4), {}), team.devices)
    assert parts[0][0][0].untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert parts[0][0][0].grad_fn is not None


@pytest.mark.cpu_only("ranks of one device are given views")
@pytest.mark.parametrize("dim", [0, -1])
def test_objects_of_a_step_must_agree(dim):
    team = Team.of(cpu(2))
    with pytest.raises(ValueError, match=r"inputs\[0\] has shape \(4, 2\), target has shape \(3,\)"):
        scatter_objects(objects(torch.ones(4, 2), torch.ones(3), {}), team.devices, dim)
    with pytest.raises(IndexError, match="cannot be cut along dimension 1"):
        scatter_objects(objects(torch.ones(4), torch.ones(4), {}), team.devices, 1)
    with pytest.raises(ValueError, match="one number per rank: 2 ranks, 1 shares"):
        scatter_objects(objects(torch.ones(4), torch.ones(4), {}), team.devices, shares=[1.0])


@pytest.mark.several_ranks
@pytest.mark.parametrize("rows", [1, 8])
def test_chunks_are_fresh_memory(ranks, rows):
    x = torch.arange(float(rows))
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            for part in scatter(x, cpu(ranks)):
                part.fill_(-1)
    assert x.tolist() == list(range(rows))


def test_one_rank_passes_a_tensor_on_its_device_as_it_is():
    x = torch.arange(3)
    assert scatter(x, cpu(1))[0] is x
    assert scatter([{"x": x}], cpu(1))[0][0]["x"] is x


@pytest.mark.cpu_only("packed sequences keep their lengths on the CPU, and are made here with a default device")
def test_one_rank_takes_what_cannot_be_cut():
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    sparse = torch.eye(2).to_sparse()
    assert scatter([packed, sparse, torch.ones(3), torch.ones(4)], cpu(1))[0][:2] == [packed, sparse]


@pytest.mark.cpu_only("gives a replica, or adds up, tensors of several ranks without moving them")
@pytest.mark.several_ranks
def test_scalar_tensors_are_copied_to_every_rank(ranks):
    scale = torch.tensor(3.0, requires_grad=True)
    parts = scatter([torch.arange(8), scale], cpu(ranks))
    assert [part[1].item() for part in parts] == [3.0] * ranks
    sum(part[1] * (rank + 1) for rank, part in enumerate(parts)).backward()
    assert scale.grad.item() == ranks * (ranks + 1) / 2


@pytest.mark.cpu_only("gives a replica, or adds up, tensors of several ranks without moving them")
def test_replicate_gives_every_rank_the_whole(ranks):
    table = torch.arange(6.0, requires_grad=True)
    marked = Replicate({"table": table, "names": ["a"]})
    parts = scatter([torch.arange(8), marked], cpu(ranks))
    for part in parts:
        assert torch.equal(part[1]["table"], table)
        assert part[1]["names"] == ["a"]
    sum(part[1]["table"].sum() for part in parts).backward()
    assert table.grad.tolist() == [ranks] * 6


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("make", [lambda x: x, Replicate], ids=["scalar", "Replicate"])
def test_copies_are_fresh_memory_on_every_rank(make, grad):
    # "copied to every rank": a module that writes to its copy must not write to the caller's tensor on rank 0 alone.
    tensor = torch.tensor(1.0)
    with torch.set_grad_enabled(grad):
        parts = scatter([make(tensor)], cpu(3))
    assert len({part[0].data_ptr() for part in parts} | {tensor.data_ptr()}) == 4
    parts[0][0].add_(1)
    assert tensor.item() == 1


def test_writing_to_the_copy_of_a_leaf_that_requires_grad_leaves_the_leaf_alone():
    leaf = torch.tensor(1.0, requires_grad=True)
    scatter(leaf, cpu(2))[0].mul_(5)
    assert leaf.item() == 1


@pytest.mark.cpu_only("packed sequences keep their lengths on the CPU, and are made here with a default device")
@pytest.mark.parametrize("enforce_sorted", [True, False])
@pytest.mark.several_ranks
def test_replicate_of_a_packed_sequence(ranks, enforce_sorted):
    data = torch.ones(5, requires_grad=True)
    packed = pack_sequence([data[:3], data[3:]] if enforce_sorted else [data[3:], data[:3]], enforce_sorted)
    parts = scatter([torch.arange(8), Replicate(packed)], cpu(ranks))
    for rank, (_, mine) in enumerate(parts):
        assert all(mine[i] is None if packed[i] is None else mine[i].tolist() == packed[i].tolist() for i in range(4))
        mine.data.detach().mul_(2 + rank)
    assert packed.data.tolist() == [1] * 5
    assert [mine.data.sum().item() for _, mine in parts] == [5 * (2 + rank) for rank in range(len(parts))]
    sum(mine.data.sum() for _, mine in parts).backward()
    assert data.grad.tolist() == [len(parts)] * 5


def test_replicate_of_what_cannot_be_cut():
    # A graph's adjacency matrix is the very thing that every rank should get whole.
    sparse = torch.eye(3).to_sparse()
    parts = scatter([torch.arange(4), Replicate([sparse, None, 3])], cpu(2))
    for part in parts:
        assert torch.equal(part[1][0].to_dense(), torch.eye(3))
        assert part[1][1:] == [None, 3]


def test_replicate_in_replicate_is_unwrapped_on_any_number_of_ranks(ranks):
    parts = scatter([torch.arange(8), Replicate({"a": Replicate([torch.ones(3), 5])})], cpu(ranks))
    for part in parts:
        table, number = part[1]["a"]
        assert table.tolist() == [1, 1, 1]
        assert number == 5


UNREADABLE = {
    "meta": lambda: torch.ones(4, device="meta"),
    "meta scalar": lambda: torch.tensor(1.0, device="meta"),
    "Replicate of meta": lambda: Replicate([torch.ones(3, device="meta")]),
    "Replicate of nested": lambda: Replicate(torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_cannot_be_copied_names_its_path(kind):
    with pytest.raises(TypeError) as caught:
        scatter_kwargs((torch.ones(4),), {"x": [0, UNREADABLE[kind]()]}, cpu(2))
    assert caught.value.__notes__ == ["while scattering kwargs['x'][1] along dimension 0"]


@pytest.mark.cpu_only("gives a replica, or adds up, tensors of several ranks without moving them")
def test_backward_puts_the_gradient_together(ranks):
    x = torch.arange(14.0).reshape(7, 2).requires_grad_()
    parts = scatter(x, cpu(ranks))
    sum((part * part).sum() for part in parts).backward()
    assert torch.equal(x.grad, 2 * x.detach())


def test_a_chunk_that_nobody_used_has_a_zero_gradient():
    x = torch.ones(4, requires_grad=True)
    scatter(x, cpu(2))[1].sum().backward()
    assert x.grad.tolist() == [0, 0, 1, 1]


@pytest.mark.cpu_only("gives a replica, or adds up, tensors of several ranks without moving them")
def test_double_backward():
    x = torch.arange(1.0, 6.0, requires_grad=True)
    loss = sum((part**3).sum() for part in scatter(x, cpu(2)))
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    assert first.tolist() == [3 * value**2 for value in range(1, 6)]
    (second,) = torch.autograd.grad(first.sum(), x)
    assert second.tolist() == [6 * value for value in range(1, 6)]


def test_gradcheck():
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: scatter(x, cpu(3)), x)
    assert torch.autograd.gradgradcheck(lambda x: scatter(x, cpu(3), 1), x)


def test_different_numbers_of_rows_name_both():
    with pytest.raises(ValueError, match=r"differ in their number of rows along dimension 0") as caught:
        scatter_kwargs((0, {"x": torch.ones(6, 2)}), {"mask": [torch.ones(5)]}, cpu(2))
    for text in ("inputs[1]['x'] has shape (6, 2)", "kwargs['mask'][0] has shape (5,)", "mgpu_core.Replicate"):
        assert text in str(caught.value)
    with pytest.raises(ValueError, match=r"inputs\[0\] has shape \(2, 3\), inputs\[1\] has shape \(2, 4\)"):
        scatter([torch.ones(2, 3), torch.ones(2, 4)], cpu(2), dim=1)


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
@pytest.mark.parametrize("rows", [7, 2])
def test_a_keyword_with_one_number_per_rank_is_dealt_out(rows, shape):
    """As transformers' Trainer passes what each replica divides by: torch's chunks, where nothing is dropped."""
    numbers = torch.arange(3.0).reshape(shape)
    x = torch.arange(float(rows))
    kwargs = {"numbers": numbers, "x": x, "nested": {"mask": x}}
    inputs, parts = scatter_kwargs((), kwargs, cpu(3))
    assert len(inputs) == len(parts) == min(rows, 3)
    assert [number for part in parts for number in part["x"].tolist()] == x.tolist()
    assert [number for part in parts for number in part["nested"]["mask"].tolist()] == x.tolist()
    assert [part["numbers"].tolist() for part in parts] == [[each] for each in numbers.tolist()[: len(parts)]]
    with pytest.raises(ValueError, match="differ"):  # by position, or to a step, they are rows of a batch
        scatter_kwargs((numbers, x), {}, cpu(3))
    with pytest.raises(ValueError, match="differ"):
        scatter_kwargs((x,), {"numbers": torch.ones(4)}, cpu(3))
    with pytest.raises(ValueError, match="differ"):
        scatter_kwargs((x,), {"rows": torch.ones(3, 2)}, cpu(3))


def test_zero_rows_beside_some_are_different_numbers():
    with pytest.raises(ValueError, match="differ"):
        scatter([torch.ones(0), torch.ones(3)], cpu(2))


def test_nothing_is_copied_before_a_refusal():
    _core.reset_counters()
    with pytest.raises(ValueError, match="differ"):
        scatter([torch.ones(4), torch.tensor(1.0), torch.ones(5)], cpu(2))
    with pytest.raises(IndexError):
        scatter([torch.ones(4, 4), torch.ones(4)], cpu(2), dim=1)
    with pytest.raises(TypeError):
        scatter([torch.ones(4), torch.eye(4).to_sparse()], cpu(2))
    assert _core.counters() == {}


def test_dimension_that_is_not_there():
    with pytest.raises(IndexError, match=r"inputs\[0\]\['x'\] has shape \(4,\) and cannot be cut along dimension 1"):
        scatter([{"x": torch.ones(4)}], cpu(2), dim=1)


@pytest.mark.cpu_only("packed sequences keep their lengths on the CPU, and are made here with a default device")
def test_packed_nested_and_sparse_inputs_are_refused_with_path():
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    with pytest.raises(TypeError, match=r"inputs\[1\] is a PackedSequence"):
        scatter([torch.ones(2), packed], cpu(2))
    with pytest.raises(TypeError, match=r"kwargs\['adj'\] is a sparse tensor"):
        scatter_kwargs((), {"adj": torch.eye(2).to_sparse()}, cpu(2))


def test_zero_rows_go_to_rank_0(ranks):
    parts = scatter(torch.ones(0, 3), cpu(ranks))
    assert [tuple(part.shape) for part in parts] == [(0, 3)]


@pytest.mark.several_ranks
def test_fewer_rows_than_ranks_with_keyword_flags(ranks):
    parts, kwargs = scatter_kwargs((torch.ones(1, 2), 3), {"flag": True, "x": torch.ones(1)}, cpu(ranks))
    assert len(parts) == len(kwargs) == 1
    assert parts[0][1] == 3
    assert kwargs[0]["flag"] is True
    assert kwargs[0]["x"].tolist() == [1]


def test_scatter_kwargs_gives_tuples_and_dicts(ranks):
    parts, kwargs = scatter_kwargs((torch.arange(8),), {"flag": 1}, cpu(ranks))
    assert type(parts) is type(kwargs) is tuple
    assert [type(part) for part in parts] == [tuple] * ranks
    assert kwargs == ({"flag": 1},) * ranks
    assert len({id(each) for each in kwargs}) == ranks
    assert scatter_kwargs((), {}, cpu(ranks)) == ((), ())
    assert scatter_kwargs((), None, cpu(ranks)) == ((), ())
    assert scatter_kwargs((), {"a": 1}, cpu(ranks)) == (((),) * ranks, ({"a": 1},) * ranks)
    assert scatter_kwargs((1,), None, cpu(ranks)) == (((1,),) * ranks, ({},) * ranks)


def test_shares():
    assert rows_of(scatter(torch.arange(6), cpu(2), shares=[2, 1])) == [[0, 1, 2, 3], [4, 5]]
    assert rows_of(scatter(torch.arange(4), cpu(3), shares=[0.25, 0.25, 0.5])) == [[0], [1], [2, 3]]
    parts, _ = scatter_kwargs((torch.arange(6),), None, cpu(2), shares=[1, 2])
    assert rows_of([part[0] for part in parts]) == [[0, 1], [2, 3, 4, 5]]


def test_shares_of_other_numbers_are_read_at_each_call():
    shares = [np.array(2.0), torch.tensor(1.0)]
    assert rows_of(scatter(torch.arange(6), cpu(2), shares=shares)) == [[0, 1, 2, 3], [4, 5]]
    shares[1].fill_(4.0)
    assert rows_of(scatter(torch.arange(6), cpu(2), shares=shares)) == [[0, 1], [2, 3, 4, 5]]


@pytest.mark.parametrize("shares", ["ab", 3, iter([1, 1]), ["a", 1], [None, 1]])
def test_shares_that_are_no_numbers(shares):
    with pytest.raises(TypeError, match="shares"):
        scatter(torch.arange(6), cpu(2), shares=shares)


class Own(tuple):
    __slots__ = ()

    def __new__(cls, one, other):
        return super().__new__(cls, (one, other))


class Numbered(list):
    def __init__(self, *, number):
        super().__init__()
        self.number = number


def test_sequences_with_a_constructor_of_their_own():
    """A tuple that cannot be made again becomes a plain one, as torch's; a list is copied, and filled anew."""
    numbered = Numbered(number=3)
    numbered.append(torch.arange(4))
    for given_one, kind in ((Own(torch.arange(4), 5), tuple), (numbered, Numbered)):
        parts = scatter(given_one, cpu(2))
        assert [type(part) for part in parts] == [kind, kind]
        assert [part[0].tolist() for part in parts] == [[0, 1], [2, 3]]
    assert [part.number for part in parts] == [3, 3]


@pytest.mark.cpu_only("gives a replica, or adds up, tensors of several ranks without moving them")
@settings(max_examples=60, deadline=None, database=None)
@given(st.integers(0, 40), st.lists(st.integers(1, 50), min_size=2, max_size=6))
def test_shares_are_kept_within_a_row_and_lose_none(rows, shares):
    parts = scatter(torch.arange(rows), cpu(len(shares)), shares=shares)
    assert torch.cat(parts).tolist() == list(range(rows))
    if len(parts) == len(shares) and min(map(len, parts)) > 1:
        for part, share in zip(parts, shares, strict=True):
            assert abs(len(part) - rows * share / sum(shares)) <= 1


@pytest.mark.parametrize("shares", [[1], [1, 2, 3], [0, 1], [-1, 1], [float("nan"), 1], [float("inf"), 1]])
def test_bad_shares(shares):
    with pytest.raises(ValueError, match="share"):
        scatter(torch.arange(4), cpu(2), shares=shares)


@pytest.mark.parametrize("devices", [[], ["cpu", "nowhere"], ["cpu", "cuda:99"], [-2, "cpu"]])
def test_bad_devices(devices):
    with pytest.raises(ValueError, match=r"device|target_gpus is empty"):
        scatter(torch.arange(4), devices)


@pytest.mark.parametrize("devices", ["cpu", 0, torch.device("cpu"), [None], [1.5], [True]])
def test_things_that_are_no_list_of_devices(devices):
    with pytest.raises(TypeError, match=r"device|target_gpus is a list"):
        mgpu_core.scatter(torch.arange(4), devices)


@pytest.mark.cpu_only("says cpu, or the core's algorithms, in what it expects; tests/accelerator has its like")
def test_exact_bytes():
    _core.reset_counters()
    scatter([torch.ones(5, 2), torch.ones(5, dtype=torch.int64), torch.tensor(1.0)], cpu(2))
    assert _core.counters()["scatter", "direct", 0] == (2, 3 * 8 + 3 * 8)
    assert _core.counters()["scatter", "direct", 1] == (2, 2 * 8 + 2 * 8)
    assert _core.counters()["broadcast", "direct", 1] == (1, 4)
