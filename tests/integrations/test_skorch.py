"""skorch's nets over several ranks, and a search over their options: there is no code of ours for it."""

import pickle

import pytest
import torch
from torch import nn

import mgpu_core

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]
skorch = pytest.importorskip("skorch")
numpy = pytest.importorskip("numpy")
search = pytest.importorskip("sklearn.model_selection")

SEEDED = numpy.random.RandomState(0)
X, Y = SEEDED.randn(22, 4).astype("float32"), SEEDED.randint(0, 3, 22)


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))

    def forward(self, x):
        return self.layers(x)


class OverRanks(mgpu_core.DataParallel):
    def __init__(self, ranks=2, **options):
        super().__init__(Net(**options), ["cpu"] * ranks)


def classifier(module, **options):
    torch.manual_seed(0)
    own = {"criterion": nn.CrossEntropyLoss, "max_epochs": 3, "lr": 0.3, "batch_size": 5, "verbose": 0}
    return skorch.NeuralNetClassifier(module, **{**own, "train_split": None, **options})


def test_losses_and_probabilities_are_those_of_one_device(ranks):
    many, one = classifier(OverRanks, module__ranks=ranks).fit(X, Y), classifier(Net).fit(X, Y)
    losses = one.history[:, "train_loss"]
    assert losses[-1] < losses[0]
    assert many.history[:, "train_loss"] == pytest.approx(losses, abs=1e-6)
    assert many.predict_proba(X) == pytest.approx(one.predict_proba(X), abs=1e-6)
    assert many.module_.device_ids == [torch.device("cpu")] * ranks


def test_parameters_are_searched_cloned_pickled_and_saved(tmp_path):
    net = classifier(OverRanks)
    found = search.GridSearchCV(net, {"module__width": [2, 8], "lr": [0.1, 0.3]}, cv=2).fit(X, Y).best_estimator_
    copy = pickle.loads(pickle.dumps(found))
    assert copy.predict_proba(X) == pytest.approx(found.predict_proba(X))
    found.save_params(f_params=tmp_path / "net.pt")
    assert all(key.startswith("module.layers.") for key in torch.load(tmp_path / "net.pt"))
    other = classifier(OverRanks, module__width=found.module__width, module__ranks=3).initialize()
    other.load_params(f_params=tmp_path / "net.pt")
    assert other.predict_proba(X) == pytest.approx(found.predict_proba(X), abs=1e-6)


def test_a_second_fit_begins_anew():
    net = classifier(OverRanks).fit(X, Y)
    first = net.history[0, "train_loss"]
    torch.manual_seed(0)
    assert net.fit(X, Y).history[0, "train_loss"] == pytest.approx(first, abs=1e-6)
