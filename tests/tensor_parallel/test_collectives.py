"""Differentiable collectives: values and gradients in whole numbers, second derivatives, and what is refused."""

import pytest
import torch
from fakes.nets import chunks, cpu
from torch.profiler import ProfilerActivity, profile

from mgpu_core.comm.collectives import all_gather, all_reduce, reduce_scatter


def per_rank(ranks, *shape):
    """Whole numbers that differ by rank, each a leaf on the device of its rank."""
    count = torch.Size(shape).numel()
    return [
        (torch.arange(float(count)).reshape(shape) + 100 * rank).to(device).requires_grad_()
        for rank, device in enumerate(cpu(ranks))
    ]


def host(tensors):
    return [tensor.detach().cpu() for tensor in tensors]


def backward(outputs):
    """Run backward from gradients that differ by rank: in rank r all are r + 1, and return them."""
    grads = [torch.full_like(output, rank + 1) for rank, output in enumerate(outputs)]
    torch.autograd.backward(outputs, grads)


def assert_equal(got, wanted):
    assert [tensor.tolist() for tensor in host(got)] == [tensor.tolist() for tensor in wanted]


def test_the_gradient_of_an_all_reduce_is_an_all_reduce(ranks):
    tensors = per_rank(ranks, 2, 3)
    before = host(tensors)
    outputs = all_reduce(tensors)
    assert_equal(outputs, [sum(before)] * ranks)
    assert_equal(tensors, before)
    backward(outputs)
    assert_equal([tensor.grad for tensor in tensors], [torch.full((2, 3), ranks * (ranks + 1) / 2)] * ranks)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_the_gradient_of_an_all_gather_is_a_sum_of_slices(ranks, dim):
    counts = chunks(11, ranks)
    shapes = [(count, 2) if dim == 0 else (2, count) for count in counts]
    parts = [
        torch.full(shape, float(rank), device=device).requires_grad_()
        for rank, (shape, device) in enumerate(zip(shapes, cpu(ranks), strict=True))
    ]
    outputs = all_gather(parts, dim)
    assert_equal(outputs, [torch.cat(host(parts), dim)] * ranks)
    factors = torch.arange(11.0, device="cpu").reshape((11, 1) if dim == 0 else (1, 11))
    sum((output.cpu() * factors * (rank + 1)).sum() for rank, output in enumerate(outputs)).backward()
    whole = (factors * ranks * (ranks + 1) / 2).expand(outputs[0].shape)
    assert_equal([part.grad for part in parts], whole.split(counts, dim))


@pytest.mark.parametrize("dim", [0, 1])
def test_the_gradient_of_a_reduce_scatter_is_an_all_gather(ranks, dim):
    tensors = per_rank(ranks, *((11, 2) if dim == 0 else (2, 11)))
    outputs = reduce_scatter(tensors, dim)
    counts = chunks(11, ranks)
    assert_equal(outputs, sum(host(tensors)).split(counts, dim))
    backward(outputs)
    wanted = torch.cat([torch.full_like(each, rank + 1) for rank, each in enumerate(host(outputs))], dim)
    assert_equal([tensor.grad for tensor in tensors], [wanted] * ranks)


def test_chunks_of_other_sizes_and_none():
    outputs = reduce_scatter(per_rank(3, 4), counts=[1, 0, 3])
    assert_equal(outputs, [torch.tensor([300.0]), torch.empty(0), torch.tensor([303.0, 306.0, 309.0])])


@pytest.mark.parametrize("collective", [all_reduce, lambda parts: all_gather(parts, 1), reduce_scatter])
def test_second_derivatives(collective):
    parts = [part.detach().double().requires_grad_() for part in per_rank(3, 2, 2)]

    def squares(*parts):
        return tuple(output**2 for output in collective(parts))

    assert torch.autograd.gradcheck(squares, parts)
    assert torch.autograd.gradgradcheck(squares, parts)


def test_an_output_that_is_not_used_counts_as_zero():
    tensors = per_rank(3, 2)
    all_reduce(tensors)[1].sum().backward()
    assert_equal([tensor.grad for tensor in tensors], [torch.ones(2)] * 3)


def test_half_precision_is_added_in_float32():
    values = [1.0, 2.0**-8, 2.0**-8, 2.0**-8]
    parts = [torch.tensor([value], dtype=torch.bfloat16, device=cpu(1)[0]) for value in values]
    assert [part.item() for part in all_reduce(parts)] == [1.015625] * 4


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: all_reduce(torch.ones(2)), TypeError, "not a tensor"),
        (lambda: all_reduce([]), ValueError, "empty"),
        (lambda: all_reduce([torch.ones(2), torch.ones(3)]), ValueError, "got 3, but expected 2"),
        (lambda: all_gather([torch.ones(2), torch.ones(2, 1)]), ValueError, r"tensors\[1\]"),
        (lambda: all_gather([torch.ones(2)] * 2, 1), IndexError, "Dimension out of range"),
        (lambda: reduce_scatter([torch.ones(2), torch.ones(3)]), ValueError, "got 3, but expected 2"),
        (lambda: reduce_scatter([torch.ones(4)] * 2, counts=[1, 2]), ValueError, "2 sizes that add up to 4"),
    ],
)
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_sum_leaves_its_inputs_and_on_accelerators_copies_none():
    tensors = [each.detach() for each in per_rank(3, 2, 2)]
    before = [each.clone() for each in tensors]
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        sums = all_reduce(tensors)
    copies = [each for each in seen.events() if each.name == "aten::clone"]
    assert len(copies) == (3 if tensors[0].is_cpu else 0)
    assert_equal(tensors, before)
    assert_equal(sums, [sum(host(tensors))] * 3)
    assert_equal(all_reduce([each.t() for each in tensors]), [sum(host(tensors)).t()] * 3)
