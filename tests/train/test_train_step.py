"""What a TrainStep promises, on 1, 2, 3 and 8 ranks, with numbers that are exact."""

import copy
import gc
import io
import threading
import weakref

import pytest
import torch
from fakes.nets import Spy, chunks, cpu
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.utils.checkpoint import checkpoint
from train.nets import RANKS, Branches, Linear, Pair, batches, here, mse

from mgpu_core import Replicate, TrainStep, _core, optim


def total(output, target):
    return ((output - target) * output.detach()).sum()


def rows(count, columns=3):
    return (torch.arange(count * columns).reshape(count, columns) % 7 - 3).float()


def sgd(p):
    return SGD(p, lr=0.25)


def plain_step(ranks, **settings):
    net = Linear()
    return net, TrainStep(net, total, sgd(net.parameters()), cpu(ranks), reduction="sum", **settings)


# What a call gives.


@pytest.mark.parametrize("ranks", RANKS)
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


@pytest.mark.parametrize("ranks", RANKS)
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


@pytest.mark.parametrize("ranks", [2, 3, 8])
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


@pytest.mark.parametrize("ranks", [1, 2, 3])
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


@pytest.mark.parametrize("ranks", [1, 2, 3])
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


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("limit", [1, 100, 10_000_000])
def test_buckets_of_any_size_give_the_same(ranks, limit):
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)], nn.Linear(4, 2)).double()
    pair = Pair(net, lambda p: SGD(p, lr=0.1, momentum=0.9), ranks, bucket_nbytes=limit)
    for x, y in batches(5, 12):
        pair.both(x, y)
    assert pair.far() < 1e-12
    assert len(pair.step._loop.reducer.buckets.buckets) == {1: 14, 100: 13, 10_000_000: 1}[limit]


def test_buckets_follow_the_order_of_gradients_and_are_summed_during_backward():
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    step = TrainStep(net, mse, sgd(net.parameters()), cpu(2), bucket_nbytes=1, workers="threads")
    x, y = rows(4, 4), rows(4, 4)
    step(x, y)
    order = [step._loop.reducer.buckets.buckets[b].segments[0].parameter for b in range(8)]
    assert [i // 2 for i in order] == [3, 3, 2, 2, 1, 1, 0, 0], "the last layers are ready first"
    summed = []
    original = step._loop.reducer._sum
    step._loop.reducer._sum = lambda bucket: (summed.append((bucket, threading.get_ident())), original(bucket))
    step(x, y)
    assert sorted(bucket for bucket, _ in summed) == list(range(8)), "each once"
    assert threading.get_ident() not in {thread for _, thread in summed}, "by the ranks, not after them"


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3])
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


@pytest.mark.parametrize("ranks", [1, 2, 3])
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


@pytest.mark.parametrize("ranks", [1, 2])
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


@pytest.mark.parametrize("ranks", RANKS)
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


@pytest.mark.parametrize("ranks", [1, 2, 3])
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


# The module while it is trained.


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_frozen_and_thawed(ranks):
    torch.manual_seed(0)
    pair = Pair(Branches().double(), lambda p: AdamW(p, lr=0.01), ranks)
    for i, (x, y) in enumerate(batches(12, 9)):
        for net in (pair.net, pair.alone):
            net.first.requires_grad_(i % 4 != 1)
        pair.both(x, 2, y)
        assert pair.same_gradients()
    assert pair.far() < 1e-12


@pytest.mark.parametrize("ranks", [1, 2])
def test_frozen_from_the_start(ranks):
    torch.manual_seed(0)
    net = Branches().double()
    net.second.requires_grad_(False)
    pair = Pair(net, lambda p: AdamW([each for each in p if each.requires_grad], lr=0.01), ranks)
    for i, (x, y) in enumerate(batches(8, 9)):
        if i == 4:
            for each, optimizer in ((pair.net, pair.optimizer), (pair.alone, pair.reference)):
                each.second.requires_grad_(True)
                optimizer.add_param_group({"params": list(each.second.parameters()), "lr": 0.1})
        pair.both(x, 2, y)
    assert pair.far() < 1e-12


