"""What users change between two calls: one row each, with what is expected of whom.

A change is done to each side, ours and one device's: it gets an object with ``net``, ``optimizer`` and ``loss_fn``.
"""

import copy
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from fakes.nets import cpu
from step.nets import here
from torch import nn
from torch.optim import SGD, AdamW, RMSprop
from torch.optim.lr_scheduler import ExponentialLR

from mgpu_core import optim

IS_ONE_DEVICE = cpu(2)[0] == cpu(2)[1]
PIPELINES = ("pipeline", "step over a pipeline") if IS_ONE_DEVICE else ()  # the changes make all on the first device
IN_SHARDS = "step in shards"
WAYS = ("drop-in", "step", *PIPELINES, IN_SHARDS)
STEPS = tuple(way for way in WAYS if "step" in way)


def momentum(parameters):
    return SGD(parameters, lr=0.05, momentum=0.9)


ours = partial(optim.SGD, lr=0.05, momentum=0.9)
adamw = partial(AdamW, lr=0.01)
OURS = {momentum: ours, adamw: partial(optim.AdamW, lr=0.01)}


@dataclass(frozen=True)
class Change:
    """What is done to a side before one of its calls, and what comes of it.

    Attributes:
        back: what is done two calls later.
        make: the optimizer.
        check: what must hold in the end, besides that all is as on one device.
        ways: whose calls see it at all.
    """

    do: Callable[[Any], Any]
    back: Callable[[Any], Any] = lambda side: None
    make: Callable = momentum
    check: Callable[[Any], Any] = lambda side: None
    ways: tuple[str, ...] = WAYS


