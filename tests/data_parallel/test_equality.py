"""Compare the wrapper with the plain module: whole training runs, a spy inside the module, and exact bytes."""

import copy
import threading

import pytest
import torch
from fakes.nets import Cnn, Lstm, Spy, Tied, Transformer, chunks, cpu, mlp
from torch import nn
from torch.nn import functional as F

from mgpu_core import DataParallel, _core, data_parallel

ROWS = [8, 8, 5]  # the last batch is ragged, and smaller than the largest team

CASES = {
    "mlp": (mlp, lambda rows: torch.randn(rows, 4, dtype=torch.float64), 3),
    "lstm": (Lstm, lambda rows: torch.randn(rows, 3, 4, dtype=torch.float64), 3),
    "transformer": (Transformer, lambda rows: torch.randint(7, (rows, 4)), 3),
    "tied": (Tied, lambda rows: torch.randint(7, (rows, 4)), 7),
}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.01),
}


def batches(make_rows, classes):
    torch.manual_seed(1)
    return [(make_rows(rows), torch.randint(classes, (rows,))) for rows in ROWS * 2]


def same(one, other):
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def train(forward, module, optimizer, data):
    """One pass; per step the output, the loss and all gradients."""
    notes = []
    for x, y in data:
        optimizer.zero_grad()
        out = forward(x)
        loss = F.cross_entropy(out, y)
        loss.backward()
        notes.append((out.detach(), loss.detach(), [p.grad.clone() for p in module.parameters()]))
        optimizer.step()
    return notes


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_training_equals_the_plain_module(case, optimizer, ranks):
    make, make_rows, classes = CASES[case]
    torch.manual_seed(0)
    plain = make().double()
    net = copy.deepcopy(plain)
    start = [p.detach().clone() for p in plain.parameters()]
    data = batches(make_rows, classes)
    wanted = train(plain, plain, OPTIMIZERS[optimizer](plain.parameters()), data)
    wrapper = DataParallel(net, cpu(ranks))
    _core.reset_counters()
    got = train(wrapper, net, OPTIMIZERS[optimizer](wrapper.parameters()), data)
    assert len(got) == len(wanted) == 6
    same(got, wanted)
    same([*net.parameters()], [*plain.parameters()])
    assert not any(torch.equal(p, before) for p, before in zip(net.parameters(), start, strict=True))
    gathered = {rank for operation, _, rank in _core.counters() if operation == "gather"}
    assert gathered == (set(range(ranks)) if ranks > 1 else set())


def chunked(net, x, ranks):
    """As torch does: each chunk has its own statistics, and rank 0 alone keeps them."""
    parts = x.split(chunks(len(x), ranks))
    own = dict(net.named_buffers())
    copies = [{name: buffer.clone() for name, buffer in own.items()} for _ in parts[1:]]
    parameters = dict(net.named_parameters())
    outputs = [
        torch.func.functional_call(net, {**parameters, **buffers}, (part,))
        for part, buffers in zip(parts, [own, *copies], strict=True)
    ]
    return torch.cat(outputs)


def test_training_with_batch_norm(ranks):
    torch.manual_seed(0)
    plain = Cnn().double()
    net = copy.deepcopy(plain)
    data = batches(lambda rows: torch.randn(rows, 1, 4, 4, dtype=torch.float64), 3)
    wanted = train(lambda x: chunked(plain, x, ranks), plain, torch.optim.SGD(plain.parameters(), 0.1), data)
    wrapper = DataParallel(net, cpu(ranks))
    same(train(wrapper, net, torch.optim.SGD(net.parameters(), 0.1), data), wanted)
    same(net.state_dict(), plain.state_dict())
    assert net.norm.num_batches_tracked.item() == len(data)


def test_statistics_are_exactly_those_of_rank_0s_chunk(ranks):
    net, reference = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    x = torch.arange(72.0).reshape(24, 3) ** 2
    wrapper = DataParallel(net, cpu(ranks))
    for _ in range(3):
        wrapper(x)
        reference(x[: chunks(24, ranks)[0]])
    for name, buffer in reference.named_buffers():
        assert torch.equal(net.get_buffer(name), buffer), name


@pytest.mark.parametrize("case", [*CASES, "cnn"])
def test_evaluation_without_gradients(case, ranks):
    make, make_rows, _ = CASES.get(case, (Cnn, lambda rows: torch.randn(rows, 1, 4, 4, dtype=torch.float64), 3))
    torch.manual_seed(0)
    net = make().double().eval()
    wrapper = DataParallel(net, cpu(ranks)).eval()
    for rows in (1, 7, 8, 16):
        x = make_rows(rows)
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                out = wrapper(x)
                same(out, net(x))
                assert not out.requires_grad


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 24])
def test_spy_sees_balanced_chunks_on_workers_of_their_own(ranks, rows):
    spy = Spy()
    wrapper = DataParallel(spy, cpu(ranks))
    x = torch.arange(float(rows)).repeat(2, 1).t().contiguous()
    out = wrapper(x)
    assert torch.equal(out, spy.linear(x) + spy.offset)
    notes = spy.by_rank()
    wanted = chunks(rows, ranks)
    assert [note["rows"] for note in notes] == [part[:, 0].tolist() for part in x.split(wanted)]
    assert len({note["thread"] for note in notes}) == len(wanted)
    if len(wanted) > 1:
        assert threading.get_ident() not in {note["thread"] for note in notes}
    for name, tensor in (("weight", spy.linear.weight), ("bias", spy.linear.bias), ("offset", spy.offset)):
        assert len({note[name] for note in notes}) == len(wanted), name
        assert notes[0][name] == tensor.data_ptr(), name
    if ranks > 1:
        assert x.data_ptr() not in {note["x"] for note in notes}