@pytest.mark.parametrize("ranks", [2, 3])
def test_training_and_evaluating_reach_all_ranks(ranks):
    seen = []

    class Net(Linear):
        def forward(self, x):
            seen.append(self.training)
            return super().forward(x)

    net = Net()
    step = TrainStep(net, mse, sgd(net.parameters()), cpu(ranks))
    for mode in (True, False, True):
        net.train(mode)
        seen.clear()
        step(rows(6), rows(6, 2))
        assert seen == [mode] * ranks


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_running_statistics_are_those_of_rank_0s_rows(ranks):
    means = []

    class Net(nn.BatchNorm1d):
        def forward(self, x):
            means.append(self.running_mean.tolist())
            return super().forward(x)

    net, alone = Net(3), nn.BatchNorm1d(3)
    step = TrainStep(net, mse, sgd(net.parameters()), cpu(ranks))
    parts = rows(9).split(chunks(9, ranks))
    for _ in range(3):
        means.clear()
        step(rows(9), rows(9))
        assert means == [alone.running_mean.tolist()] * ranks  # each step begins with the module's own statistics
        alone(parts[0])
    assert torch.equal(net.running_mean, alone.running_mean)
    assert torch.equal(net.running_var, alone.running_var)
    assert net.num_batches_tracked == 3


def test_values_changed_in_place_are_trained_on():
    net, step = plain_step(2)
    step(rows(4), rows(4, 2))
    with torch.no_grad():
        net.last.weight.fill_(2)
        net.last.bias.zero_()
    _, outputs = step.evaluate(rows(4), rows(4, 2), return_outputs=True)
    assert torch.equal(outputs, 2 * rows(4).sum(1, keepdim=True).expand(4, 2))
    other = Linear()
    net.load_state_dict(other.state_dict())
    _, outputs = step.evaluate(rows(4), rows(4, 2), return_outputs=True)
    assert torch.equal(outputs, other(rows(4)).detach())


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.double(),
        lambda net: setattr(net.last.weight, "data", net.last.weight.data.clone()),
        lambda net: net.load_state_dict(Linear().state_dict(), assign=True),
        lambda net: setattr(net, "more", nn.Linear(3, 2)),
        lambda net: setattr(net, "last", nn.Linear(3, 2)),
        lambda net: net.last.register_parameter("bias", None),
    ],
)
@pytest.mark.parametrize("ranks", RANKS)
def test_moved_and_new_parameters_are_trained_on(change, ranks):
    net, step = plain_step(ranks)
    step(rows(8), rows(8, 2))
    change(net)
    alone, dtype = copy.deepcopy(net), net.last.weight.dtype
    x, y = rows(8).to(dtype), rows(8, 2).to(dtype)
    for _ in range(2):
        total(alone(x), y).backward()
        step(x, y)
        assert torch.allclose(net.last.weight.grad, alone.last.weight.grad)
        alone.load_state_dict(net.state_dict())
        alone.zero_grad()


def test_rebuild_after_a_change():
    net, step = plain_step(2)
    step(rows(4), rows(4, 2))
    net.double()
    step.rebuild()
    loss = step(rows(4).double(), rows(4, 2).double())
    assert loss.dtype == torch.float64
    alone = copy.deepcopy(net)
    total(alone(rows(4).double()), rows(4, 2).double()).backward()
    step(rows(4).double(), rows(4, 2).double())
    assert torch.equal(net.last.weight.grad, alone.last.weight.grad)


def test_gradients_of_the_user_are_not_added():
    net, step = plain_step(2)
    alone = copy.deepcopy(net)
    total(alone(rows(4)), rows(4, 2)).backward()
    net.last.weight.grad = torch.full_like(net.last.weight, 100)
    step(rows(4), rows(4, 2))
    assert torch.equal(net.last.weight.grad, alone.last.weight.grad)
    step.optimizer.zero_grad()
    net(rows(4)).sum().backward()  # a backward of the user's own between two steps
    step(rows(4), rows(4, 2))
    assert net.last.weight.grad.abs().sum() > 0


# The end.


def test_close_gives_everything_memory_of_its_own():
    net = Linear()
    step = TrainStep(net, mse, AdamW(net.parameters()), cpu(2))
    step(rows(4), rows(4, 2))
    step.close()
    tensors = [*net.parameters(), *step.optimizer.state[net.last.weight].values()]
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in tensors)
    with pytest.raises(RuntimeError, match="closed"):
        step(rows(4), rows(4, 2))
    step.close()
    mse(net(rows(4)), rows(4, 2)).backward()
    step.optimizer.step()


def test_copies_and_saved_states_are_compact():
    net, step = plain_step(2)
    step(rows(4), rows(4, 2))
    for each in copy.deepcopy(net).parameters():
        assert each.untyped_storage().nbytes() == each.nbytes
    state = step.state_dict()
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in state["module"].values())
    before = {name: value.clone() for name, value in state["module"].items()}
    step(rows(4), rows(4, 2))
    assert all(torch.equal(value, before[name]) for name, value in state["module"].items())


