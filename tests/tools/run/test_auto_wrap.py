"""wrap="auto": the net that a script trains runs over all ranks, and stays the script's own object."""

import copy
import pickle

import pytest
import torch
from torch import nn

import mgpu_core
from mgpu_core import replacing_torch
from mgpu_core.devices import devices

pytestmark = pytest.mark.skipif(devices.has_accelerator(), reason="asks for CPU ranks")


class Net(nn.Module):
    """Counts the rows of each call that reaches it."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.rows = []

    def forward(self, x, *, scale=1):
        self.rows.append(len(x))
        return self.head(self.body(x)) * scale


class Holder(nn.Module):
    """Has the net's parameters, too, and is never called."""

    def __init__(self, net):
        super().__init__()
        self.net = net


def numbers(rows):
    return torch.arange(rows * 3.0).view(rows, 3) / 8


def train(net, parameters, call, steps=3):
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = call(numbers(8)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.several_ranks
def test_the_net_runs_over_all_ranks_with_the_losses_of_one_device(ranks):
    net = Net()
    plain = copy.deepcopy(net)
    wanted = train(plain, plain.parameters(), plain)
    with replacing_torch(ranks=ranks, wrap="auto") as replaced:
        got = train(net, net.parameters(), net)
    assert got == pytest.approx(wanted, rel=1e-5)
    assert len(net.rows) == 3 * ranks
    assert sum(net.rows) == 24
    assert replaced.wrapped == {f"Net over {ranks} ranks ({', '.join(['cpu'] * ranks)})": 1}
    assert not any("Net" in each for each in replaced.left)
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


def test_afterwards_the_net_is_as_before():
    net = Net()
    with replacing_torch(ranks=2, wrap="auto"):
        train(net, net.parameters(), net, 1)
        assert isinstance(net, Net)
        assert list(net.state_dict()) == list(Net().state_dict())
    assert type(net) is Net
    net.rows.clear()
    net(numbers(4), scale=2)
    assert net.rows == [4]


def test_copies_and_pickles_are_of_the_class_itself():
    net = Net()
    with replacing_torch(ranks=2, wrap="auto"):
        train(net, net.parameters(), net, 1)
        made = [copy.deepcopy(net), pickle.loads(pickle.dumps(net))]
        net.rows.clear()
        net(numbers(4))
    assert net.rows == [2, 2]
    for each in made:
        each.rows.clear()
        each(numbers(4))
        assert (type(each), each.rows) == (Net, [4])


def test_keywords_reach_every_rank():
    net = Net()
    with replacing_torch(ranks=2, wrap="auto"):
        torch.optim.SGD(net.parameters(), lr=1.0)
        assert torch.allclose(net(numbers(4), scale=3), net.head(net.body(numbers(4))) * 3)
        assert net.rows == [2, 2]


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace", "ignore:Using len")
def test_a_trace_is_of_the_plain_net():
    net = Net()
    wanted = net(numbers(4))
    with replacing_torch(ranks=2, wrap="auto"):
        torch.optim.SGD(net.parameters(), lr=1.0)
        traced = torch.jit.trace(net, numbers(4))
        net.rows.clear()
        assert torch.allclose(net(numbers(4)), wanted)
        assert net.rows == [2, 2]
    assert torch.allclose(traced(numbers(4)), wanted)


def test_with_a_frozen_body_the_whole_net_is_wrapped():
    net = Net()
    with replacing_torch(ranks=2, wrap="auto"):
        train(net, net.head.parameters(), net, 1)
        assert type(net.head) is nn.Linear
    assert net.rows == [4, 4]


def test_a_module_that_only_holds_the_net_is_not_wrapped():
    net = Net()
    holder = Holder(net)
    with replacing_torch(ranks=2, wrap="auto") as replaced:
        train(net, holder.parameters(), net, 1)
        assert type(holder) is Holder
    assert net.rows == [4, 4]
    assert [each.split()[0] for each in replaced.wrapped] == ["Net"]


@pytest.mark.parametrize("before", [True, False])
def test_the_scripts_own_wrapper_stays_the_only_one(before):
    net = Net()
    with replacing_torch(ranks=2, wrap="auto") as replaced:
        model = nn.DataParallel(net) if before else None
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        model = model or nn.DataParallel(net)
        for _ in range(2):
            model(numbers(8)).mean().backward()
        optimizer.step()
    assert net.rows == [4, 4] * 2
    assert list(replaced.wrapped.values()) == [1]
    assert not any("Net" in each for each in replaced.left)
    assert type(net) is Net


def test_a_part_of_another_wrapper_that_equals_everything_is_not_the_net():
    class Metric(nn.Module):
        __hash__ = nn.Module.__hash__

        def __eq__(self, other):
            return True

    net, other = Net(), nn.DataParallel(Metric(), ["cpu"] * 2)
    with replacing_torch(ranks=2, wrap="auto") as replaced:
        train(net, net.parameters(), net, 1)
    assert [each.split()[0] for each in replaced.wrapped] == ["Net"]
    assert net.rows == [4, 4]
    assert other.module == net


def test_only_the_first_optimizers_net_is_wrapped():
    first, second = Net(), Net()
    with replacing_torch(ranks=2, wrap="auto"):
        torch.optim.SGD(first.parameters(), lr=1.0)
        torch.optim.SGD(second.parameters(), lr=1.0)
        first(numbers(4))
        second(numbers(4))
    assert (first.rows, second.rows) == ([2, 2], [4])


@pytest.mark.parametrize(
    ("ranks", "make", "text"),
    [
        (1, lambda net: torch.optim.SGD(net.parameters(), lr=1.0), "Net: there are no two devices"),
        (2, lambda net: torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), "of no single module"),
        (2, lambda net: None, "no optimizer was made"),
    ],
)
def test_a_net_that_cannot_be_wrapped_is_named(ranks, make, text):
    net = Net()
    with replacing_torch(ranks=ranks, wrap="auto") as replaced:
        make(net)
        net(numbers(4))
    assert text in replaced.left[-1]
    assert not replaced.wrapped
    assert net.rows == [4]


def test_a_net_of_which_only_parts_are_called_is_named():
    net = Net()
    with replacing_torch(ranks=2, wrap="auto") as replaced:
        torch.optim.SGD(net.parameters(), lr=1.0)
        net.head(net.body(numbers(4)))
    assert replaced.left[-1] == "Net: never called as a whole"
    assert not replaced.wrapped
    assert type(net) is Net


def test_a_net_elsewhere_is_left_there(monkeypatch):
    monkeypatch.setattr("mgpu_core.tools.run.auto_wrap.default_devices", lambda: [torch.device("meta")] * 2)
    net = Net()
    with replacing_torch(wrap="auto") as replaced:
        torch.optim.SGD(net.parameters(), lr=1.0)
        net(numbers(4))
    assert replaced.left[-1] == "Net: it is on cpu, not on meta"


def test_an_error_of_the_net_comes_through():
    net = Net()
    with replacing_torch(ranks=2, wrap="auto"):
        torch.optim.SGD(net.parameters(), lr=1.0)
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            net(torch.ones(4, 5))
    assert type(net) is Net


def test_a_train_step_inside_is_its_own(monkeypatch):
    net = Net()
    with replacing_torch(ranks=2) as replaced:
        step = mgpu_core.TrainStep(net, nn.functional.mse_loss, torch.optim.SGD(net.parameters(), lr=0.1))
        step(numbers(8), torch.zeros(8, 2))
    assert sum(net.rows) in (4, 8)
    assert not replaced.wrapped