def test_a_rank_keeps_its_thread(ranks):
    spy = Spy()
    wrapper = DataParallel(spy, cpu(ranks))
    x = torch.arange(8.0).repeat(2, 1).t()
    wrapper(x)
    first = [note["thread"] for note in spy.by_rank()]
    spy.seen.clear()
    wrapper(x)
    assert [note["thread"] for note in spy.by_rank()] == first


@pytest.mark.cpu_only("says cpu, or the core's algorithms, in what it expects; tests/accelerator has its like")
@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 16])
def test_exact_bytes_of_every_step(ranks, rows, functional):
    spy = Spy()  # 6 float32 of parameters, 2 of buffers; 2 columns in, 2 out
    x = torch.arange(float(rows)).repeat(2, 1).t().contiguous()
    wrapper = DataParallel(spy, cpu(ranks))
    _core.reset_counters()
    out = data_parallel(spy, x, cpu(ranks)) if functional else wrapper(x)
    row_nbytes = [8 * rows for rows in chunks(rows, ranks)]
    one_rank = len(row_nbytes) == 1
    forward = {}
    if ranks > 1:
        for rank, nbytes in enumerate(row_nbytes):
            forward["scatter", "direct", rank] = (1, nbytes)
            forward["gather", "direct", rank] = (1, nbytes)
    for rank in range(1, len(row_nbytes)):
        forward["broadcast", "direct", rank] = (2, 4 * 6 + 4 * 2)  # the parameters, the buffers
    assert _core.counters() == forward
    _core.reset_counters()
    out.backward(torch.ones_like(out))
    backward = {}
    if ranks > 1:
        for rank, nbytes in enumerate(row_nbytes):
            backward["scatter", "direct", rank] = (1, nbytes)
            backward["reduce", "direct", rank] = (1, 4 * 6)
    assert _core.counters() == backward or one_rank
    assert spy.linear.bias.grad.tolist() == [rows, rows]


def test_no_gradient_is_reduced_without_backward_and_nothing_is_scattered_back():
    spy = Spy()
    _core.reset_counters()
    with torch.no_grad():
        DataParallel(spy, cpu(3))(torch.ones(6, 2)).sum()
    assert {operation for operation, _, _ in _core.counters()} == {"scatter", "broadcast", "gather"}


def test_shares_cut_in_proportion(ranks):
    spy = Spy()
    shares = list(range(1, ranks + 1))
    rows = 2 * sum(shares)
    x = torch.arange(float(rows)).repeat(2, 1).t()
    out = DataParallel(spy, cpu(ranks), shares=shares)(x)
    assert [len(note["rows"]) for note in spy.by_rank()] == [2 * share for share in shares]
    assert torch.equal(out, spy.linear(x) + spy.offset)


@pytest.mark.parametrize("dim", [1, -2])
def test_another_dimension(ranks, dim):
    torch.manual_seed(0)
    plain = nn.LSTM(4, 5).double()
    net = copy.deepcopy(plain)
    x = torch.randn(3, 7, 4, dtype=torch.float64)
    out, (h, c) = plain(x)
    (out.pow(2).sum() + h.sum() + c.pow(2).sum()).backward()
    got, (got_h, got_c) = DataParallel(net, cpu(ranks), dim=dim)(x)
    (got.pow(2).sum() + got_h.sum() + got_c.pow(2).sum()).backward()
    same((got, got_h, got_c), (out, h, c))
    same([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()])


def test_gradient_of_the_input(ranks):
    torch.manual_seed(0)
    net = mlp().double()
    x = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    (wanted,) = torch.autograd.grad(net(x).pow(2).sum(), x)
    (got,) = torch.autograd.grad(DataParallel(net, cpu(ranks))(x).pow(2).sum(), x)
    same(got, wanted)


def test_accumulated_gradients_over_micro_batches(ranks):
    torch.manual_seed(0)
    plain = mlp().double()
    net = copy.deepcopy(plain)
    wrapper = DataParallel(net, cpu(ranks))
    x = torch.randn(12, 4, dtype=torch.float64)
    plain(x).pow(2).sum().backward()
    for part in x.split([5, 4, 3]):
        wrapper(part).pow(2).sum().backward()
    same([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()])
