"""A step gives what one device gives, on 1, 2, 3 and 8 ranks, with numbers that are exact."""

import copy
import threading

import pytest
import torch
from fakes.nets import Spy, chunks, cpu
from fakes.traces import buckets, of, traced
from step.nets import Branches, Linear, Pair, batches, here, mse, plain_step, rows, sgd, total
from torch import nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from mgpu_core import Replicate, TrainStep, _core
from mgpu_core.trace.events import Span

# What a call gives.


@pytest.mark.parametrize("count", [1, 5, 16])
def test_sums_are_exact(ranks, count):
    alone = Linear()
    net, step = plain_step(ranks)
    x, y = rows(count), rows(count, 2)
    wanted = total(alone(x), y)
    wanted.backward()
    assert torch.equal(step(x, y), wanted.detach())
    for mine, theirs in zip(net.parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
        assert torch.equal(mine, theirs - 0.25 * theirs.grad)
    assert step.steps == 1


def test_the_loss_is_fresh_and_has_no_graph(ranks):
    net, step = plain_step(ranks)
    first = step(rows(8), rows(8, 2))
    kept = first.clone()
    second = step(rows(8), rows(8, 2))
    assert first.dim() == 0
    assert not first.requires_grad
    assert torch.equal(first, kept)
    assert first.data_ptr() != second.data_ptr()
    assert step.module is net


@pytest.mark.cpu_only("says cpu, or the core's algorithms, in what it expects; tests/accelerator has its like")
@pytest.mark.several_ranks
def test_each_rank_has_its_rows_its_thread_and_the_same_values(ranks):
    net = Spy()
    step = TrainStep(net, mse, sgd(net.parameters()), cpu(ranks), workers="threads")
    x = torch.arange(16.0).unsqueeze(1).expand(16, 2).contiguous()
    step(x, torch.zeros(16, 2))
    seen = net.by_rank()
    assert [len(note["rows"]) for note in seen] == chunks(16, ranks)
    assert [row for note in seen for row in note["rows"]] == list(range(16))
    assert len({note["thread"] for note in seen}) == ranks
    assert threading.get_ident() not in {note["thread"] for note in seen}
    assert len({note["weight"] for note in seen}) == 1, "one copy of the values per device"
    assert len({note["leaf"] for note in seen}) == ranks, "each rank has its own leaf"


def test_outputs_targets_and_keywords_may_be_nests(ranks):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(3, 2)

        def forward(self, x, *, scale, table):
            assert table.shape == (4,)
            return {"out": self.last(x["a"]) * scale, "rows": x["a"].shape[0] * torch.ones(x["a"].shape[0])}

    def loss_fn(output, target):
        first, second = target
        return ((output["out"] - first) ** 2).mean() + second.mean()

    torch.manual_seed(0)
    net = Net()
    step = TrainStep(net, loss_fn, sgd(net.parameters()), cpu(ranks))
    x = {"a": rows(6)}
    loss, outputs = step(
        x, (rows(6, 2), torch.ones(6)), scale=torch.ones(6, 1), table=Replicate(torch.ones(4)), return_outputs=True
    )
    assert outputs["out"].shape == (6, 2)
    assert not outputs["out"].requires_grad
    assert outputs["rows"].tolist() == [float(n) for n in chunks(6, ranks) for _ in range(n)]
    assert loss.dim() == 0


def test_the_module_may_return_the_loss(ranks):
    class Net(Linear):
        def forward(self, x, y):
            return mse(super().forward(x), y)

    net, alone = Net(), Net()
    step = TrainStep(net, None, sgd(net.parameters()), cpu(ranks))
    wanted = alone(rows(6), rows(6, 2))
    wanted.backward()
    assert torch.allclose(step(rows(6), rows(6, 2)), wanted.detach())
    assert torch.allclose(net.last.weight.grad, alone.last.weight.grad, atol=1e-5)


def test_evaluate_changes_nothing():
    net, step = plain_step(2)
    before = copy.deepcopy(net.state_dict())
    loss, outputs = step.evaluate(rows(5), rows(5, 2), return_outputs=True)
    assert torch.equal(outputs, net(rows(5)).detach())
    assert torch.equal(loss, total(outputs, rows(5, 2)))
    assert step.steps == 0
    assert net.last.weight.grad is None
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    step(rows(5), rows(5, 2))
    gradient = net.last.weight.grad.clone()
    step.evaluate(rows(5), rows(5, 2))
    assert torch.equal(net.last.weight.grad, gradient)


@pytest.mark.cpu_only("says cpu, or the core's algorithms, in what it expects; tests/accelerator has its like")
def test_the_counters_know_every_byte():
    net, step = plain_step(3)
    nbytes = sum(each.nbytes for each in net.parameters())
    for _ in range(2):  # the first step learns the order, the second has it
        before = _core.counters()
        step(rows(6), rows(6, 2))
        after = _core.counters()
        for rank in range(3):
            calls, moved = before.get(("reduce", "direct", rank), (0, 0))
            assert after["reduce", "direct", rank] == (calls + 1, moved + nbytes)
        assert {key for key in after if key[0] == "broadcast"} == {key for key in before if key[0] == "broadcast"}


# Buckets.


@pytest.mark.several_ranks
@pytest.mark.parametrize("limit", [1, 100, 10_000_000])
def test_buckets_of_any_size_give_the_same(ranks, limit):
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)], nn.Linear(4, 2)).double()
    pair = Pair(net, lambda p: SGD(p, lr=0.1, momentum=0.9), ranks, bucket_nbytes=limit)
    for batch in batches(5, 12):
        trace = traced(lambda batch=batch: pair.both(*batch))
    assert pair.far() < 1e-12
    assert len(buckets(trace)) == {1: 14, 100: 13, 10_000_000: 1}[limit]


