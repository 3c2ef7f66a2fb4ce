"""Gather: tensors are joined, equal leaves stay, everything else is an error that names it."""

import dataclasses
import re
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from fakes.nets import chunks, cpu
from torch.nn.utils.rnn import pack_sequence

from mgpu_core import _core, gather, scatter

Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Result:
    logits: Any
    name: str = "r"


class Doubled(namedtuple("Doubled", "a b")):
    def __new__(cls, a):
        return super().__new__(cls, a, a)


def parts(ranks, rows=9):
    return list(torch.arange(2.0 * rows).reshape(rows, 2).split(chunks(rows, ranks)))


def test_tensors_are_joined_in_fresh_memory(ranks):
    given = parts(ranks)
    whole = gather(given, "cpu")
    assert whole.tolist() == torch.arange(18.0).reshape(9, 2).tolist()
    whole.fill_(0)
    assert given[0][0].tolist() == [0, 1]


@pytest.mark.parametrize("target", ["cpu", torch.device("cpu")])
def test_names_of_the_cpu_without_a_warning(target, recwarn):
    assert gather(parts(2), target).device.type == "cpu"
    assert not recwarn.list


def test_minus_one_is_the_cpu_with_torchs_warning():
    with pytest.warns(FutureWarning, match="Using -1 to represent CPU tensor is deprecated"):
        assert len(gather(parts(2), -1)) == 9


def test_every_structure(ranks):
    tensors = parts(ranks)

    def check(make, *pick):
        whole = gather([make(tensor) for tensor in tensors], "cpu")
        assert type(whole) is type(make(tensors[0]))
        for each in pick:
            assert torch.equal(each(whole), torch.cat(tensors))
        return whole

    check(lambda t: [t, [t]], lambda w: w[0], lambda w: w[1][0])
    check(lambda t: (t, (t,), ()), lambda w: w[0], lambda w: w[1][0])
    check(lambda t: {"a": t, 3: t}, lambda w: w["a"], lambda w: w[3])
    assert list(check(lambda t: OrderedDict(b=t, a=t), lambda w: w["a"])) == ["b", "a"]
    assert check(lambda t: defaultdict(list, a=t), lambda w: w["a"])["new"] == []
    check(lambda t: Pair(t, [t]), lambda w: w.x, lambda w: w.y[0])
    check(lambda t: Result([t]), lambda w: w.logits[0])
    check(lambda t: t.max(1) and torch.return_types.max((t, t)), lambda w: w.values, lambda w: w.indices)


def test_equal_leaves_stay():
    thing = object()
    for leaf in (None, 3, 2.5, "text", True, b"b", torch.float32, torch.device("cpu"), thing, {1}, float("nan")):
        whole = gather([[leaf, part] for part in parts(3)], "cpu")
        assert whole[0] is leaf


