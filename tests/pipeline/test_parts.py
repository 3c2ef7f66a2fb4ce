"""Where the layers are: ``print(place(...))``, ``pipe.parts`` and the map that transformers asks for."""

from types import SimpleNamespace

import pytest
import torch
from fakes.nets import cpu
from torch import nn

from mgpu_core import Pipeline, Predictor, place

DEVICES = cpu(2)
NAMES = [str(torch.device(each)) for each in DEVICES]


class Net(nn.Module):
    """Registered in another order than it is called."""

    def __init__(self):
        super().__init__()
        self.last, self.body, self.first = nn.Linear(4, 2), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.body(self.first(x)))

    def extra_repr(self):
        return "of three"


def name_of(net, name):
    return str(net.get_submodule(name).weight.device)


def lines_of(net):
    return [line.strip() for line in str(net).splitlines()[1:4]]


def test_print_says_where_the_parts_are():
    """Also after a first call, which has shown another order."""
    net = place(Net(), DEVICES)
    assert lines_of(net) == ["of three", f"{NAMES[0]}: last to body, 120 B", f"{NAMES[1]}: first, 80 B"]
    with torch.no_grad():
        net(torch.ones(2, 4))
    assert lines_of(net)[1:] == [f"{NAMES[0]}: first, 80 B", f"{NAMES[1]}: body to last, 120 B"]


def test_a_layer_that_grows_is_counted():
    net = place(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), DEVICES, ["1"])
    net[1] = nn.Linear(2, 7).to(DEVICES[1])
    net(torch.ones(1, 2))
    assert lines_of(net)[:2] == [f"{NAMES[0]}: 0, 24 B", f"{NAMES[1]}: 1, 84 B"]


def test_parts_of_a_pipeline():
    pipe = Pipeline(nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)]), DEVICES, split_points=["1"])
    assert [part.layers for part in pipe.parts] == [("0",), ("1", "2")]
    assert [part.device for part in pipe.parts] == list(map(torch.device, DEVICES))
    assert [part.nbytes for part in pipe.parts] == [24, 48]


def test_a_placed_net_is_served_and_goes_on():
    """Its copy has other parts, and hooks of its own."""
    net = Net().to(DEVICES[0])
    wanted = net(torch.ones(1, 4))
    place(net, DEVICES)
    with Predictor(net, in_flight=2) as predict:
        torch.testing.assert_close(predict(torch.ones(1, 4)), wanted)
    torch.testing.assert_close(net(torch.ones(1, 4)), wanted)


@pytest.mark.parametrize("has_encoder", [False, True])
def test_the_map_that_transformers_asks_for(has_encoder):
    """By models without an encoder, on accelerators alone: a CPU in it means weights of a disk."""
    net = Net()
    net.config = SimpleNamespace(is_encoder_decoder=has_encoder)
    place(net, DEVICES)
    if has_encoder or NAMES[0] == "cpu":
        assert not hasattr(net, "hf_device_map")
        return
    assert dict(net.hf_device_map) == {name: name_of(net, name) for name in ("last", "body", "first")}
    with torch.no_grad():
        net(torch.ones(2, 4))
    assert repr(net.hf_device_map) == repr({name: name_of(net, name) for name in ("first", "body", "last")})
    assert len(net.hf_device_map) == 3
    assert "nothing" not in net.hf_device_map
