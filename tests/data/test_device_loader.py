"""Batches one ahead, and batches that are split for their ranks before a step sees them; on CPU ranks."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mgpu_core
from mgpu_core import DataParallel, DeviceLoader, Replicate, Rows, TrainStep
from mgpu_core.parallel.scatter_inputs import split_ahead
from mgpu_core.ranks.team import Team
from mgpu_core.trees.nested import RankParts


def team(ranks):
    return Team.of(["cpu"] * ranks)


def numbers(rows, columns=3):
    return torch.arange(float(rows * columns)).view(rows, columns) / 8


def test_every_batch_comes_once_and_in_order(ranks):
    data = TensorDataset(numbers(10), torch.arange(10))
    loader = DataLoader(data, batch_size=4)
    wrapped = DeviceLoader(loader, ["cpu"] * ranks)
    for _ in range(2):
        got = list(wrapped)
        assert [y.tolist() for _, y in got] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert torch.equal(torch.cat([x for x, _ in got]), numbers(10))
    assert (len(wrapped), wrapped.batch_size, wrapped.dataset is data) == (3, 4, True)
    assert list(wrapped.device_ids) == [torch.device("cpu")] * ranks


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_one_batch_ahead_and_no_more(count):
    taken = []

    def batches():
        for number in range(count):
            taken.append(number)
            yield torch.tensor([number])

    seen = []
    for batch in DeviceLoader(batches(), ["cpu"]):
        seen.append(batch.item())
        assert len(taken) == min(len(seen) + 1, count)
    assert seen == list(range(count))


def test_an_error_of_the_loader_comes_a_batch_early():
    def batches():
        yield torch.tensor([1])
        yield torch.tensor([2])
        raise KeyError("of the data")

    seen = []
    with pytest.raises(KeyError, match="of the data"):
        seen.extend(batch.item() for batch in DeviceLoader(batches(), ["cpu"]))
    assert seen == [1]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"loader": 3}, TypeError, "not be a int"),
        ({"device_ids": []}, ValueError, "empty"),
        ({"device_ids": ["nonsense"]}, ValueError, "not a device"),
        ({"shares": [1]}, ValueError, "2 ranks, 1 shares"),
    ],
)
def test_wrong_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        DeviceLoader(**({"loader": [], "device_ids": ["cpu"] * 2} | arguments))


def test_without_ids_and_accelerators_it_is_the_cpu(monkeypatch):
    monkeypatch.setattr("mgpu_core.data.device_loader.default_devices", list)
    assert DeviceLoader([]).device_ids == (torch.device("cpu"),)


@pytest.mark.parametrize(("ranks", "rows", "counts"), [(2, 5, [3, 2]), (3, 9, [3, 3, 3]), (8, 3, [1, 1, 1])])
def test_a_batch_is_split_as_scatter_does_it(ranks, rows, counts):
    x = numbers(rows)
    batch = {"x": x, "boxes": Rows([[i] for i in range(rows)]), "name": "a", "scale": torch.tensor(2.0)}
    split = split_ahead(batch, team(ranks), 0, None)
    assert split["x"].counts == split["boxes"].counts == counts
    for part, wanted in zip(split["x"].parts, mgpu_core.scatter(x, ["cpu"] * ranks), strict=True):
        assert torch.equal(part, wanted)
    assert split["boxes"].joined() == [[i] for i in range(rows)]
    assert (split["name"], split["scale"] is batch["scale"]) == ("a", True)


def test_shares_and_another_dimension():
    split = split_ahead([numbers(2, 6), "text"], team(2), 1, [2, 1])
    assert (split[0].counts, split[0].dim, len(split[0]), split[1]) == ([4, 2], 1, 2, "text")
    assert torch.equal(split[0].joined(), numbers(2, 6))
    assert split_ahead("no rows", team(2), 0, None) == "no rows"


def test_tensors_that_disagree_are_named():
    with pytest.raises(ValueError, match=r"batch\[0\] has shape \(4, 3\), batch\[1\] has shape \(5,\)"):
        split_ahead((numbers(4), torch.zeros(5)), team(2), 0, None)


def test_torch_sees_the_rows_joined():
    y = split_ahead(torch.tensor([0, 1, 2, 1, 0]), team(2), 0, None)
    whole = torch.tensor([0, 1, 2, 1, 0])
    logits = numbers(5)
    assert torch.equal(nn.functional.cross_entropy(logits, y), nn.functional.cross_entropy(logits, whole))
    assert (logits.argmax(1) == y).sum() == (logits.argmax(1) == whole).sum()
    assert torch.equal(torch.stack([y, whole]), torch.stack([whole, whole]))
    assert (y.shape, y.size(0), y.dtype, len(y), y.tolist()) == ((5,), 5, torch.int64, 5, whole.tolist())
    assert torch.equal(y.to(torch.float64), whole.double())


@pytest.mark.several_ranks
def test_wrappers_and_steps_take_the_parts_as_they_are(ranks):
    class Spy(nn.Linear):
        def forward(self, x, *, mask=None):
            seen.append(x.data_ptr())
            return super().forward(x) * mask

    seen = []
    net = Spy(3, 2)
    x, y, mask = numbers(9), torch.ones(9, 2), torch.ones(9, 1)
    wanted = net(x, mask=mask)
    seen.clear()
    split = split_ahead((x, y, mask), team(ranks), 0, None)
    assert torch.allclose(DataParallel(net, ["cpu"] * ranks)(split[0], mask=split[2]), wanted)
    assert sorted(seen) == sorted(part.data_ptr() for part in split[0].parts)
    losses = []
    for batch in ((x, y, mask), split):
        step = TrainStep(net, nn.functional.mse_loss, torch.optim.SGD(net.parameters(), lr=0.0), ["cpu"] * ranks)
        losses.append(step(batch[0], batch[1], mask=batch[2]).item())
    assert losses[0] == losses[1]


@pytest.mark.parametrize("loss_on", ["ranks", "gathered"])
def test_evaluation_outputs_and_a_loss_of_all_rows(loss_on):
    net = nn.Linear(3, 2)
    x, y = numbers(7), torch.ones(7, 2)
    options = {"device_ids": ["cpu"] * 3, "loss_on": loss_on}
    step = TrainStep(net, nn.functional.mse_loss, torch.optim.SGD(net.parameters(), lr=0.0), **options)
    split = split_ahead((x, y), team(3), 0, None)
    assert step.evaluate(*split).item() == step.evaluate(x, y).item()
    loss, outputs = step(*split, return_outputs=True)
    assert torch.allclose(loss, nn.functional.mse_loss(net(x), y))
    assert torch.allclose(outputs, net(x))


def test_rows_and_tensors_that_are_not_split_go_along():
    class Net(nn.Linear):
        def forward(self, x, boxes, bias, table):
            seen.append((len(x), boxes, len(bias), len(table)))
            return super().forward(x) + bias

    seen = []
    split = split_ahead((numbers(5), Rows(list("abcde"))), team(2), 0, None)
    DataParallel(Net(3, 2), ["cpu"] * 2, workers="caller")(*split, torch.ones(5, 2), Replicate(torch.ones(4)))
    assert seen == [(3, ["a", "b", "c"], 3, 4), (2, ["d", "e"], 2, 4)]


@pytest.mark.parametrize("device_ids", [[], ["cpu"]])
def test_a_plain_module_gets_all_rows(device_ids):
    net = nn.Linear(3, 2)
    split = split_ahead((numbers(5), Rows("abcde")), team(2), 0, None)
    assert torch.equal(DataParallel(net, device_ids)(split[0]), net(numbers(5)))
    assert DataParallel(nn.Identity(), device_ids)(split[1]) == list("abcde")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"device_ids": ["cpu"] * 3}, r"inputs\[0\] is split for other ranks: \[3, 2\] rows along dimension 0"),
        ({"device_ids": ["cpu"] * 2, "shares": [4, 1]}, r"take \[4, 1\] along dimension 0"),
        ({"device_ids": ["cpu"] * 2, "dim": 1}, "take .* along dimension 1"),
    ],
)
def test_parts_for_other_ranks_are_refused(options, text):
    split = split_ahead(numbers(5), team(2), 0, None)
    with pytest.raises(ValueError, match=text):
        DataParallel(nn.Identity(), **options)(split)


def test_rows_that_disagree_with_the_parts_are_named():
    split = split_ahead(numbers(5), team(2), 0, None)
    with pytest.raises(ValueError, match=r"inputs\[0\] has 5 rows, inputs\[1\] has shape \(4, 2\)"):
        DataParallel(nn.Bilinear(3, 2, 1), ["cpu"] * 2)(split, torch.ones(4, 2))


def test_parts_are_no_unknown_container(recwarn):
    DataParallel(nn.Identity(), ["cpu"] * 2)(split_ahead(numbers(4), team(2), 0, None))
    assert not recwarn.list
    assert isinstance(split_ahead(numbers(4), team(2), 0, None), RankParts)
