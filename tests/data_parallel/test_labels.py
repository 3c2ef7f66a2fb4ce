"""A module that returns a mean over labels: over ranks with other shares of labels than of rows it is told of."""

import warnings

import pytest
import torch
from fakes.nets import cpu
from torch import nn
from torch.nn.functional import cross_entropy

from mgpu_core import DataParallel

pytestmark = pytest.mark.several_ranks


class Labelled(nn.Module):
    """Returns its loss, as models of transformers do for batches with labels."""

    def __init__(self, kind=dict):
        super().__init__()
        self.head, self.kind = nn.Linear(3, 4), kind

    def forward(self, x, labels=None):
        logits = self.head(x)
        if labels is None:
            return logits
        loss = cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits} if self.kind is dict else loss


def told(model, *batches):
    with warnings.catch_warnings(record=True, action="always") as found:
        for x, labels in batches:
            model(x, labels=labels)
    return [str(each.message) for each in found if "labels other than -100" in str(each.message)]


def batch(ranks, ignored=0):
    x, labels = torch.ones(4 * ranks, 3, device=cpu(1)[0]), torch.zeros(4 * ranks, dtype=torch.int64, device=cpu(1)[0])
    labels[:ignored] = -100
    return x, labels


@pytest.mark.parametrize("kind", [dict, None])
def test_unequal_shares_of_labels_are_told_of_once(kind, ranks):
    model = DataParallel(Labelled(kind).to(cpu(1)[0]), cpu(ranks))
    (text,) = told(model, batch(ranks), batch(ranks, 3), batch(ranks, 2), batch(ranks, 1))
    assert f"the ranks have 1, {', '.join(['4'] * (ranks - 1))} labels" in text
    assert "WeightedLoss(model)" in text


def test_unequal_rows_weigh_the_same_in_a_mean_of_the_ranks(ranks):
    x, labels = batch(ranks)
    (text,) = told(DataParallel(Labelled().to(cpu(1)[0]), cpu(ranks)), (x[1:], labels[1:]))
    assert f"labels other than -100 in {', '.join(['4'] * (ranks - 1))}, 3 rows" in text


class Counting(Labelled):
    """Returns the sum of the losses, and their number, as ``WeightedLoss`` does."""

    def forward(self, x, labels=None):
        count = labels.ne(-100).sum()
        return super().forward(x, labels)["loss"] * count, count


class Joining(DataParallel):
    """Weighs the ranks' losses itself."""

    def gather(self, outputs, output_device):
        return super().gather(outputs, output_device)


@pytest.mark.parametrize(("kind", "net"), [(DataParallel, Counting), (Joining, Labelled)])
def test_who_weighs_by_the_labels_is_told_nothing(kind, net, ranks):
    assert told(kind(net().to(cpu(1)[0]), cpu(ranks)), batch(ranks, 3), batch(ranks, 2)) == []


def test_right_calls_raise_no_warning_of_ours(ranks):
    with warnings.catch_warnings(action="error"):
        warnings.filterwarnings("ignore", "Was asked to gather")
        DataParallel(Labelled(None).to(cpu(1)[0]), cpu(ranks))(*batch(ranks))


def test_equal_shares_and_calls_without_a_loss_are_not(ranks):
    assert told(DataParallel(Labelled().to(cpu(1)[0]), cpu(ranks)), batch(ranks), batch(ranks)) == []
    with warnings.catch_warnings(action="error"):
        DataParallel(Labelled().to(cpu(1)[0]), cpu(ranks))(batch(ranks)[0])
