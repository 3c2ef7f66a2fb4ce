"""Several workers call the one module of ``place``: what a call sets on it for a while must not reach the others."""

import time
import warnings

import pytest
import torch
from fakes.nets import cpu
from torch import nn

from mgpu_core import Predictor, place


class Slow(nn.Module):
    def forward(self, x):
        time.sleep(0.003)
        return x * 1.0


class Adapted(nn.Module):
    """Multiplies by the number of the request, in one of several ways that belong to the module during the call."""

    def __init__(self, way):
        super().__init__()
        self.layers = nn.Sequential(Slow(), Slow(), Slow())
        self.weight = nn.Parameter(torch.ones(()))  # it is placed by its device
        self.way, self.scale, self.numbers = way, 1.0, {}

    def forward(self, x, scale):
        if self.way == "attribute, restored":
            before, self.scale = self.scale, scale
            try:
                return self.layers(x) * self.scale
            finally:
                self.scale = before
        if self.way == "attribute, deleted":
            self.for_now = scale
            made = self.layers(x) * self.for_now
            if "for_now" in vars(self):
                del self.for_now
            return made
        if self.way == "entry of a dict":
            self.numbers["scale"] = scale
            return self.layers(x) * self.numbers["scale"]
        if self.way == "without torch's setter":
            vars(self)["scale"] = scale
            return self.layers(x) * self.scale
        if self.way == "attribute of a layer":
            self.layers[1].scale = scale
            made = self.layers(x)
            return made * self.layers[1].scale
        if self.way == "hook":
            handle = self.layers[2].register_forward_hook(lambda *given: given[2] * scale)
            made = self.layers(x)
            handle.remove()
            return made
        handle = self.layers[2].register_forward_pre_hook(lambda _, given: (given[0] * scale,))
        made = self.layers(x)
        handle.remove()
        return made


NAMES = {
    "attribute, restored": "scale",
    "attribute, deleted": "for_now",
    "entry of a dict": "numbers",
    "without torch's setter": "scale",
    "attribute of a layer": "layers.1.scale",
    "hook": "hooks of layers.2",
    "hook before": "hooks of layers.2",
}


def answered(net, *others, count=16):
    """Return the products of one and 0, 1, 2 ..., and the warnings."""
    x = torch.ones(1, 1, device=cpu(1)[0])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with Predictor(place(net, cpu(2), ["layers.1"]), in_flight=2, max_batch=1, max_wait_ms=0) as predict:
            futures = [predict.submit(x, float(scale), *others) for scale in range(count)]
            found = [float(future.result(20)) for future in futures]
    return found, [str(each.message) for each in told]


@pytest.mark.parametrize("way", NAMES)
def test_a_module_that_its_calls_change_is_called_by_one_at_a_time(way):
    found, (text,) = answered(Adapted(way))
    assert found == [float(scale) for scale in range(16)]
    assert f"calls of Adapted change {NAMES[way]}, and all in flight share the one module" in text
    assert "they run one at a time from now on" in text


class Installs(nn.Module):
    """Its first call installs what all others use."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Slow(), Slow())
        self.weight = nn.Parameter(torch.ones(()))
        self.meetings = [0, 0]  # at work now, most at once

    def forward(self, x, scale, *mode):
        if "is_ready" not in vars(self):
            self.layers[1].register_forward_hook(lambda *given: given[2] * 2)
            self.is_ready = True
        self.training = False  # as it is
        self.meetings[0] += 1
        self.meetings[1] = max(self.meetings)
        made = self.layers(x) * scale / 2
        self.meetings[0] -= 1
        return made


def test_what_a_first_call_installs_lets_later_ones_run_at_once():
    net = Installs()
    meetings = net.meetings = Shared(net.meetings)
    found, told = answered(net, "mode")
    assert found == [float(scale) for scale in range(16)]
    assert told == []
    assert meetings[1] == 2


class Shared(list):
    """A list of which copies are the list itself."""

    def __deepcopy__(self, memo):
        return self


def test_another_form_is_watched_anew():
    """A branch that only requests with a mode take changes the module."""

    class Sometimes(Adapted):
        def forward(self, x, scale, mode=None):
            return self.layers(x) * scale if mode is None else super().forward(x, scale)

    net, x = Sometimes("hook"), torch.ones(1, 1, device=cpu(1)[0])
    with Predictor(place(net, cpu(2), ["layers.1"]), in_flight=2, max_batch=1, max_wait_ms=0) as predict:
        assert [float(predict(x, float(scale))) for scale in range(3)] == [0, 1, 2]
        calls = [(x, float(scale), *(["mode"] if scale % 2 else [])) for scale in range(32)]
        with pytest.warns(RuntimeWarning, match="one at a time"):
            found = [float(future.result(20)) for future in [predict.submit(*each) for each in calls]]
    assert found == [float(scale) for scale in range(32)]


def test_a_call_that_fails_lets_others_go_on():
    class Fails(Adapted):
        def forward(self, x, scale):
            if scale == 1:
                raise KeyError("scale")
            return super().forward(x, scale)

    net, x = Fails("hook"), torch.ones(1, 1, device=cpu(1)[0])
    with Predictor(place(net, cpu(2), ["layers.1"]), in_flight=2, max_batch=1, max_wait_ms=0) as predict:
        futures = [predict.submit(x, float(scale)) for scale in (1, 1, 2)]
        assert float(futures[2].result(20)) == 2
        assert [type(each.exception(20)) for each in futures] == [KeyError, KeyError, type(None)]


class Reads(nn.Module):
    """Its output depends on what a hook has kept."""

    def __init__(self, of_module):
        super().__init__()
        self.layers, self.kept = nn.Sequential(Slow(), Slow()), {}
        self.weight = nn.Parameter(torch.ones(()))
        kept = self.kept if of_module else {}

        def hook(layer, given, output):
            kept["it"] = output

        def read():
            return kept["it"]

        self.layers[0].register_forward_hook(hook)
        self.read = None if of_module else read

    def forward(self, x):
        x = self.layers(x)
        return x + (self.kept["it"] if self.read is None else self.read())


def test_a_dict_that_a_hook_fills_is_each_copys():
    x = [torch.full((1, 1), float(index), device=cpu(1)[0]) for index in range(16)]
    with Predictor(Reads(of_module=True), cpu(3), max_batch=1, max_wait_ms=0) as predict:
        futures = list(map(predict.submit, x))
        assert [float(future.result(20)) for future in futures] == [2.0 * index for index in range(16)]


def test_a_dict_that_hooks_of_all_copies_fill_is_told_of():
    x = torch.ones(1, 1, device=cpu(1)[0])
    text = r"the forward of Reads changes kept of a hook on layers\.0: all copies share it"
    with Predictor(Reads(of_module=False), cpu(1) * 2, max_batch=1, max_wait_ms=0) as predict, pytest.warns(match=text):
        list(predict.map([x] * 12))
