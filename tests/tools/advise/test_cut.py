"""A model that does not fit: the advice is where to cut it."""

import copy

import pytest
import torch
from torch import nn

import mgpu_core
from mgpu_core.tools.advise import Advice
from mgpu_core.tools.cli import main

mse = nn.functional.mse_loss


def net():
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))


def advice(nbytes, loss_fn=mse, device_ids=("cpu", "cpu")):
    sample = torch.ones(4, 64), torch.ones(4, 64)
    return mgpu_core.advise(
        net(), loss_fn, sample, device_ids=list(device_ids), device_nbytes=nbytes, repeats=1, batches=[4]
    )


NEEDED = 2 * 4 * 4 * (64 * 64 + 64)
"""Parameters and gradients of float32; besides them there are activations."""


@pytest.mark.parametrize(("parts", "split"), [(2, ["2"]), (4, ["1", "2", "3"])])
def test_the_fewest_parts_that_fit(parts, split):
    found = advice(int(1.2 * NEEDED / parts))
    assert found.recommendation.way == "Pipeline"
    assert f"Cut it over {parts} devices" in found.recommendation.text
    assert f"split_points={split}" in found.recommendation.text
    assert found.measurements == ()
    assert "recommendation: Pipeline: the model needs" in str(found)
    assert str(Advice.from_json(found.to_json())) == str(found)


def shards_advised(layers, share, optimizer=None):
    """The advice on a net of so many blocks, for a device with a share of what parameters, gradients and state need."""
    model, sample = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers))), (torch.ones(4, 64), torch.ones(4, 64))
    needed = (2 if optimizer is None else 4) * sum(each.nbytes for each in model.parameters())
    text = mgpu_core.advise(
        model, mse, sample, device_ids=["cpu", "cpu"], device_nbytes=int(share * needed), optimizer=optimizer
    ).recommendation.text
    assert text.startswith("Pipeline: ")
    return text.partition(". Or leave it in one piece, of which each of ")[2]


def test_a_step_in_shards_is_named_where_parts_of_parameters_gradients_and_state_fit():
    # Of 32 blocks a rank has two whole, with their gradients: a sixteenth of all parameters and gradients.
    assert shards_advised(32, 0.45).startswith(
        '3 devices keeps a part: mgpu_core.TrainStep(net, loss_fn, optimizer, device_ids, shard="parameters")'
    )
    assert shards_advised(32, 0.3).startswith("5 devices")
    # The state of AdamW is as large as both, and nobody needs it whole.
    assert shards_advised(32, 0.3, torch.optim.AdamW).startswith("4 devices")
    assert not shards_advised(4, 0.4), "a rank has two of four blocks whole"
    assert not shards_advised(32, 0.1)


def test_a_model_that_fits_is_measured():
    found = advice(10 * NEEDED)
    assert found.recommendation.way != "Pipeline"
    assert len(found.measurements) == 3


def test_a_layer_that_does_not_fit_is_named_as_the_reason():
    found = advice(1000)
    assert found.recommendation.way == ""
    assert "one of them needs" in found.recommendation.text


class OfOwnPlan(nn.Sequential):
    tp_plan = {"0": "colwise", "2": "rowwise"}  # noqa: RUF012


@pytest.mark.parametrize(("kind", "given"), [(nn.Sequential, ", {'0': 'column', '2': 'row'}"), (OfOwnPlan, "")])
def test_a_layer_that_does_not_fit_is_cut_itself(kind, given):
    big = kind(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64))
    sample, needed = (torch.ones(2, 64), torch.ones(2, 64)), 2 * 4 * (2 * 64 * 512 + 512 + 64)
    found = mgpu_core.advise(
        big, mse, sample, device_ids=["cpu", "cpu"], device_nbytes=int(0.3 * needed), repeats=1, batches=[2]
    )
    assert found.recommendation.way == "TensorParallel"
    assert "one of them needs" in found.recommendation.text
    assert "Cut its layers over 4 devices" in found.recommendation.text
    assert f"mgpu_core.TensorParallel(net, device_ids{given})" in found.recommendation.text
    assert ("each feature by itself" in found.recommendation.text) == bool(given)
    assert str(Advice.from_json(found.to_json())) == str(found)


def test_the_net_is_left_alone():
    model = net()
    before = copy.deepcopy(model.state_dict())
    sample = torch.ones(4, 64), torch.ones(4, 64)
    mgpu_core.advise(model, mse, sample, device_ids=["cpu", "cpu"], device_nbytes=NEEDED // 2)
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
    assert all(each.grad is None for each in model.parameters())


@pytest.mark.parametrize("nbytes", [0, -1, 1.5, True])
def test_memory_that_cannot_be(nbytes):
    with pytest.raises(ValueError, match="device_nbytes"):
        advice(nbytes)


def test_the_command(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nnet = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))\n"
        "loss_fn = torch.nn.MSELoss()\nsample = torch.ones(4, 64), torch.ones(4, 64)\n"
    )
    assert main(["advise", "--devices", "cpu,cpu", "--device-memory", "80KiB", str(script)]) == 0
    assert "split_points=['2']" in capsys.readouterr().out
    assert main(["advise", "--device-memory", "80", str(script)]) == 2
    assert "--device-memory 80" in capsys.readouterr().err