class Child(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        return self.last(x) * self.config.scale


class Scaled(nn.Module):
    """All that it is multiplied by is found in attributes of all kinds."""

    def __init__(self):
        super().__init__()
        self.config = Namespace(scale=1.0, inner=SimpleNamespace(scale=1.0))
        self.child = Child(self.config)
        self.scale = 1.0
        self.listed, self.named = [1.0], {"a": {"b": [1.0]}}
        self.tensor = here(torch.ones((), dtype=torch.float64))
        self.function, self.mode = torch.nn.functional.softplus, "as it is"
        self.method = self.scaled
        self.optional = 1.0
        self.register_buffer("offset", torch.ones(4))
        self.double()

    def scaled(self, x):
        return self.scale * x

    def forward(self, x):
        x = self.method(self.child(x)) * self.config.inner.scale * self.listed[0] * self.named["a"]["b"][0]
        x = (
            self.function(x)
            * self.tensor.to(x.device)
            * (1 if self.mode == "as it is" else 3)
            * getattr(self, "optional", 2)
        )
        x = x if self.offset is None else x + self.offset
        return x * getattr(self, "late", 1) if self.training else -x


class Power(nn.Module):
    """The mean of a power of differences, by operations that every device has."""

    def __init__(self, power):
        super().__init__()
        self.power = power

    def forward(self, output, target):
        return ((output - target) ** self.power).mean()


class Loss(nn.Module):
    """Of weighted differences."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weights", here(torch.ones(2, dtype=torch.float64)))
        self.inner = Power(2)

    def forward(self, output, target):
        return self.inner(output * self.weights.to(output.device), target.to(output.device))


class Wrapped(nn.Module):
    """The same parameters, and other numbers."""

    def __init__(self, inner):
        super().__init__()
        self.weight, self.bias = inner.weight, inner.bias

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias) * 3


class Merging(nn.Linear):
    """Adds its low-rank part to its weights for as long as it evaluates."""

    def __init__(self):
        super().__init__(2, 2, dtype=torch.float64)
        self.weight.requires_grad_(False)
        self.down, self.up = (nn.Parameter(torch.randn(*size).double()) for size in ((1, 2), (2, 1)))
        self.merged = False

    def train(self, mode=True):
        super().train(mode)
        if self.merged == mode:
            self.weight.data += (-1 if mode else 1) * (self.up.data @ self.down.data)
            self.merged = not mode
        return self

    def forward(self, x):
        out = super().forward(x)
        return out if self.merged else out + x @ self.down.T @ self.up.T


def net():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 2), nn.Tanh())
    return here(nn.Sequential(Scaled(), layers, Merging()).double())


def tripled(self, x):
    return 3 * x.tanh() + self.scale


def tripled_forward(self, x):
    return 3 * self.child(x) * self.scale


ATTRIBUTES = {
    "number": lambda net: setattr(net, "scale", 2.0),
    "word": lambda net: setattr(net, "mode", "another"),
    "list": lambda net: setattr(net, "listed", [2.0]),
    "entry": lambda net: net.listed.__setitem__(0, 2.0),
    "deep entry": lambda net: net.named["a"]["b"].__setitem__(0, 2.0),
    "shared object": lambda net: setattr(net.config, "scale", 2.0),
    "object in an object": lambda net: setattr(net.config.inner, "scale", 2.0),
    "tensor": lambda net: setattr(net, "tensor", here(torch.full((), 2.0, dtype=torch.float64))),
    "written tensor": lambda net: net.tensor.fill_(2.0),
    "function": lambda net: setattr(net, "function", torch.tanh),
    "method": lambda net: setattr(net, "method", MethodType(tripled, net)),
    "forward": lambda net: setattr(net, "forward", MethodType(tripled_forward, net)),
    "attribute gone": lambda net: delattr(net, "optional"),
    "attribute in a child": lambda net: setattr(net.child, "config", Namespace(scale=5.0)),
}
MODULES = {
    "another layer": lambda net: net.__setitem__(1, nn.ReLU()),
    "one layer more": lambda net: net.append(nn.Tanh()),
    "one layer less": lambda net: net.__delitem__(1),
    "wrapped layer": lambda net: net.__setitem__(0, Wrapped(net[0])),
}


# Parameters and buffers.


def replaced_layer(side):
    torch.manual_seed(1)
    side.net[1][0] = here(nn.Linear(4, 2).double())


def another_layer(side):
    side.gone = side.net[1][0].weight
    side.left = side.gone.detach().clone()
    replaced_layer(side)
    side.optimizer.param_groups[0]["params"] = list(side.net.parameters())


def one_more_with_parameters(side):
    torch.manual_seed(1)
    side.net[1].append(here(nn.Linear(2, 2).double()))


def is_left_alone(side):
    assert torch.equal(side.gone, side.left)


def replace_parameter(side):
    side.net[1][0].weight = nn.Parameter(side.net[1][0].weight.detach() + 1)
    side.optimizer.param_groups[0]["params"] = list(side.net.parameters())


def written(side):
    with torch.no_grad():
        side.net[1][0].weight.mul_(0.5).add_(0.1)
        side.net[2].down.fill_(0.5)


def moved(side):
    for each in side.net[1][0].parameters():
        each.data = each.data.clone() * 0.5


def loaded(side, **how):
    side.net.load_state_dict({name: each.clone() * 0.5 for name, each in side.net.state_dict().items()}, **how)
    side.optimizer.param_groups[0]["params"] = list(side.net.parameters())


# Hooks.


def hooked(side):
    side.handle = side.net[1][0].weight.register_hook(lambda gradient: gradient * 2)


def forward_hooked(side):
    side.handle = side.net[1][0].register_forward_hook(lambda module, args, output: output * 2)


def forward_pre_hooked(side):
    side.handle = side.net[1][0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))


def backward_hooked(side):
    side.handle = side.net[1][0].register_full_backward_hook(lambda module, into, out: (into[0] * 2,))


def unhooked(side):
    side.handle.remove()


# Optimizers.


def group(**values):
    return lambda side: side.optimizer.param_groups[0].update(values)


def numbers(side):
    side.optimizer.param_groups[0].update(lr=0.01, weight_decay=0.3)


def in_two_groups(parameters, make=momentum):
    *first, last, bias = parameters
    return make([{"params": first, "lr": 0.1}, {"params": [last, bias], "lr": 0.01}])


def exchanged(side):
    one, other = side.optimizer.param_groups
    one["params"], other["params"] = other["params"], one["params"]


def left_out(side):
    side.left = side.optimizer.param_groups[0]["params"].pop(2)


def back_again(side):
    side.optimizer.param_groups[0]["params"].append(side.left)


def by_hand(side):
    """A step of the user's own."""
    x, y = (here(torch.full((5, columns), 0.5, dtype=torch.float64)) for columns in (4, 2))
    side.optimizer.zero_grad()
    side.loss_fn(side.net(x), y).backward()
    side.optimizer.step()


def own_backward(side):
    """A backward of the user's own, whose gradients nobody uses."""
    side.loss_fn(side.net(torch.ones(5, 4).double()), torch.ones(5, 2).double()).backward()


def foreign_gradients(side):
    for each in side.net.parameters():
        each.grad = torch.full_like(each, 100) if each.requires_grad else None


def own_entries(side):
    """Which are none of the optimizer's."""
    for parameter in side.optimizer.param_groups[0]["params"]:
        side.optimizer.state[parameter].update(slow=parameter.detach().clone(), name="x")


def own_entry_beside(side):
    """Which is no parameter's."""
    side.optimizer.state["epoch"] = 3


def step_replaced(side):
    """By one that halves the gradients."""
    original = side.optimizer.step

    def step(closure=None):
        for each in side.net.parameters():
            if each.grad is not None:
                each.grad.mul_(0.5)
        return original(closure)

    side.optimizer.step = step


def state_kept(side):
    side.kept = copy.deepcopy(side.optimizer.state_dict())


def state_loaded(side):
    side.optimizer.load_state_dict(side.kept)


def frozen(side, wanted=True):
    side.net[1].requires_grad_(not wanted)


def frozen_and_forgotten(side):
    """By the optimizer, too."""
    frozen(side)
    side.optimizer.param_groups[0]["params"] = [each for each in side.net.parameters() if each.requires_grad]


def thawed_in_a_group(side):
    frozen(side, False)
    side.optimizer.add_param_group({"params": list(side.net[1].parameters()), "lr": 0.1})


class Assigning(torch.optim.Optimizer):
    """Puts parameters elsewhere."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.data = parameter.data - 0.1 * parameter.grad


def scheduled(side):
    side.schedule = ExponentialLR(side.optimizer, 0.5)
    side.schedule.step()


def scheduled_again(side):
    side.schedule.step()


def of_all(do, back=None, *, ways=STEPS, **makes):
    """A row per optimizer: of the user's own loop the first is enough."""
    rows = {name: Change(do, back or nothing, make, ways=ways) for name, make in makes.items()}
    rows["momentum"] = Change(do, back or nothing)
    return {f"{do.__name__.replace('_', ' ')}, {name}": row for name, row in rows.items()}


def nothing(side):
    pass


def cleared(side):
    side.optimizer.state.clear()


def one_cleared(side):
    if side.optimizer.state:
        side.optimizer.state.popitem()


def momentum_asleep(side):
    side.optimizer.param_groups[0]["momentum"] = 0.0
    side.rebuild()


EACH = {"ours": ours, "adamw": adamw}
CHANGES = {
    **{name: Change(lambda side, do=do: do(side.net[0])) for name, do in ATTRIBUTES.items()},
    **{name: Change(lambda side, do=do: do(side.net[1])) for name, do in MODULES.items()},
    "module of the loss": Change(lambda side: setattr(side.loss_fn, "inner", Power(4))),
    "buffer of the loss": Change(lambda side: side.loss_fn.weights.fill_(3)),
    "another buffer of the loss": Change(lambda side: setattr(side.loss_fn, "weights", side.loss_fn.weights * 2)),
    "layer with new parameters": Change(another_layer, check=is_left_alone),
    "layer that the optimizer does not have": Change(one_more_with_parameters),
    "layer behind the optimizer's back": Change(replaced_layer),
    "new parameter": Change(replace_parameter),
    "parameter that comes and goes": Change(
        lambda side: setattr(side.net[0], "late", nn.Parameter(torch.ones(4).double())),
        lambda side: delattr(side.net[0], "late"),
    ),
    "parameter gone": Change(lambda side: side.net[1][0].register_parameter("bias", None)),
    "written in place": Change(written),
    "moved by data": Change(moved),
    "loaded": Change(loaded),
    "loaded by assignment": Change(partial(loaded, assign=True)),
    "buffer in place": Change(lambda side: side.net[0].offset.fill_(2)),
    "another buffer": Change(lambda side: setattr(side.net[0], "offset", side.net[0].offset * 2)),
    "buffer that is none": Change(lambda side: setattr(side.net[0], "offset", None)),
    "buffer that comes and goes": Change(
        lambda side: side.net[0].register_buffer("late", here(torch.full((4,), 2.0, dtype=torch.float64))),
        lambda side: delattr(side.net[0], "late"),
    ),
    "eval and train": Change(
        lambda side: side.net.eval(),
        lambda side: side.net.train(),
        ways=WAYS if IS_ONE_DEVICE else ("drop-in",),  # `Merging` writes through `.data`: see `sync_parameters`
    ),
    "hook of a parameter": Change(hooked, unhooked),
    "forward hook": Change(forward_hooked, unhooked),
    "forward pre-hook": Change(forward_pre_hooked, unhooked),
    "backward hook": Change(backward_hooked, unhooked),
    "exchanged groups": Change(exchanged, make=in_two_groups),
    "momentum that sleeps": Change(momentum_asleep, group(momentum=0.9)),
    "parameters put elsewhere by their optimizer": Change(nothing, make=Assigning),
    "gradients of the user's own": Change(foreign_gradients),
    "cleared gradients": Change(lambda side: side.optimizer.zero_grad(set_to_none=False)),
    "deep copy": Change(lambda side: [each.data.fill_(7) for each in copy.deepcopy(side.net).parameters()]),
    **of_all(frozen, partial(frozen, wanted=False), **EACH),
    **of_all(frozen_and_forgotten, thawed_in_a_group, **EACH),
    **of_all(left_out, back_again, adamw=adamw),
    **of_all(numbers, **EACH),
    **of_all(scheduled, scheduled_again, **EACH, tensor=lambda p: SGD(p, lr=torch.tensor(0.1, dtype=torch.float64))),
    **of_all(cleared, **EACH),
    **of_all(one_cleared, **EACH),
    **of_all(state_kept, state_loaded, **EACH),
    **of_all(own_entries, ours=ours),
    **of_all(own_entry_beside, **EACH, rmsprop=partial(RMSprop, lr=0.01)),
    **of_all(step_replaced, adamw=adamw),
    **of_all(by_hand, **EACH),
    **of_all(own_backward),
}
