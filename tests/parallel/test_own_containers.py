"""Lists with one entry per row, containers of the user's own, and objects that nothing is known of."""

import warnings

import pytest
import torch
from torch import nn

import mgpu_core
from mgpu_core import DataParallel, Replicate, Rows, TrainStep


def targets(rows):
    """As a detector's: each row has as many boxes as it has objects."""
    return [{"boxes": torch.full((i + 1, 4), float(i)), "id": i} for i in range(rows)]


class Detector(nn.Module):
    """Returns the number of boxes of each of its rows, and notes what it was given."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seen = []

    def forward(self, images, found, *more, caption=None):
        self.seen.append((type(found), len(images), [each["id"] for each in found], caption))
        return self.weight * torch.tensor([float(len(each["boxes"])) for each in found])


@pytest.mark.parametrize("dim", [0, 1])
def test_entries_go_with_the_rows_of_the_tensors(ranks, dim):
    net = Detector()
    captions = [f"row {i}" for i in range(8)]
    images = torch.zeros(8, 8, 1)
    model = DataParallel(net, ["cpu"] * ranks, dim=dim)
    out = mgpu_core.scatter((images, Rows(targets(8))), ["cpu"] * ranks, dim)
    assert [len(found) for _, found in out] == [part.shape[dim] for part, _ in out]
    if dim == 0:
        assert model(images, Rows(targets(8)), caption=Rows(captions)).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
        seen = sorted(net.seen, key=lambda each: each[2])
        assert [each[0] for each in seen] == [list] * ranks
        assert [i for each in seen for i in each[2]] == list(range(8))
        assert [text for each in seen for text in each[3]] == captions


def test_the_step_deals_them_out_too(ranks):
    def loss(out, found):
        assert type(found) is list
        return (out - torch.stack([each["boxes"].sum() for each in found])).mean()

    def trained(make):
        net = nn.Sequential(nn.Linear(2, 1), nn.Flatten(0))
        nn.init.ones_(net[0].weight), nn.init.zeros_(net[0].bias)
        return net, make(net, torch.optim.SGD(net.parameters(), lr=0.5))

    x = torch.arange(16.0).reshape(8, 2)
    net, step = trained(lambda net, optimizer: TrainStep(net, loss, optimizer, ["cpu"] * ranks))
    found = step(x, Rows(targets(8)))
    plain, _ = trained(lambda net, optimizer: None)
    expected = loss(plain(x), targets(8))
    expected.backward()
    assert float(found) == float(expected)
    assert torch.equal(net[0].weight, plain[0].weight - 0.5 * plain[0].weight.grad)


def test_rows_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"inputs\[0\] has shape \(8, 2\), inputs\[1\]\['found'\] has 7 rows"):
        mgpu_core.scatter([torch.zeros(8, 2), {"found": Rows(targets(7))}], ["cpu"] * 2)
    with pytest.raises(ValueError, match=r"has 3 rows, inputs\[1\] has 4 rows"):
        mgpu_core.scatter([Rows([1, 2, 3]), Rows([1, 2, 3, 4])], ["cpu"] * 2)


def test_a_list_whose_entries_disagree_is_told_of_rows():
    entries = [{"labels": torch.zeros(i + 1)} for i in range(3)]
    expected = r"\[0\]\['labels'\] has shape \(1,\), inputs\[1\]\['labels'\] has shape \(2,\).*mgpu_core\.Rows"
    with pytest.raises(ValueError, match=expected):
        mgpu_core.scatter(entries, ["cpu"] * 2)


def test_rows_are_a_list_and_are_joined_again():
    rows = Rows([1, "b"])
    assert (rows == [1, "b"], repr(rows)) == (True, "Rows([1, 'b'])")
    joined = mgpu_core.gather([Rows([torch.ones(2), 1]), Rows([torch.zeros(3)])], "cpu")
    assert type(joined) is Rows
    assert [each if isinstance(each, int) else each.tolist() for each in joined] == [[1, 1], 1, [0, 0, 0]]
    (whole,) = mgpu_core.scatter([Replicate(Rows([torch.ones(1)]))], ["cpu"])
    assert type(whole[0]) is list
    assert DataParallel(Detector(), [])(torch.zeros(2, 1), Rows(targets(2))).tolist() == [1, 2]


class Batch:
    """A container that nobody knows."""

    def __init__(self, x, name):
        self.x, self.name = x, name


class Doubling(nn.Module):
    def forward(self, batch):
        return Batch(2 * batch.x, batch.name)


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setattr(mgpu_core.trees.containers, "_registered", {})
    mgpu_core.register_container(Batch, lambda batch: ([batch.x], batch.name), lambda made, name: Batch(made[0], name))


def test_a_registered_container_is_cut_and_joined(known, ranks):
    x = torch.arange(16.0).reshape(8, 2).requires_grad_()
    parts = mgpu_core.scatter(Batch(x, "n"), ["cpu"] * ranks)
    assert [len(part.x) for part in parts] == [len(part) for part in mgpu_core.scatter(x, ["cpu"] * ranks)]
    out = DataParallel(Doubling(), ["cpu"] * ranks)(Batch(x, "n"))
    assert (type(out), out.name) == (Batch, "n")
    out.x.sum().backward()
    assert torch.equal(out.x, 2 * x)
    assert torch.equal(x.grad, torch.full((8, 2), 2.0))


def test_what_is_registered_is_checked():
    for arguments in ((Batch(0, ""), len, len), (Batch, None, len), (Batch, len, "x")):
        with pytest.raises(TypeError, match=r"must be a (class|function)"):
            mgpu_core.register_container(*arguments)


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


class Listed:
    def __init__(self, x):
        self.both = [x, x]


class Silent:
    def __init__(self, x):
        self.size = len(x)


@pytest.mark.parametrize(("make", "warned"), [(Slotted, 1), (Listed, 1), (Silent, 0), (lambda x: {x}, 1)])
def test_an_unknown_one_runs_whole_with_one_warning(make, warned):
    seen = []

    class Looking(nn.Module):
        def forward(self, x, other):
            seen.append(other)
            return x

    other = make(torch.ones(4))
    model = DataParallel(Looking(), ["cpu"] * 2)
    with warnings.catch_warnings(record=True, action="always") as caught:
        for _ in range(2):
            model(torch.ones(4, 1), other)
        model(torch.ones(4, 1), Replicate(other))
    texts = [str(each.message) for each in caught]
    assert len(texts) == warned
    assert all(f"inputs[1] is a {type(other).__name__}, which holds tensors" in text for text in texts)
    assert all("nothing of it was split" in text and "register_container" in text for text in texts)
    assert all(each is other for each in seen)
    assert len(seen) == 6