def test_a_dropped_step_is_gone_and_the_net_trains_on():
    net, step = plain_step(2)
    step(rows(4), rows(4, 2))
    gone = weakref.ref(step._loop.reducer)
    del step
    gc.collect()
    assert gone() is None
    assert not net.last.weight._post_accumulate_grad_hooks
    again = TrainStep(net, total, sgd(net.parameters()), cpu(3), reduction="sum")
    alone = copy.deepcopy(net)
    total(alone(rows(4)), rows(4, 2)).backward()
    again(rows(4), rows(4, 2))
    assert torch.equal(net.last.weight.grad, alone.last.weight.grad)


# State.


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 2), (2, 2)])
@pytest.mark.parametrize("make", [lambda p: AdamW(p, lr=0.01), lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.5)])
def test_resumed_on_another_number_of_ranks(before, after, make):
    torch.manual_seed(0)
    net = Branches().double()
    other = copy.deepcopy(net)
    step = TrainStep(net, mse, make(net.parameters()), cpu(before))
    data = list(batches(8, 9))
    for i, (x, y) in enumerate(data[:4]):
        step(x, i % 2, y)
    file = io.BytesIO()
    torch.save(step.state_dict(), file)
    file.seek(0)
    resumed = TrainStep(other, mse, make(other.parameters()), cpu(after))
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert resumed.steps == 4
    for i, (x, y) in enumerate(data[4:]):
        step(x, i % 2, y)
        resumed(x, i % 2, y)
    for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-12 if before != after else 0)


def test_the_optimizers_own_state_works_as_ever():
    torch.manual_seed(0)
    pair = Pair(Branches().double(), lambda p: AdamW(p, lr=0.01), 2)
    data = list(batches(9, 9))
    for i, (x, y) in enumerate(data[:3]):
        pair.both(x, i % 2, y)
    mine, theirs = pair.optimizer.state_dict(), pair.reference.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    for index, state in theirs["state"].items():
        for name, value in state.items():
            assert torch.allclose(mine["state"][index][name], value)
            assert mine["state"][index][name].dtype == value.dtype
    # Into a torch optimizer, and back into ours.
    pair.reference.load_state_dict(copy.deepcopy(mine))
    pair.optimizer.load_state_dict(copy.deepcopy(theirs))
    for i, (x, y) in enumerate(data[3:]):
        pair.both(x, i % 2, y)
    assert pair.far() < 1e-12


@pytest.mark.parametrize("make", [lambda p: AdamW(p, lr=0.01), lambda p: SGD(p, lr=0.1, momentum=0.9)])
def test_a_state_loaded_in_the_middle_is_taken_over(make):
    torch.manual_seed(0)
    pair = Pair(Branches().double(), make, 2)
    data = list(batches(9, 9))
    for x, y in data[:3]:
        pair.both(x, 2, y)
    kept = copy.deepcopy(pair.optimizer.state_dict())
    for x, y in data[3:6]:
        pair.both(x, 2, y)
    for optimizer in (pair.optimizer, pair.reference):
        optimizer.load_state_dict(copy.deepcopy(kept))
    for x, y in data[6:]:
        pair.both(x, 2, y)
    assert pair.far() < 1e-12


def test_the_modules_versions_are_in_the_state():
    _, step = plain_step(2)
    assert step.state_dict()["module"]._metadata[""]["version"] == 1


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
@pytest.mark.parametrize("first", ["scheduler", "state"])
def test_a_state_with_what_a_scheduler_has_added(first):
    """In the usual order: a scheduler that goes on needs what the state has, and one that is new adds it itself."""

    def scheduler(optimizer, steps=-1):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5, last_epoch=steps)

    def resumed(state, load):
        net = Linear()
        optimizer = SGD(net.parameters(), lr=0.5, momentum=0.9)
        if first == "scheduler":
            schedule = scheduler(optimizer)
        load(net, optimizer, state)
        if first == "state":
            schedule = scheduler(optimizer, 1)
        schedule.step()
        return {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}

    net = Linear()
    optimizer = SGD(net.parameters(), lr=0.5, momentum=0.9)
    step, schedule = TrainStep(net, mse, optimizer, cpu(2)), scheduler(optimizer)
    step(torch.ones(4, 3), torch.zeros(4, 2))
    schedule.step()
    state = step.state_dict()
    found = resumed(state, lambda net, made, state: TrainStep(net, mse, made, cpu(2)).load_state_dict(state))
    assert found == resumed(state, lambda _, made, state: made.load_state_dict(state["optimizer"]))
    del state["optimizer"]["param_groups"][0]["momentum"]
    with pytest.raises(ValueError, match="another optimizer than SGD: its groups have no momentum"):
        step.load_state_dict(state)


