"""Gradients, groups and texts that no step of several processes can have, and how the reason is told."""

import pytest
import torch
from fakes.nets import whole
from processes.fragile import ONES, step_of, total
from processes.world import run
from step.nets import Linear
from torch import nn
from torch.optim import SGD

from mgpu_core import TrainStep

pytestmark = pytest.mark.processes


def sparse(process):
    net = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
    step = step_of(net)
    try:
        step(torch.tensor([0, 1]), torch.ones(2, 1))
    except TypeError as error:
        return str(error)
    return None


def test_sparse_gradients_are_refused():
    assert all("sparse" in text for text in run(sparse))


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)
        whole(self)

    def forward(self, x):
        hidden = self.first(x)
        return self.last(hidden) + torch.utils.checkpoint.checkpoint(self.last, hidden, use_reentrant=True)


def too_early(process):
    step = step_of(Twice(), bucket_nbytes=1, ranks=1)
    seen = []
    for _ in range(2):
        try:
            step(ONES, ONES)
        except Exception as error:
            seen.append(f"{type(error).__name__}: {error}")
    return seen


def test_a_gradient_that_comes_twice_is_found():
    for seen in run(too_early):
        assert len(seen) == 1
        assert "use_reentrant=False" in seen[0]


def refuse(process):
    seen = []
    net = Linear()
    for wrong in (object(), torch.distributed.GroupMember.NON_GROUP_MEMBER):
        try:
            TrainStep(net, total, SGD(net.parameters(), lr=1.0), ["cpu"], process_group=wrong)
        except (TypeError, ValueError) as error:
            seen.append(str(error))
    try:
        step_of(net, comm_dtype=torch.float8_e4m3fn)
    except TypeError as error:
        seen.append(str(error))
    return seen


def test_groups_that_are_none():
    for seen in run(refuse):
        assert "must be a group of torch.distributed, such as torch.distributed.group.WORLD, not object" in seen[0]
        assert seen[1] == "this process does not belong to process_group"
        assert "16 bits or more" in seen[2]


def test_without_an_initialised_group():
    net = Linear()
    with pytest.raises(ValueError, match="init_process_group"):
        TrainStep(net, total, SGD(net.parameters(), lr=1.0), ["cpu"], process_group=object())
