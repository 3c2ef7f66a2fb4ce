"""Methods of a wrapped module that its wrapper lacks: the error says where they are."""

import copy

import pytest
import torch
from fakes.nets import cpu
from torch import nn

from mgpu_core import DataParallel, Pipeline, Predictor, TensorParallel


class Net(nn.Sequential):
    size = 3

    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))

    def generate(self, x):
        return self(x)


WRAPPERS = {
    "DataParallel": (lambda net: DataParallel(net, cpu(2)), ".module"),
    "Pipeline": (lambda net: Pipeline(net, cpu(2)), ".module"),
    "TensorParallel": (lambda net: TensorParallel(net, cpu(2), {"0": "column", "1": "row"}), ".uncut()"),
}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_method_of_the_module_is_named_and_is_there(kind):
    wrap, way = WRAPPERS[kind]
    net, x = Net().to(cpu(1)[0]), torch.ones(2, 4)
    wanted = copy.deepcopy(net).generate(x)
    wrapper = wrap(net)
    with pytest.raises(AttributeError, match=f"'{kind}' object has no attribute 'generate', which is its") as told:
        wrapper.generate(x)
    assert f"its module's: {way}.generate(...)" in str(told.value)
    whole = wrapper.uncut() if way == ".uncut()" else wrapper.module
    torch.testing.assert_close(whole.generate(x), wanted)
    if '.call("generate", ...)' in str(told.value):
        torch.testing.assert_close(wrapper.call("generate", x), wanted)
    with pytest.raises(AttributeError, match=f"which is its module's: {way.replace('()', '[(][)]')}.size$"):
        _ = wrapper.size
    with pytest.raises(AttributeError, match=r"has no attribute 'nothing'$"):
        _ = wrapper.nothing
    assert not hasattr(wrapper, "generate")


class Attached(Net):
    """As a LightningModule, whose properties raise while no Trainer has it."""

    @property
    def trainer(self):
        raise RuntimeError("not attached")

    @property
    def first(self):
        return next(iter(()))


@pytest.mark.parametrize("kind", WRAPPERS)
def test_properties_of_the_module_that_raise_are_not_there(kind):
    wrapper = WRAPPERS[kind][0](Attached().to(cpu(1)[0]))
    for name in ("trainer", "first"):
        assert not hasattr(wrapper, name)
        assert getattr(wrapper, name, 3) == 3


@pytest.mark.parametrize("options", [{}, {"method": "generate"}])
def test_a_tensor_parallel_is_served_by_calls(options):
    with pytest.raises(TypeError, match=r"a TensorParallel is neither: call it from any thread, tp\(x\)"):
        Predictor(WRAPPERS["TensorParallel"][0](Net()), **options)