def test_tied_weights_are_saved_once(tmp_path):
    net = nn.Sequential(nn.Linear(200, 200, bias=False), nn.Linear(200, 200, bias=False))
    net[1].weight = net[0].weight
    step = TrainStep(net, mse, SGD(net.parameters(), lr=0.5), cpu(2))
    torch.save(step.state_dict(), tmp_path / "step.pt")
    assert (tmp_path / "step.pt").stat().st_size < 250_000  # of 160,000 bytes each
    state = torch.load(tmp_path / "step.pt", weights_only=True)
    step.load_state_dict(state)
    assert state["module"]["0.weight"].data_ptr() == state["module"]["1.weight"].data_ptr()


def test_state_of_steps_before_is_taken_over():
    """An optimizer that has already trained goes on where it was."""
    torch.manual_seed(0)
    net = Branches().double()
    alone = copy.deepcopy(net)
    optimizer, reference = AdamW(net.parameters(), lr=0.01), AdamW(alone.parameters(), lr=0.01)
    data = list(batches(8, 9))
    for each, its in ((net, optimizer), (alone, reference)):
        for i, (x, y) in enumerate(data[:4]):
            its.zero_grad()
            mse(each(x, i % 2), y).backward()
            its.step()
    step = TrainStep(net, mse, optimizer, cpu(2))
    for x, y in data[4:]:
        step(x, 2, y)
        reference.zero_grad()
        mse(alone(x, 2), y).backward()
        reference.step()
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(net.parameters(), alone.parameters(), strict=True))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("name", "value"), [("amsgrad", False), ("amsgrad", True), ("decoupled_weight_decay", True)])
def test_switches_of_the_groups_between_two_steps(name, value, ranks):
    started = {"amsgrad": not value} if name == "amsgrad" else {}
    pair = Pair(Branches().double(), lambda p: Adam(p, lr=0.1, weight_decay=0.5, **started), ranks)
    for i, (x, y) in enumerate(batches(9, 8)):
        if i == 4:
            for opt in (pair.optimizer, pair.reference):
                opt.param_groups[0][name] = value
                if name == "amsgrad" and value:  # torch looks for it, and makes none
                    for state in opt.state.values():
                        state["max_exp_avg_sq"] = torch.zeros_like(state["exp_avg_sq"])
        pair.both(x * (10 if i < 3 else 0.1), 2, y)
        assert pair.far() < 1e-9, i


@pytest.mark.parametrize("change", [lambda opt: opt.state.clear(), lambda opt: opt.state.popitem()])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=0.1, momentum=0.9), lambda p: Adam(p, lr=0.1)])
def test_state_that_the_user_takes_away_begins_anew(make, ranks, change):
    pair = Pair(Branches().double(), make, ranks)
    for i, (x, y) in enumerate(batches(9, 8)):
        if i in (4, 5):
            change(pair.optimizer)
            change(pair.reference)
        pair.both(x, 2, y)
    assert pair.same_state()
    assert pair.far() < 1e-9


@pytest.mark.parametrize("ranks", [1, 2])
def test_schedulers_groups_and_edits(ranks):
    torch.manual_seed(0)

    def groups(net):
        first = [*net.first.parameters(), *net.rare.parameters()]
        others = [*net.second.parameters(), *net.last.parameters()]
        settings = [{"params": first, "weight_decay": 0.1}, {"params": others, "momentum": 0.0}]
        return optim.SGD(settings, lr=0.05, momentum=0.9)

    net = Branches().double()
    alone = copy.deepcopy(net)
    optimizer, reference = groups(net), groups(alone)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 3, 0.5) for each in (optimizer, reference)]
    step = TrainStep(net, mse, optimizer, cpu(ranks))
    for i, (x, y) in enumerate(batches(12, 9)):
        if i == 6:
            for each in (optimizer, reference):
                each.param_groups[1]["momentum"] = 0.5
                each.param_groups[1]["dampening"] = 0.3
        step(x, i % 3, y)
        reference.zero_grad()
        mse(alone(x, i % 3), y).backward()
        reference.step()
        for schedule in schedules:
            schedule.step()
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(net.parameters(), alone.parameters(), strict=True))
    assert optimizer._flat is not None


@pytest.mark.parametrize("make", [SGD, optim.SGD])
def test_step_hooks_run_once_a_step(make):
    net = Linear()
    optimizer = make(net.parameters(), lr=0.1)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    step = TrainStep(net, mse, optimizer, cpu(2))
    step(rows(4), rows(4, 2))
    step(rows(4), rows(4, 2))
    assert calls == [1, 1]