def test_buckets_follow_the_order_of_gradients_and_are_summed_during_backward():
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    step = TrainStep(net, mse, sgd(net.parameters()), cpu(2), bucket_nbytes=1, workers="threads")
    x, y = rows(4, 4), rows(4, 4)
    step(x, y)
    trace = traced(lambda: step(x, y))
    order = [name[0] for (name,) in buckets(trace)]
    assert order == [*"33221100"], "the last layers are ready first"
    summed = of(trace, Span, "all_reduce")
    once = 1 if len(set(cpu(2))) == 1 else 3  # on each of two devices, and over them
    assert sorted(each.bucket for each in summed) == sorted([*range(8)] * once), "each once"
    assert threading.get_ident() not in {each.thread for each in summed}, "by the ranks, not after them"


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_used_twice(ranks, reentrant):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.shared = nn.Linear(4, 4), nn.Linear(4, 4)
            self.last = nn.Linear(4, 2)

        def forward(self, x):
            x = self.first(x)
            x = checkpoint(self.shared, x, use_reentrant=reentrant)
            x = checkpoint(self.shared, torch.tanh(x), use_reentrant=reentrant)
            return self.last(x)

    torch.manual_seed(0)
    pair = Pair(Net().double(), lambda p: SGD(p, lr=0.1), ranks, bucket_nbytes=1)
    for x, y in batches(5, 9):
        pair.both(x, y)
        assert pair.same_gradients()
    assert pair.far() < 1e-12


# Accumulation, reductions, clipping.


def test_accumulated_calls_are_one_batch(ranks):
    net, alone = Linear().double(), Linear().double()
    step = TrainStep(net, mse, sgd(net.parameters()), cpu(ranks), accumulate=3)
    data = list(batches(3, [4, 7, 2], columns=3))
    for i, (x, y) in enumerate(data):
        before = net.last.weight.clone()
        loss = step(x, y)
        assert torch.allclose(loss, mse(alone(x), y).detach()), "of its own batch"
        assert torch.equal(before, net.last.weight) == (i < 2)
    mse(alone(torch.cat([x for x, _ in data])), torch.cat([y for _, y in data])).backward()
    assert torch.allclose(net.last.weight.grad, alone.last.weight.grad)
    assert step.steps == 1


def test_no_sync_and_flush(ranks):
    net, alone = Linear().double(), Linear().double()
    step = TrainStep(net, mse, sgd(net.parameters()), cpu(ranks))
    (x1, y1), (x2, y2) = batches(2, [6, 4], columns=3)
    assert not step.flush()
    with step.no_sync():
        step(x1, y1)
        step(x2, y2)
    assert step.steps == 0
    assert step.flush()
    assert step.steps == 1
    mse(alone(torch.cat([x1, x2])), torch.cat([y1, y2])).backward()
    assert torch.allclose(net.last.weight.grad, alone.last.weight.grad)
    step(x1, y1)  # the next begins anew
    assert step.steps == 2


def test_weighted_losses(ranks):
    """Cross-entropy with class weights and an ignored class, over two calls: one device's, whatever the split."""
    weights = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)

    def loss_fn(output, target):
        kept = target != -100
        mine = weights.to(output.device)
        loss = nn.functional.cross_entropy(output, target, mine, reduction="sum", ignore_index=-100)
        return loss, mine[target[kept]].sum()

    torch.manual_seed(0)
    net = nn.Linear(4, 3).double()
    alone = copy.deepcopy(net)
    step = TrainStep(net, loss_fn, sgd(net.parameters()), cpu(ranks), reduction="weighted", accumulate=2)
    generator = torch.Generator().manual_seed(1)
    x = here(torch.randn(20, 4, generator=generator, dtype=torch.float64, device="cpu"))
    y = here(torch.randint(0, 3, (20,), generator=generator, device="cpu"))
    y[::3] = -100
    for part in (slice(0, 11), slice(11, 20)):
        loss = step(x[part], y[part])
        assert torch.allclose(loss, nn.functional.cross_entropy(alone(x[part]), y[part], weights))
    nn.functional.cross_entropy(alone(x), y, weights).backward()
    assert torch.allclose(net.weight.grad, alone.weight.grad)


@pytest.mark.parametrize("limit", [0.01, 1000.0])
def test_clip_norm_is_torchs(ranks, limit):
    torch.manual_seed(0)
    net = Branches().double()
    alone = copy.deepcopy(net)
    optimizer, reference = SGD(net.parameters(), lr=0.1), SGD(alone.parameters(), lr=0.1)
    step = TrainStep(net, mse, optimizer, cpu(ranks), clip_norm=limit)
    for i, (x, y) in enumerate(batches(6, 9)):
        step(x, i % 3, y)
        reference.zero_grad()
        mse(alone(x, i % 3), y).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), limit)
        reference.step()
        for mine, theirs in zip(net.parameters(), alone.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            assert torch.allclose(mine, theirs)
            assert mine.grad is None or torch.allclose(mine.grad, theirs.grad)


def test_shares_and_empty_ranks():
    net = Spy()
    step = TrainStep(net, mse, sgd(net.parameters()), cpu(3), shares=[2, 1, 1])
    step(torch.ones(8, 2), torch.zeros(8, 2))
    assert sorted(len(note["rows"]) for note in net.seen) == [2, 2, 4]
    alone = Linear()
    net, step = plain_step(8)
    total(alone(rows(3)), rows(3, 2)).backward()
    step(rows(3), rows(3, 2))  # five ranks have nothing to do
    assert torch.equal(net.last.weight.grad, alone.last.weight.grad)
