"""Reduce: nests of tensors added up over the ranks."""

from collections import namedtuple

import pytest
import torch

from mgpu_core import _core, reduce

Pair = namedtuple("Pair", "x y")


def test_nest_of_sums_in_fresh_memory(ranks):
    given = [
        {"loss": torch.tensor(rank + 1.0), "pair": Pair(torch.full((2, 3), rank), [torch.ones(2)])}
        for rank in range(ranks)
    ]
    whole = reduce(given, "cpu")
    total = ranks * (ranks + 1) // 2
    assert whole["loss"].item() == total
    assert whole["loss"].dim() == 0
    assert whole["pair"].x.tolist() == [[total - ranks] * 3] * 2
    assert whole["pair"].y[0].tolist() == [ranks] * 2
    for tensor in (whole["loss"], whole["pair"].y[0]):
        tensor.fill_(-7)
    assert given[0]["loss"].item() == 1
    assert given[0]["pair"].y[0].tolist() == [1, 1]


DTYPES = [torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64, torch.complex128])
def test_dtypes(dtype):
    whole = reduce([torch.tensor([1, 2]).to(dtype)] * 3, "cpu")
    assert whole.dtype is dtype
    assert whole.tolist() == [3, 6]


def test_half_precision_is_rounded_once():
    values = [2048.0, 1.0, 1.0]
    assert reduce([torch.tensor([value], dtype=torch.float16) for value in values], "cpu").item() == 2050


def test_rank_order():
    assert reduce([torch.tensor([value]) for value in (1e8, 1.0, -1e8)], "cpu").item() == 0


def test_gradient_is_a_broadcast_and_can_be_differentiated():
    given = [torch.tensor([rank + 1.0], requires_grad=True) for rank in range(3)]
    total = reduce(given, "cpu")
    grads = torch.autograd.grad((total**3).sum(), given, create_graph=True)
    assert [grad.item() for grad in grads] == [108] * 3
    assert [second.item() for second in torch.autograd.grad(grads[0].sum(), given)] == [36] * 3
    given = [torch.randn(2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradgradcheck(lambda *each: reduce(each, "cpu"), given)


def test_only_some_require_grad():
    one = torch.ones(2, requires_grad=True)
    reduce([torch.ones(2), one], "cpu").sum().backward()
    assert one.grad.tolist() == [1, 1]


def test_integers_and_floats_in_one_nest():
    given = [{"count": torch.tensor(rank), "loss": torch.tensor(1.0, requires_grad=True)} for rank in range(3)]
    whole = reduce(given, "cpu")
    assert whole["count"].item() == 3
    whole["loss"].backward()
    assert [each["loss"].grad.item() for each in given] == [1, 1, 1]


def test_channels_last():
    given = [torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last) for _ in range(2)]
    assert torch.equal(reduce(given, "cpu"), 2 * given[0])
    assert torch.equal(reduce([given[0], given[0].contiguous()], "cpu"), 2 * given[0])


def test_mistakes():
    with pytest.raises(ValueError, match="at least one"):
        reduce([], "cpu")
    with pytest.raises(ValueError, match="differ in structure"):
        reduce([[torch.ones(1)], (torch.ones(1),)], "cpu")
    with pytest.raises(ValueError, match=r"rank 1 is \(3,\)"):
        reduce([torch.ones(2), torch.ones(3)], "cpu")
    with pytest.raises(ValueError, match="float64"):
        reduce([torch.ones(2), torch.ones(2).double()], "cpu")
    with pytest.raises(TypeError, match=r"outputs\['n'\] is 3, and only tensors"):
        reduce([{"n": 3}] * 2, "cpu")
    with pytest.raises(TypeError, match="bool"):
        reduce([torch.tensor([True])] * 2, "cpu")
    with pytest.raises(TypeError, match=r"outputs\[0\] is a sparse"):
        reduce([[torch.eye(2).to_sparse()]] * 2, "cpu")


def test_no_leaves():
    assert reduce([[], []], "cpu") == []
    assert reduce([{"a": ()}] * 2, "cpu") == {"a": ()}


def test_exact_bytes():
    _core.reset_counters()
    reduce([[torch.ones(3), torch.ones(2, dtype=torch.int64)]] * 2, "cpu")
    assert _core.counters() == {("reduce", "direct", 0): (2, 28), ("reduce", "direct", 1): (2, 28)}
