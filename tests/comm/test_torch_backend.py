"""The torch backend: what is not one dense block takes it, and nobody can tell by the result."""

import pytest
import torch
from fakes.nets import cpu
from torch.nn import Parameter

from mgpu_core import comm, kernels


def strided(tensor):
    """The same numbers, with gaps between them: the core leaves such tensors alone."""
    return torch.stack([tensor, tensor], -1)[..., 0]


@pytest.mark.parametrize(
    "call",
    [
        lambda a: comm.scatter(a, cpu(2)),
        lambda a: comm.gather([a, a.detach()]),
        lambda a: comm.all_gather([a.detach(), a]),
        lambda a: comm.broadcast(a, cpu(3))[1:],
        lambda a: comm.reduce_add([a, a]),
        lambda a: comm.reduce_add([a.to_sparse(), a.to_sparse()]),
        lambda a: comm.reduce_scatter([a, a]),
    ],
    ids=["scatter", "gather", "all_gather", "broadcast", "reduce_add", "sparse", "reduce_scatter"],
)
@pytest.mark.parametrize("make", [torch.t, lambda a: a[:, ::2], strided], ids=["transposed", "columns", "gaps"])
def test_nothing_is_part_of_a_graph(call, make):
    found = call(make(Parameter(torch.ones(4, 6))))
    for each in [found] if isinstance(found, torch.Tensor) else found:
        assert not each.requires_grad


def test_what_is_written_is_part_of_no_graph():
    source = Parameter(torch.ones(3, 4)).t()
    outs = [torch.zeros(4, 3), torch.zeros(4, 3)]
    comm.broadcast(source, out=outs)
    plain = torch.ones(4, 3)
    comm.all_reduce([plain, source * 1])
    whole = torch.zeros(8, 3)
    comm.gather([source.detach(), source], out=whole)
    assert not any(each.requires_grad for each in (*outs, plain, whole))
    assert whole.eq(1).all()
    assert plain.eq(2).all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
@pytest.mark.parametrize("ranks", [3, 200, 256, 300])
def test_the_average_of_narrow_whole_numbers(dtype, ranks):
    """They wrap, and are then divided by the number of ranks, whether or not that is one of theirs."""
    wanted = int(torch.tensor(ranks).to(dtype).item() / ranks)
    ones = [strided(torch.ones(3, dtype=dtype)) for _ in range(ranks)]
    comm.all_reduce(ones, "avg")
    assert ones[0].tolist() == [wanted] * 3
    assert kernels.reference.sum_ranks(ones[:1] * ranks, "sum").dtype == dtype
    assert kernels.reference.sum_ranks([torch.ones(3, dtype=dtype)] * ranks, "avg").tolist() == [wanted] * 3


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_complex_numbers_are_added_half_by_half(op):
    numbers = torch.tensor([complex(float("inf"), 1.0), 3 - 1j, complex(float("-inf"), float("inf"))])
    core, generic = (
        [numbers.clone() for _ in range(3)],
        [strided(numbers), numbers.clone(), numbers.clone()],
    )
    comm.all_reduce(core, op)
    comm.all_reduce(generic, op)
    assert [str(each) for each in generic[0].tolist()] == [str(each) for each in core[0].tolist()]
    assert core[0][1] == (9 - 3j if op == "sum" else 3 - 1j)


@pytest.mark.filterwarnings("ignore:.*quantize.*", "ignore:.*dtypes.*deprecated.*")
def test_quantized_tensors_are_neither_cut_nor_joined():
    quantized = torch.quantize_per_tensor(torch.ones(4, 3), 0.5, 0, torch.qint8)
    for call in (
        lambda: comm.scatter(quantized, cpu(2)),
        lambda: comm.gather([quantized, quantized]),
        lambda: comm.all_gather([quantized, quantized]),
    ):
        with pytest.raises(TypeError, match="quantized"):
            call()
    with pytest.raises(TypeError, match="quantized"):  # codes of another scale
        comm.broadcast(quantized, out=[torch.quantize_per_tensor(torch.ones(4, 3), 0.1, 0, torch.qint8)] * 2)
    assert comm.broadcast(quantized, cpu(2))[1].dequantize().eq(1).all()