def test_equal_arrays_are_equal_leaves():
    numpy = pytest.importorskip("numpy")
    whole = gather([[numpy.arange(3), part] for part in parts(2)], "cpu")
    assert whole[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("shapes", [((3,), (2, 3)), ((1,), (3,)), ((0,), (1,)), ((), (2,))])
def test_arrays_of_different_shapes_are_unequal(shapes):
    numpy = pytest.importorskip("numpy")
    with pytest.raises(TypeError, match="cannot be gathered"):
        gather([numpy.zeros(shape) for shape in shapes], "cpu")


@pytest.mark.parametrize(
    ("leaves", "texts"),
    [((1, 2), ("1 on rank 0", "2 on rank 1")), (("a", "b"), ("'a'", "'b'")), ((1, 1.0), ("1", "1.0"))],
)
def test_unequal_leaves_name_their_path(leaves, texts):
    with pytest.raises(TypeError, match=r"outputs\[0\]\['n'\] cannot be gathered") as caught:
        gather([[{"n": leaf}] for leaf in leaves], "cpu")
    assert all(text in str(caught.value) for text in texts)


def test_the_first_rank_that_differs_is_named():
    with pytest.raises(TypeError, match="5 on rank 2"):
        gather([1, 1, 5, 6], "cpu")


class Cache:
    """As transformers' caches: no container, made of what its iterator gives."""

    def __init__(self, layers=()):
        self.layers = list(layers)

    def __iter__(self):
        return iter(self.layers)


def test_what_iterates_over_tensors_is_made_of_the_joined_ones(ranks):
    keys, values = (torch.arange(2.0 * ranks).mul(k).reshape(ranks, 2).requires_grad_() for k in (1, 10))
    outputs = [{"cache": Cache([(keys[r : r + 1], values[r : r + 1], None)] * 2)} for r in range(ranks)]
    whole = gather(outputs, "cpu")["cache"]
    assert type(whole) is Cache
    assert len(whole.layers) == 2
    for one, other, nothing in whole:
        assert torch.equal(one, keys)
        assert torch.equal(other, values)
        assert nothing is None
    sum(one.sum() for one, _, _ in whole).backward()
    assert torch.equal(keys.grad, torch.full((ranks, 2), 2.0))


def test_what_iterates_and_cannot_be_joined():
    class Fixed(Cache):
        def __init__(self, layers, size):
            super().__init__(layers)

    with pytest.raises(TypeError, match=r"outputs\[0\] cannot be gathered.*Fixed cannot be made.*use_cache=False"):
        gather([[Fixed([torch.ones(1)], 1)] for _ in range(2)], "cpu")
    with pytest.raises(ValueError, match=r"outputs.* differ in structure"):
        gather([Cache([torch.ones(1)] * count) for count in (1, 2)], "cpu")
    with pytest.raises(TypeError, match=r"outputs\[1\] cannot be gathered: it is 0 on rank 0 and 1 on rank 1"):
        gather([Cache([torch.ones(1), rank]) for rank in range(2)], "cpu")


def test_sets_of_tensors_are_refused():
    with pytest.raises(TypeError, match="cannot be gathered"):
        gather([{torch.ones(1), torch.zeros(1)} for _ in range(2)], "cpu")


def test_what_has_an_entry_for_every_number_is_not_gone_through():
    """It would never end."""

    class Endless:
        def __getitem__(self, index):
            return torch.ones(1)

    with pytest.raises(TypeError, match="cannot be gathered"):
        gather([Endless(), Endless()], "cpu")


def test_iterators_are_not_used_up():
    given = [iter([torch.ones(1)]) for _ in range(2)]
    with pytest.raises(TypeError, match="cannot be gathered"):
        gather(given, "cpu")
    assert [len(list(each)) for each in given] == [1, 1]


@pytest.mark.parametrize("order", [1, -1])
def test_tensor_beside_something_else(order):
    first, second = [r"a \(2,\) tensor", "None"][::order]
    with pytest.raises(
        TypeError, match=rf"outputs\[1\] cannot be gathered: it is {first} on rank 0 and {second} on rank 1"
    ):
        gather([[0, torch.ones(2)], [0, None]][::order], "cpu")


def test_dicts_of_different_keys():
    with pytest.raises(ValueError, match="All dicts must have the same number of keys"):
        gather([{"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)}], "cpu")


def test_dicts_are_joined_by_key_not_by_order():
    one, two = parts(2)
    whole = gather([{"a": one, "b": 3}, {"b": 3, "a": two}], "cpu")
    assert list(whole) == ["a", "b"]
    assert torch.equal(whole["a"], torch.cat([one, two]))


def test_named_tuple_with_a_constructor_of_its_own():
    one, two = parts(2)  # torch gathers with _make
    whole = gather([Doubled(one), Doubled(two)], "cpu")
    assert type(whole) is Doubled
    assert torch.equal(whole.b, torch.cat([one, two]))


@pytest.mark.parametrize("pair", [([1], (1,)), ([1], [1, 2]), ([[]], [1]), (Pair(1, 2), (1, 2))])
def test_different_structures(pair):
    with pytest.raises(ValueError, match="differ in structure: outputs"):
        gather(list(pair), "cpu")


def test_packed_and_sparse_outputs_are_refused_with_path():
    for bad, text in ((pack_sequence([torch.ones(1)]), "PackedSequence"), (torch.eye(2).to_sparse(), "sparse")):
        with pytest.raises(TypeError, match=rf"outputs\['y'\] is a {text}"):
            gather([{"y": bad}] * 2, "cpu")


def test_scalars_become_a_vector_with_torchs_warning(ranks):
    losses = [torch.tensor(float(rank), requires_grad=True) for rank in range(ranks)]
    text = (
        "Was asked to gather along dimension 0, but all input tensors were scalars; "
        "will instead unsqueeze and return a vector."
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
        whole = gather(losses, "cpu")
    assert whole.tolist() == list(range(ranks))
    (whole * torch.arange(ranks)).sum().backward()
    assert [loss.grad.item() for loss in losses] == list(range(ranks))


def test_tensors_that_do_not_fit_name_their_path():
    with pytest.raises(ValueError, match=r"\(2, 4\)") as caught:
        gather([[torch.ones(2, 3)], [torch.ones(2, 4)]], "cpu")
    assert any("outputs[0]" in note for note in caught.value.__notes__)
    with pytest.raises(ValueError, match="float64"):
        gather([torch.ones(2), torch.ones(2, dtype=torch.float64)], "cpu")
    with pytest.raises(IndexError):
        gather([torch.ones(2), torch.ones(2)], "cpu", dim=1)


def test_no_outputs():
    with pytest.raises(ValueError, match="at least one"):
        gather([], "cpu")


@pytest.mark.parametrize("target", ["nowhere", "cuda:99", -2])
def test_target_that_does_not_exist(target):
    with pytest.raises(ValueError, match="device"):
        gather(parts(2), target)


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_any_dimension_and_its_gradient(dim):
    x = torch.arange(60.0).reshape(3, 4, 5).requires_grad_()
    chunked = x.split([1, 2, *([1] * (x.size(dim) - 3))], dim)
    whole = gather(chunked, "cpu", dim)
    assert torch.equal(whole, x)
    (whole * x.detach()).sum().backward()
    assert torch.equal(x.grad, x.detach())


def test_empty_parts_are_joined():
    assert gather([torch.ones(2, 3), torch.ones(0, 3), torch.ones(1, 3)], "cpu").shape == (3, 3)


def test_only_some_require_grad():
    one, two = torch.ones(2, requires_grad=True), torch.ones(3)
    whole = gather([one, two], "cpu")
    (whole * torch.arange(5.0)).sum().backward()
    assert one.grad.tolist() == [0, 1]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float16, torch.complex64])
def test_any_dtype(dtype):
    given = [part.to(dtype) for part in parts(3)]
    whole = gather(given, "cpu")
    assert whole.dtype is dtype
    assert torch.equal(whole, torch.cat(given))
    assert not whole.requires_grad


def test_channels_last_stays():
    given = [torch.arange(48.0).reshape(2, 3, 4, 2).to(memory_format=torch.channels_last) for _ in range(2)]
    whole = gather(given, "cpu")
    assert whole.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(whole, torch.cat(given))


def test_gradcheck():
    given = [torch.randn(rows, 2, dtype=torch.float64, requires_grad=True) for rows in (2, 1, 3)]
    assert torch.autograd.gradcheck(lambda *each: gather(each, "cpu"), given)
    assert torch.autograd.gradgradcheck(lambda *each: gather(each, "cpu"), given)


def test_is_the_inverse_of_scatter(ranks):
    nest = {"x": torch.arange(14).reshape(7, 2), "names": ["a", None], "pair": Pair(torch.ones(7), 3)}
    whole = gather(scatter(nest, cpu(ranks)), "cpu")
    assert torch.equal(whole["x"], nest["x"])
    assert whole["names"] == ["a", None]
    assert torch.equal(whole["pair"].x, torch.ones(7))
    assert whole["pair"].y == 3


def test_exact_bytes():
    _core.reset_counters()
    gather([(part, part[:, 0].clone()) for part in parts(2)], "cpu")
    assert _core.counters() == {("gather", "direct", 0): (2, 5 * 12), ("gather", "direct", 1): (2, 4 * 12)}
