"""State dicts, pickles and copies of the wrapper, before and after a forward pass."""

import copy
import io
import pickle

import pytest
import torch
from fakes.nets import Cnn, cpu, mlp
from fakes.tensors import numbers
from torch import nn

from mgpu_core import DataParallel


def test_state_dict_keys_carry_module():
    net = Cnn()
    wrapper = DataParallel(net, cpu(2))
    assert list(wrapper.state_dict()) == [f"module.{name}" for name in net.state_dict()]
    assert [name for name, _ in wrapper.named_parameters()] == [f"module.{name}" for name, _ in net.named_parameters()]


def test_checkpoint_goes_to_torchs_data_parallel_and_back():
    ours, theirs = DataParallel(Cnn(), cpu(3)), nn.DataParallel(Cnn())
    ours(torch.ones(6, 1, 4, 4)).sum().backward()
    stream = io.BytesIO()
    torch.save(ours.state_dict(), stream)
    stream.seek(0)
    theirs.load_state_dict(torch.load(stream, weights_only=True), strict=True)
    back = DataParallel(Cnn(), cpu(2))
    back.load_state_dict(theirs.state_dict(), strict=True)
    for name, tensor in ours.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor.cpu()), name


def test_replicas_can_be_saved():
    net = Cnn()
    wrapper = DataParallel(net, cpu(3))
    stream = io.BytesIO()
    torch.save([*wrapper.replicate(net, wrapper.device_ids), wrapper], stream)
    stream.seek(0)
    *replicas, loaded = torch.load(stream, weights_only=False)
    assert len(replicas) == 3
    assert torch.equal(replicas[2].conv.weight, net.conv.weight)
    assert torch.equal(loaded.module.conv.weight, net.conv.weight)


COPIES = {
    "pickle": lambda wrapper: pickle.loads(pickle.dumps(wrapper)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("ranks", [0, 1, 2, 3, 5, 8])
def test_wrapper_pickles_and_copies_also_after_a_forward(ranks, way):
    wrapper = DataParallel(mlp(), cpu(ranks), dim=0, shares=[1] * ranks if ranks else None)
    x = numbers(8, 4)
    wrapper(x).sum().backward()
    other = COPIES[way](wrapper)
    assert type(other) is DataParallel
    assert (other.module is wrapper.module) == (way == "copy")
    for name in ("device_ids", "output_device", "dim", "shares"):
        assert getattr(other, name) == getattr(wrapper, name)
    assert torch.equal(other(x), wrapper(x))


def test_a_copy_of_the_wrapper_finds_its_own_team():
    model = DataParallel(nn.Linear(2, 1), cpu(3))
    model(torch.ones(6, 2))
    state = pickle.dumps(model)
    assert b"Team" not in state
    for other in (pickle.loads(state), copy.deepcopy(model)):
        assert torch.equal(other(torch.ones(6, 2)), model(torch.ones(6, 2)))
