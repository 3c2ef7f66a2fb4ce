"""A process whose data is over follows the others, with nothing of its own."""

import pytest
import torch
from processes.world import run
from torch import nn
from torch.distributed import group
from torch.optim import AdamW
from torch.optim.lr_scheduler import ExponentialLR
from train.nets import batches, mse

from mgpu_core import Error, TrainStep


def net_of():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def data(steps, process):
    return list(batches(steps, [6, 3], seed=10 + process))


def train(process, counts, accumulate):
    net = net_of()
    optimizer = AdamW(net.parameters(), lr=0.05)
    schedule = ExponentialLR(optimizer, 0.9)
    step = TrainStep(net, mse, optimizer, ["cpu"] * 2, process_group=group.WORLD, accumulate=accumulate)
    for x, y in data(counts[process], process):
        before = step.steps
        step(x, y)
        if step.steps > before:
            schedule.step()
    followed = step.join()
    step.check_replicas()
    states = [state["exp_avg"].clone() for state in optimizer.state.values()]
    return [each.detach().clone() for each in net.parameters()], followed, step.steps, states


def alone(counts):
    net = net_of()
    optimizer = AdamW(net.parameters(), lr=0.05)
    schedule = ExponentialLR(optimizer, 0.9)
    parts = [data(count, process) for process, count in enumerate(counts)]
    for i in range(max(counts)):
        batch = [part[i] for part in parts if i < len(part)]
        x, y = (torch.cat(each) for each in zip(*batch, strict=True))
        optimizer.zero_grad()
        mse(net(x), y).backward()
        optimizer.step()
        schedule.step()
    return [each.detach() for each in net.parameters()]


@pytest.mark.parametrize("counts", [(5, 3), (2, 6), (4, 4), (0, 3), (3, 0)], ids=str)
def test_equals_one_device_with_the_rows_that_there_are(counts):
    found = run(train, counts, 1)
    wanted = alone(counts)
    for process, (values, followed, steps, states) in enumerate(found):
        assert all(float((a - b).abs().max()) < 1e-9 for a, b in zip(values, wanted, strict=True))
        assert followed == max(counts) - counts[process]
        assert steps == max(counts)
        assert all(map(torch.equal, states, found[0][3]))


def test_no_data_at_all():
    assert [(followed, steps) for _, followed, steps, _ in run(train, (0, 0), 1)] == [(0, 0), (0, 0)]


def test_three_processes():
    found = run(train, (1, 4, 2), 1, processes=3)
    wanted = alone((1, 4, 2))
    assert [followed for _, followed, *_ in found] == [3, 0, 2]
    for values, *_ in found:
        assert all(float((a - b).abs().max()) < 1e-9 for a, b in zip(values, wanted, strict=True))


def test_what_was_being_accumulated_makes_an_update_first():
    found = run(train, (5, 2), 2)
    assert [followed for _, followed, *_ in found] == [0, 2]
    assert [steps for _, _, steps, _ in found] == [3, 3]
    assert all(map(torch.equal, found[0][0], found[1][0]))


def change_while_the_other_has_joined(process, change):
    net = net_of()
    optimizer = AdamW(net[0].parameters(), lr=0.05)
    step = TrainStep(net, mse, optimizer, ["cpu"] * 2, process_group=group.WORLD, clip_norm=10.0)
    for i, (x, y) in enumerate(data(1 + 4 * (process == 0), process)):
        if i == 1:
            if change == "clip":
                step.clip_norm = 0.01
            elif change == "accumulate":
                step.accumulate = 2
            else:
                optimizer.add_param_group({"params": net[2].parameters()})
                before = [each.detach().clone() for each in net.parameters()]
                with pytest.raises(Error, match=r"in all processes, before any of them calls step\.join") as refused:
                    step(x, y)
                return str(refused.value), step.steps, all(map(torch.equal, before, net.parameters()))
        step(x, y)
    if process and change == "group":
        with pytest.raises(Error, match=r"in all processes, before any of them calls step\.join") as refused:
            step.join()
        return str(refused.value), step.steps, True
    step.join()
    step.check_replicas()
    return [each.detach().clone() for each in net.parameters()], step.steps


@pytest.mark.parametrize("change", ["clip", "accumulate"])
def test_settings_of_those_that_train_are_followed(change):
    (mine, steps), (theirs, same) = run(change_while_the_other_has_joined, change)
    assert steps == same == (5 if change == "clip" else 3)
    assert all(map(torch.equal, mine, theirs))


def test_a_group_that_comes_is_refused_by_all():
    (mine, *rest), (theirs, *others) = run(change_while_the_other_has_joined, "group")
    assert mine == theirs
    assert rest == others == [1, True]


def fail_while_others_have_joined(process):
    net = net_of()
    step = TrainStep(net, mse, AdamW(net.parameters()), ["cpu"], process_group=group.WORLD)
    step(*data(1, process)[0])
    if process == 1:
        try:
            step.join()
        except Exception as error:
            first = str(error)
        return first, step.join(), step.steps
    with pytest.raises(RuntimeError):
        step(torch.ones(2, 3).double(), torch.ones(2, 2).double())  # no such columns
    step(*data(1, 5)[0])
    return step.join(), step.steps


def test_a_failure_reaches_those_that_have_joined():
    (followed, steps), (text, more, same) = run(fail_while_others_have_joined)
    assert text.startswith("process 0 gave this step up, and so did all: RuntimeError")
    assert (followed, more) == (0, 1)
    assert steps == same == 2


def test_alone_it_does_nothing():
    net = net_of()
    step = TrainStep(net, mse, AdamW(net.parameters()), ["cpu"], accumulate=2)
    step(*data(1, 0)[0])
    assert step.join() == 0
    assert step.steps == 1
