"""What the gate refuses, resolves, and tells autograd; nothing is written when it refuses."""

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from mgpu_core import comm, kernels
from mgpu_core.devices import tensor_checks


def two(tensor):
    return [tensor, torch.zeros(4)]


def fake():
    with FakeTensorMode():
        return torch.zeros(4)


SPECIAL = {
    "sparse": lambda: torch.eye(4).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
    "fake": fake,
    "wrapper": lambda: TwoTensor(torch.zeros(4), torch.zeros(4)),
    "meta": lambda: torch.zeros(4, device="meta"),
    "traced": lambda: torch._to_functional_tensor(torch.zeros(4)),
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_special_tensors_are_refused_by_name(kind):
    tensor = SPECIAL[kind]()
    room = [torch.zeros(tensor.shape) for _ in range(2)] if kind not in ("nested", "jagged") else []
    for call in (
        lambda: comm.all_reduce([torch.zeros(4), tensor]),
        lambda: comm.broadcast(tensor, out=room),
        *([] if kind == "sparse" else [lambda: comm.broadcast(tensor, ["cpu"] * 2)]),
        lambda: comm.scatter(tensor, ["cpu"] * 2),
        lambda: comm.gather([torch.zeros(4), tensor]),
        lambda: comm.all_gather([torch.zeros(4), tensor]),
        lambda: comm.reduce_scatter([torch.zeros(4), tensor]),
    ):
        with pytest.raises(TypeError, match=r"sparse|nested|fake|wrapper|meta|inside a trace"):
            call()


@pytest.mark.parametrize("kind", SPECIAL)
def test_a_special_tensor_among_many_is_refused_by_name(kind):
    """Long lists are looked at by other questions than short ones."""
    ordinary = [torch.zeros(4) for _ in range(20)]
    for tensors in ([*ordinary, SPECIAL[kind]()], [SPECIAL[kind](), *ordinary]):
        with pytest.raises(TypeError, match=r"sparse|nested|fake|wrapper|meta|inside a trace"):
            kernels.pack(tensors)
        with pytest.raises(TypeError, match=r"sparse|nested|fake|wrapper|meta|inside a trace"):
            kernels.unpack(torch.zeros(84), tensors)


def test_a_negated_view_among_many_is_resolved_or_refused():
    tensors = [*(torch.ones(4) for _ in range(20)), torch._neg_view(torch.ones(4))]
    assert kernels.pack(tensors).tolist() == [1.0] * 80 + [-1.0] * 4
    with pytest.raises(ValueError, match=r"outs\[20\] is a lazily conjugated or negated view"):
        kernels.unpack(torch.zeros(84), tensors)


def test_a_transformed_tensor_among_many_is_refused():
    ordinary = [torch.zeros(3) for _ in range(20)]
    with pytest.raises(TypeError, match="vmap"):
        torch.vmap(lambda x: kernels.pack([*ordinary, x]))(torch.zeros(2, 3))


def test_functorch_tensors_are_refused():
    with pytest.raises(TypeError, match="vmap"):
        torch.vmap(lambda x: comm.broadcast(x, ["cpu"] * 2)[0])(torch.zeros(2, 3))


def test_zeros_without_memory_are_zeros():
    """What torch hands on as the gradient of a gradient that is zero everywhere."""
    zero = torch._efficientzerotensor(4)
    many = [zero, *[torch.ones(4)] * 20]
    assert all(torch.equal(each, torch.zeros(4)) for each in comm.broadcast(zero, ["cpu"] * 2))
    assert torch.cat(comm.scatter(zero, ["cpu"] * 2)).tolist() == [0.0] * 4
    assert comm.gather([zero, torch.ones(4)]).tolist() == [0.0] * 4 + [1.0] * 4
    assert comm.reduce_add([zero, zero]).tolist() == [0.0] * 4
    assert comm.reduce_add_coalesced([[zero] * 20, [torch.ones(4)] * 20])[0].tolist() == [1.0] * 4
    assert kernels.pack([zero, zero]).tolist() == [0.0] * 8
    assert kernels.pack(many).tolist() == [0.0] * 4 + [1.0] * 80
    assert kernels.sum_ranks([zero, torch.ones(4)]).tolist() == [1.0] * 4
    with pytest.raises(ValueError, match="zeros without memory, and cannot be written"):
        comm.all_reduce([zero, torch.ones(4)])


def test_conjugated_and_negated_inputs_are_resolved():
    z = torch.tensor([1 + 2j, 3 - 1j])
    assert comm.broadcast(z.conj(), ["cpu"] * 2)[1].tolist() == [1 - 2j, 3 + 1j]
    assert comm.reduce_add([z.conj(), z]).tolist() == [2 + 0j, 6 + 0j]
    assert comm.gather([z.conj().imag, z.real]).tolist() == [-2.0, 1.0, 1.0, 3.0]
    assert z.tolist() == [1 + 2j, 3 - 1j]


@pytest.mark.parametrize("view", ["conj", "imag"])
def test_conjugated_and_negated_outputs_are_refused(view):
    z = torch.tensor([1 + 2j, 3 - 1j])
    out = z.conj() if view == "conj" else z.conj().imag
    with pytest.raises(ValueError, match="lazily"):
        comm.broadcast(torch.zeros_like(out), out=[out])
    assert z.tolist() == [1 + 2j, 3 - 1j]


def test_tensors_that_share_memory():
    base = torch.arange(10.0)
    kept = base.clone()
    for pair in ([base, base], [base[:6], base[4:]], [base[4:8], base[5:9]]):
        with pytest.raises(ValueError, match=r"the tensor of rank \d and the tensor of rank \d share memory"):
            comm.all_reduce(pair)
    with pytest.raises(ValueError, match="share memory"):
        comm.broadcast(base[:5], out=[base[3:8]])
    with pytest.raises(ValueError, match="share memory"):
        comm.scatter(base, out=[base[:5], base[5:]])
    with pytest.raises(ValueError, match="elements that share memory"):
        comm.all_reduce([torch.zeros(1).expand(4), torch.zeros(4)])
    assert torch.equal(base, kept)


def test_disjoint_views_of_one_storage_are_fine():
    base = torch.arange(8.0)
    comm.all_reduce([base[:4], base[4:]])
    assert base.tolist() == [4, 6, 8, 10] * 2


def test_leaf_that_requires_grad():
    leaf = torch.zeros(3, requires_grad=True)
    with pytest.raises(ValueError, match="leaf that requires grad"):
        comm.all_reduce([torch.ones(3), leaf])
    assert leaf.tolist() == [0, 0, 0]
    with torch.no_grad():
        comm.all_reduce([torch.ones(3), leaf])
    assert leaf.tolist() == [1, 1, 1]


def test_an_old_graph_notices_the_write():
    w = torch.ones(3, requires_grad=True)
    x = torch.ones(3)
    y = (w * x).sum()
    comm.all_reduce([x, torch.ones(3)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    for write in (lambda t: comm.broadcast(torch.zeros(3), out=[t]), lambda t: comm.gather([torch.zeros(3)], out=t)):
        before = x._version
        write(x)
        assert x._version > before


def test_inference_tensors_have_no_version():
    with torch.inference_mode():
        parts = [torch.ones(3), torch.ones(3)]
        comm.all_reduce(parts)
    assert parts[0].tolist() == [2, 2, 2]


@pytest.mark.parametrize("call", [comm.all_reduce, comm.all_gather, comm.reduce_scatter, comm.gather, comm.reduce_add])
def test_lists_of_tensors_are_wanted(call):
    with pytest.raises(ValueError, match="empty"):
        call([])
    with pytest.raises(TypeError, match="sequence"):
        call(torch.zeros(3))
    with pytest.raises(TypeError, match="must be a tensor"):
        call([torch.zeros(3), 3])


@pytest.mark.parametrize("call", [comm.all_reduce, comm.reduce_scatter, comm.reduce_add])
def test_shapes_and_dtypes_must_agree(call):
    with pytest.raises(ValueError, match=r"rank 1|input 1"):
        call([torch.zeros(4), torch.zeros(5)])
    with pytest.raises(ValueError, match="float64"):
        call([torch.zeros(4), torch.zeros(4, dtype=torch.float64)])


def test_names_that_do_not_exist():
    parts = [torch.zeros(2), torch.zeros(2)]
    with pytest.raises(ValueError, match="op must be one of sum, avg"):
        comm.all_reduce(parts, "mean")
    with pytest.raises(ValueError, match="algorithm must be one of auto"):
        comm.all_reduce(parts, algorithm="star")
    with pytest.raises(TypeError, match="bool"):
        comm.all_reduce([torch.zeros(2, dtype=torch.bool)] * 1)


def test_gather_and_scatter_arguments():
    x = torch.zeros(4, 2)
    with pytest.raises(RuntimeError, match="must not be specified"):
        comm.scatter(x, ["cpu"], out=[x.clone()])
    with pytest.raises(RuntimeError, match="must not be specified"):
        comm.gather([x], destination="cpu", out=x.clone())
    with pytest.raises(RuntimeError, match="Exactly one of"):
        comm.broadcast(x)
    with pytest.raises(RuntimeError, match="Exactly one of"):
        comm.broadcast(x, ["cpu"], out=[x.clone()])
    with pytest.raises(ValueError, match="add up to 4"):
        comm.scatter(x, ["cpu"] * 2, [1, 2])
    with pytest.raises(IndexError, match="Dimension out of range"):
        comm.scatter(x, ["cpu"] * 2, dim=2)
    with pytest.raises(ValueError, match=r"\[1\] is \(4, 3\) .*, which does not fit tensors\[0\], \(4, 2\) .* 0"):
        comm.gather([x, torch.zeros(4, 3)])
    with pytest.raises(ValueError, match=r"\[0\] is \(4, 2\) .*, which does not fit the output, \(4, 3\) .* 0"):
        comm.gather([x], out=torch.zeros(4, 3))
    with pytest.raises(ValueError, match="rows along dimension 0 together"):
        comm.gather([x, x], out=torch.zeros(7, 2))
    with pytest.raises(ValueError, match="cannot be cut into 3 equal"):
        comm.reduce_scatter([x, x.clone(), x.clone()])
    with pytest.raises(ValueError, match="positive"):
        comm.broadcast_coalesced([x], ["cpu"], 0)


def test_devices_that_do_not_exist():
    x = torch.zeros(4)
    with pytest.raises(ValueError, match=r"device cuda:\d+ does not exist: torch sees"):
        comm.scatter(x, [torch.cuda.device_count()])
    with pytest.raises(ValueError, match="is not a device"):
        comm.broadcast(x, ["gpu0"])
    with pytest.raises(TypeError, match="a device is"):
        comm.broadcast(x, [1.5])
    with pytest.raises(ValueError, match="devices is empty"):
        comm.broadcast(x, [])
    with pytest.warns(FutureWarning, match="Using -1 to represent CPU"):
        assert comm.gather([x, x], destination=-1).shape == (8,)


def test_the_caller_can_go_on_after_an_error():
    parts = [torch.ones(3), torch.ones(3)]
    with pytest.raises(ValueError, match="op must be"):
        comm.all_reduce(parts, "mean")
    comm.all_reduce(parts)
    assert parts[0].tolist() == [2, 2, 2]


@pytest.mark.parametrize("shape", [(5, 1), (6, 2)])
def test_elements_that_share_memory_in_windows_are_not_written(shape):
    count, step = shape
    windows = torch.zeros(count).unfold(0, 3, step)
    with pytest.raises(ValueError, match="rank 0 has elements that share memory"):
        comm.all_reduce([windows, torch.ones_like(windows)])
    apart = torch.zeros(12).unfold(0, 3, 4)
    comm.all_reduce([apart, torch.ones(3, 3)])
    assert apart.eq(1).all()


@pytest.mark.parametrize(
    ("ranks", "shares"),
    [
        (lambda m: m.unbind(1), False),
        (lambda m: (m[:, :2], m[:, 2:4]), False),
        (lambda m: (m[:, :2], m[:, 1:3]), True),
        (lambda m: (m[0::2], m[1::2]), False),
        (lambda m: (m[0::2, 0::2], m[1::2, 1::2], m[0::2, 1::2], m[1::2, 0::2]), False),
        (lambda m: (m[0::2, 0::2], m[1::2, 1::2], m[0::2, 1::2], m[0::2, 0::2]), True),
        (lambda m: (m.flatten()[0::2][:7], m.flatten()[1::3][:7]), True),
        (lambda m: (m.flatten()[0::6], m.flatten()[1::6]), False),
        (lambda m: (m[:4, 1], m.flatten()[1::5][:4]), True),
    ],
)
def test_tensors_between_each_others_elements_share_no_memory(ranks, shares):
    matrix = torch.ones(6, 4)
    parts = list(ranks(matrix))
    expected = torch.ones(6, 4)
    for part in ranks(expected):
        part.fill_(len(parts))
    with pytest.raises(ValueError, match="share memory") if shares else nullcontext():
        comm.all_reduce(parts)
    assert matrix.equal(torch.ones(6, 4) if shares else expected)


def test_a_column_is_broadcast_to_the_others():
    matrix = torch.arange(12.0).reshape(4, 3)
    comm.broadcast(matrix[:, 0], out=[matrix[:, 1], matrix[:, 2]])
    assert matrix.equal(torch.tensor([0.0, 3.0, 6.0, 9.0])[:, None].expand(4, 3))
    comm.broadcast(matrix[:, 0], out=[matrix[:, 1]])
    with pytest.raises(ValueError, match="share memory"):
        comm.broadcast(matrix[:, :2], out=[matrix[:, 1:]])


def test_the_same_memory_in_another_order_is_not_the_same():
    square = torch.arange(9.0).reshape(3, 3)
    for call in (
        lambda: comm.broadcast(square, out=[square.t()]),
        lambda: comm.broadcast(square, out=[torch.zeros(3, 3), square.t()]),
        lambda: comm.scatter(square, out=[square.t()]),
        lambda: comm.gather([square], out=square.t()),
    ):
        with pytest.raises(ValueError, match="share memory"):
            call()
    assert square.flatten().tolist() == list(range(9))


def test_lists_that_do_not_fit():
    with pytest.raises(TypeError, match="out is a sequence with one tensor per rank, not a tensor"):
        comm.broadcast(torch.zeros(4), out=torch.zeros(4))
    with pytest.raises(ValueError, match=r"every rank must bring as many tensors, but inputs have \[2, 1\]"):
        comm.reduce_add_coalesced([[torch.zeros(4), torch.zeros(4)], [torch.zeros(4)]])


def test_no_tensors_of_some_ranks_are_none(ranks):
    assert comm.reduce_add_coalesced([[] for _ in range(ranks)]) == ()
    with pytest.raises(ValueError, match="one list of tensors per rank"):
        comm.reduce_add_coalesced([])


def unaligned(dtype=torch.float32, count=4):
    """A tensor of ones whose memory begins one byte behind a multiple of its elements' size."""
    memory = torch.ones(count, dtype=dtype).numpy().tobytes()
    return torch.frombuffer(bytearray(1) + bytearray(memory), dtype=dtype, offset=1)


UNALIGNED = {
    "all_reduce": lambda: comm.all_reduce([torch.ones(4), unaligned()]),
    "reduce_add": lambda: comm.reduce_add([torch.ones(4), unaligned()]),
    "reduce_add of complex": lambda: comm.reduce_add([unaligned(torch.complex64)] * 2),
    "reduce_scatter": lambda: comm.reduce_scatter([torch.ones(4), unaligned()]),
    "sum_ranks": lambda: kernels.sum_ranks([torch.ones(4), unaligned()]),
    "scale_cast": lambda: kernels.scale_cast(unaligned(torch.float64), 2.0),
    "scale_cast out": lambda: kernels.scale_cast(torch.ones(4), 2.0, out=unaligned()),
    "pack": lambda: kernels.pack([torch.ones(4), unaligned()]),
    "unpack": lambda: kernels.unpack(torch.ones(8), [torch.ones(4), unaligned()]),
    "l2_norm": lambda: kernels.l2_norm([torch.ones(4), unaligned()]),
    "gather_rows": lambda: kernels.gather_rows(torch.ones(2, 3, dtype=torch.uint8), unaligned(torch.int64, 2)),
    "sgd": lambda: kernels.sgd(
        torch.ones(4), unaligned(), None, kernels.segment_table([4]), kernels.sgd_groups({"lr": 1.0})
    ),
    "adam": lambda: kernels.adam(
        torch.ones(4),
        torch.ones(4),
        torch.ones(4),
        unaligned(),
        kernels.segment_table([4]),
        kernels.adam_groups({"lr": 1.0}),
    ),
}


@pytest.mark.parametrize("call", UNALIGNED.values(), ids=UNALIGNED)
def test_memory_that_is_not_aligned_to_its_elements(call):
    """On a GPU a kernel would stop at it, and end all CUDA work of the process."""
    with pytest.raises(ValueError, match="which is not a multiple of their size"):
        call()


def test_copies_need_no_alignment():
    assert [each.tolist() for each in comm.broadcast(unaligned(), ["cpu", "cpu"])] == [[1.0] * 4] * 2
    assert comm.gather([unaligned(), unaligned()]).tolist() == [1.0] * 8


def test_in_a_transform_no_tensor_is_plain_if_it_comes_first(monkeypatch):
    monkeypatch.setattr(tensor_checks, "_plain_keys", {})
    found = []
    torch.vmap(lambda x: found.append(tensor_checks.plain_keys("cpu")) or x)(torch.zeros(2, 3))
    assert found == [frozenset()]
    assert tensor_checks.keys_of(torch.zeros(2)) in tensor_checks.plain_keys("cpu")
