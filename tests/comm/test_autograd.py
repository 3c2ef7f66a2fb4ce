"""The differentiable collectives: first and second gradients, missing gradients, and the order of reductions."""

import pytest
import torch
from fakes.nets import in_a_new_thread

import mgpu_core
from mgpu_core import _core
from mgpu_core.comm import autograd
from mgpu_core.comm.buckets import bucket_positions


def devices_of(ranks):
    return [torch.device("cpu")] * ranks


def test_scatter_and_gather(ranks):
    x = torch.randn(8, 2, dtype=torch.float64, requires_grad=True)
    counts = [count for _, count in _core.chunk_plan(8, ranks)]

    def there_and_back(x):
        parts = autograd.scatter(x, devices_of(ranks), counts, 0)
        return autograd.gather([part**3 for part in parts], torch.device("cpu"), 0)

    assert torch.autograd.gradcheck(there_and_back, x)
    assert torch.autograd.gradgradcheck(there_and_back, x)


def test_broadcast_and_reduce(ranks):
    a = torch.randn(3, dtype=torch.float64, requires_grad=True)
    b = torch.randn(2, 2, dtype=torch.complex128, requires_grad=True)

    def there_and_back(a, b):
        copies = autograd.broadcast_buckets(devices_of(ranks), [a, b])
        terms = [(rank + 1) * (x**3).sum() * (y.abs() ** 2).sum() for rank, (x, y) in enumerate(copies)]
        return autograd.reduce_tensors([[term] for term in terms], torch.device("cpu"))[0]

    assert torch.autograd.gradcheck(there_and_back, (a, b))
    assert torch.autograd.gradgradcheck(there_and_back, (a, b))


def test_what_no_rank_used_gets_no_gradient():
    used, unused, once = (torch.ones(2, requires_grad=True) for _ in range(3))
    copies = autograd.broadcast_buckets(devices_of(3), [used, unused, once])
    (sum(row[0].sum() for row in copies) + 5 * copies[2][2].sum()).backward()
    assert used.grad.tolist() == [3, 3]
    assert unused.grad is None
    assert once.grad.tolist() == [5, 5]


def test_rank_0_is_the_tensor_and_the_others_are_not():
    w = torch.ones(2, requires_grad=True)
    copies = [row[0] for row in autograd.broadcast_buckets(devices_of(3), [w])]
    assert [copy.data_ptr() == w.data_ptr() for copy in copies] == [True, False, False]
    loss = (copies[0] ** 2).sum()
    with torch.no_grad():
        w.add_(1)  # an optimizer's step between forward and backward is noticed, as on one device
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_are_added_in_rank_order():
    w = torch.zeros(1, requires_grad=True)
    copies = autograd.broadcast_buckets(devices_of(3), [w])
    sum(scale * copy[0].sum() for scale, copy in zip((1e8, 1.0, -1e8), copies, strict=True)).backward()
    assert w.grad.item() == 0.0  # (1e8 + 1) - 1e8; any other order gives 1


def test_buckets():
    tensors = [torch.zeros(4), torch.zeros(4), torch.zeros(4, dtype=torch.float64), torch.eye(2).to_sparse()]
    assert bucket_positions(tensors, 16) == [[0], [1], [2], [3]]
    assert bucket_positions(tensors, 10**6) == [[0, 1], [2], [3]]


class _Meet(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *tensors):
        ctx.save_for_backward(*tensors)
        return torch.zeros(())

    @staticmethod
    def backward(ctx, _):
        return ctx.saved_tensors


def test_buckets_that_are_ready_together_are_reduced_last_tensors_first():
    order = []
    dtypes = torch.float16, torch.float32, torch.float64  # a bucket for each
    tensors = [torch.ones(1, dtype=dtype, requires_grad=True) for dtype in dtypes]
    for place, each in enumerate(tensors):
        each.register_hook(lambda _, place=place: order.append(place))
    (copies,) = autograd.broadcast_buckets(devices_of(1), tensors)
    _Meet.apply(*copies).backward()
    assert order == [2, 1, 0]


def test_the_first_reduction_comes_before_the_last_modules_backward(monkeypatch):
    """Layers of 4 MiB: several buckets.  The last layer's bucket is reduced while the first layers still wait."""
    net = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(6)))
    order = []

    def mark(name):
        return lambda *_: order.append(name)

    real = autograd.dispatch.reduce_batch

    def reduce_batch(*arguments):
        order.append("reduce")
        return real(*arguments)

    monkeypatch.setattr(autograd.dispatch, "reduce_batch", reduce_batch)
    for position, layer in enumerate(net):
        layer.register_full_backward_hook(mark(f"backward {position}"))
    x = torch.randn(4, 1024, requires_grad=True)
    model = mgpu_core.DataParallel(net, ["cpu"] * 2)
    for run in (lambda work: work(), in_a_new_thread):
        order.clear()
        run(lambda: model(x).sum().backward())
        assert order.count("reduce") == 3  # two layers a bucket
        # Which rank goes first depends on how much its worker has computed before: the later one ends a bucket.
        last = {name: len(order) - 1 - order[::-1].index(name) for name in order}
        assert order.index("reduce") < last["backward 2"] < last["backward 0"]
