"""Quantized weights of other packages run where whole layers are placed, and are refused by name where they are cut."""

import pytest
import torch
from torch import nn

from mgpu_core import DataParallel, Pipeline, Predictor, TensorParallel, place, replicate

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))


def by_torchao(net):
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(net, quantization.Int8WeightOnlyConfig())
    return net


def by_quanto(net):
    quanto = pytest.importorskip("optimum.quanto")
    quanto.quantize(net, weights=quanto.qint8)
    quanto.freeze(net)
    return net


@pytest.fixture(params=[by_torchao, by_quanto])
def quantized(request):
    torch.manual_seed(0)
    return request.param(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval())


def test_whole_layers_are_placed(quantized):
    wanted = quantized(X).detach()
    assert torch.equal(place(quantized, ["cpu"] * 2)(X), wanted)


def test_a_pipeline_runs_them(quantized):
    wanted = quantized(X).detach()
    assert torch.allclose(Pipeline(quantized, ["cpu"] * 2, chunks=2)(X), wanted, rtol=0, atol=1e-6)


CUT = {
    "DataParallel": lambda net: DataParallel(net, ["cpu"] * 2)(X),
    "replicate": lambda net: replicate(net, ["cpu"] * 2),
    "TensorParallel": lambda net: TensorParallel(net, ["cpu"] * 2, {"0": "column_gathered"}),
}


@pytest.mark.parametrize("kind", CUT)
def test_what_cuts_them_says_which_layer_it_is(kind, quantized):
    with pytest.raises(
        TypeError, match=r"^0\.weight of Sequential is a \w+Tensor, which cannot be cut .*use place\(\)"
    ):
        CUT[kind](quantized)


def test_a_predictor_answers_with_copies():
    torch.manual_seed(0)
    net = by_torchao(nn.Sequential(nn.Linear(64, 64), nn.ReLU()).eval())
    with Predictor(net, ["cpu"] * 2) as predict:
        assert torch.equal(predict(X), net(X).detach())


def test_a_predictor_says_which_layer_cannot_be_copied():
    net = by_quanto(nn.Sequential(nn.Linear(64, 64), nn.ReLU()).eval())
    with pytest.raises(TypeError, match=r"^0\.weight of Sequential is a WeightQBytesTensor, which cannot be copied"):
        Predictor(net, ["cpu"] * 2)
