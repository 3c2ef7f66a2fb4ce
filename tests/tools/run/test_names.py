"""torch's names mean ours inside the block, and torch's again after it."""

import inspect
import os
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

import mgpu_core
from mgpu_core import replacing_torch
from mgpu_core.devices import devices

NAMES = ["DataParallel", "data_parallel", "gather", "parallel_apply", "replicate", "scatter"]
without_accelerator = pytest.mark.skipif(devices.has_accelerator(), reason="asks for CPU ranks")


def torchs():
    """The objects of the names, without the count of their calls."""
    return [inspect.unwrap(getattr(nn.parallel, name)) for name in NAMES]


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch):
    monkeypatch.delenv("MGPU_CORE_CPU_RANKS", raising=False)


def test_every_name_is_ours_inside_and_torchs_after():
    before, inner = torchs(), sys.modules["torch.nn.parallel.scatter_gather"].scatter_kwargs
    with replacing_torch() as replaced:
        assert torchs() == [getattr(mgpu_core, name) for name in NAMES]
        assert nn.DataParallel is mgpu_core.DataParallel
        replacement = sys.modules["torch.nn.parallel.scatter_gather"].scatter_kwargs
        assert inspect.unwrap(replacement) is mgpu_core.scatter_kwargs
    assert torchs() == before
    assert sys.modules["torch.nn.parallel.scatter_gather"].scatter_kwargs is inner
    assert {"torch.nn.DataParallel", *(f"torch.nn.parallel.{name}" for name in NAMES)} <= set(replaced.names)


def test_names_are_restored_after_an_error():
    before = torchs()
    with pytest.raises(KeyError), replacing_torch():
        raise KeyError("of the user")
    assert torchs() == before


def test_a_module_that_has_imported_the_class_has_ours(monkeypatch):
    library = ModuleType("library_of_a_user")
    library.DP = theirs = nn.DataParallel
    monkeypatch.setitem(sys.modules, "library_of_a_user", library)
    with replacing_torch() as replaced:
        assert library.DP is mgpu_core.DataParallel
        assert "library_of_a_user.DP" in replaced.names
    assert library.DP is theirs


def test_distributed_data_parallel_keeps_torchs_functions():
    ddp = sys.modules["torch.nn.parallel.distributed"]
    before = ddp.gather, nn.parallel.DistributedDataParallel
    with replacing_torch() as replaced:
        assert (ddp.gather, nn.parallel.DistributedDataParallel) == before
        assert not any("DistributedDataParallel" in each for each in replaced.names)


def test_a_class_derived_before_is_named():
    class Derived(nn.DataParallel):
        pass

    with replacing_torch() as replaced:
        assert any("test_a_class_derived_before_is_named.<locals>.Derived" in each for each in replaced.left)


@without_accelerator
def test_ids_and_cuda_mean_cpu_ranks(ranks):
    net, x = nn.Linear(3, 2), torch.arange(24.0).view(8, 3)
    with replacing_torch(ranks=ranks) as replaced:
        assert x.cuda() is x
        assert net.cuda(0) is net
        model = nn.DataParallel(net)
        assert model.device_ids == [torch.device("cpu")] * ranks
        assert [each.tolist() for each in nn.parallel.scatter(torch.arange(4), [0, 1])] == [[0, 1], [2, 3]]
        assert torch.equal(nn.parallel.gather([x, x], 0), torch.cat([x, x]))
        parts = nn.parallel.parallel_apply(nn.parallel.replicate(net, [0, "cuda:1"]), [x[:4], x[4:]])
        assert torch.allclose(torch.cat(parts), net(x), atol=1e-6)
        assert torch.allclose(model(x), net(x), atol=1e-6)
    assert "MGPU_CORE_CPU_RANKS" not in os.environ
    assert replaced.wrapped == {f"Linear over {ranks} ranks ({', '.join(['cpu'] * ranks)})": 1}
    assert torch.load.__module__ == "torch.serialization"
    assert "torch.load" in str(replaced).splitlines()[0]
    assert "torch.nn.parallel._functions.Scatter" in str(replaced).splitlines()[0]


@without_accelerator
def test_the_number_of_ranks_from_before_comes_back(monkeypatch):
    monkeypatch.setenv("MGPU_CORE_CPU_RANKS", "5")
    with replacing_torch(ranks=2):
        assert len(nn.DataParallel(nn.Linear(1, 1)).device_ids) == 2
    assert os.environ["MGPU_CORE_CPU_RANKS"] == "5"


def test_the_report_for_people():
    with replacing_torch() as replaced:
        assert "wrapped: nothing" in str(replaced).splitlines()
        for _ in range(2):
            nn.DataParallel(nn.Linear(1, 1), ["cpu"] * 2)
        nn.DataParallel(nn.Linear(1, 1), [])
    lines = str(replaced).splitlines()
    assert lines[0].startswith("replaced: ")
    assert "torch.nn.DataParallel, torch.nn.parallel.DataParallel, torch.nn.parallel._functions.Broadcast, " in lines[0]
    assert lines[1:3] == ["wrapped: Linear over 2 ranks (cpu, cpu) (2 times)", "wrapped: Linear as the plain module"]
    assert all(line.startswith("left: ") for line in lines[3:])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ranks": 0}, "1 to 9999, not 0"),
        ({"ranks": 10000}, "1 to 9999"),
        ({"wrap": "all"}, "wrap must be one of none, auto, not 'all'"),
    ],
)
def test_wrong_options_replace_nothing(options, text):
    before = torchs()
    with pytest.raises(ValueError, match=text), replacing_torch(**options):
        pass
    assert torchs() == before


def test_cpu_ranks_are_refused_beside_an_accelerator(monkeypatch):
    monkeypatch.setattr("mgpu_core.tools.cpu_ranks.has_accelerator", lambda: True)
    with pytest.raises(ValueError, match="without an accelerator"), replacing_torch(ranks=2):
        pass
