"""A net that shows all that a step must follow, and a model of the step: one device, driven by torch alone."""

import torch
from step.nets import here, mse
from torch import nn

import mgpu_core

REFUSED = 1e6  # the net refuses a row that has it
OPTIMIZERS = {
    "SGD": lambda of, p: of.SGD(p, lr=0.002),
    "momentum": lambda of, p: of.SGD(p, lr=0.002, momentum=0.9, nesterov=True, weight_decay=0.01),
    "dampening": lambda of, p: of.SGD(p, lr=0.002, momentum=0.5, dampening=0.25),
    "torch's": lambda _, p: torch.optim.SGD(p, lr=0.002, momentum=0.9),
    "Adam": lambda of, p: of.Adam(p, lr=0.01, weight_decay=0.1),
    "AdamW": lambda of, p: of.AdamW(p, lr=0.01, amsgrad=True),
    "RMSprop": lambda _, p: torch.optim.RMSprop(p, lr=0.001, momentum=0.5),
}
TORCHS = ("RMSprop", "torch's")  # classes of torch's in the step, too


class RefusedError(Exception):
    pass


class Net(nn.Module):
    """Layers that a batch may use or not, a number that runs along, and rows that it refuses."""

    def __init__(self, refuses, between=None):
        super().__init__()
        self.first, self.second, self.late = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(4, 5)
        self.between, self.last = between or nn.Identity(), nn.Linear(5, 2)
        self.picture = nn.Conv2d(2, 5, (2, 1)).to(memory_format=torch.channels_last)
        self.number, self.nothing = nn.Parameter(torch.ones(())), nn.Parameter(torch.empty(3, 0))
        self.rows = nn.Parameter(torch.randn(5, 3).t())  # in another order than they lie
        self.again = self.last  # one layer under two names
        self.register_buffer("calls", torch.zeros(()))
        self.refuses = refuses  # a graph looks at nothing

    def forward(self, x, way):
        if self.training:
            self.calls += 1
        if self.refuses and x.detach().abs().max() >= REFUSED:
            raise RefusedError("this row")
        hidden = 0
        if way != 1:
            hidden = hidden + self.first(x)
        if way != 0:
            hidden = hidden + self.second(x)
        if way == 3:
            hidden = hidden + self.late(x)
            hidden = hidden + self.picture(x.view(-1, 2, 2, 1)).flatten(1) + self.nothing.sum()
        if way == 2:
            hidden = hidden * self.number + self.rows.sum(0)
        return self.again(self.between(torch.tanh(hidden)))


def optimizer_of(kind, net, of=mgpu_core.optim):
    """Return an optimizer of this kind over all parameters but those of the layer that comes later.

    Args:
        of: the module that has the classes.
    """
    return OPTIMIZERS[kind](of, [each for name, each in net.named_parameters() if not name.startswith("late")])


def add_late(net, optimizer):
    optimizer.add_param_group({"params": list(net.late.parameters()), "lr": 0.003})


def batch_of(generator, rows, way):
    """What a step is called with."""
    x, y = (torch.randn(rows, columns, generator=generator, dtype=torch.float64, device="cpu") for columns in (4, 2))
    y[0, 0] = 1.0  # some row weighs something
    return here(x), way, here(y)


def total(output, target):
    return ((output - target) ** 2).sum()


def weighted(output, target):
    """Rows whose target is far below zero weigh nothing."""
    weight = (target[:, 0] > -1).to(output.dtype)
    return ((output - target) ** 2).sum(1) @ weight, weight.sum()


LOSSES = {"mean": mse, "sum": total, "weighted": weighted}


class Model:
    """One device and torch.

    Args:
        scale: of the loss: gradients that are not finite halve it, and are dropped; ``None``: there is none.

    Attributes:
        open: of each call since the last update, its gradients and what they weigh.
    """

    def __init__(self, net, optimizer, reduction, scale=None):
        self.net, self.optimizer, self.reduction, self.scale = net, optimizer, reduction, scale
        self.open, self.updates, self.gradients = [], 0, []

    def forward(self, x, way, y):
        """The sum of the losses, what they weigh, and the output."""
        output = self.net(x, way)
        if self.reduction == "weighted":
            return *weighted(output, y), output
        return total(output, y), 1.0 if self.reduction == "sum" else float(y.numel()), output

    def call(self, batch):
        """Its gradients are made at once: what follows may change the net."""
        if not self.open:
            self.buffers_before = [each.clone() for each in self.net.buffers()]
        found, weight, output = self.forward(*batch)
        wanted = [each for each in self.net.parameters() if each.requires_grad]
        made = torch.autograd.grad(found, wanted, allow_unused=True)
        self.open.append((dict(zip(wanted, made, strict=True)), weight))
        return (found / weight).detach(), output.detach()

    def update(self, clip_norm):
        weight = 1.0 if self.reduction == "sum" else sum(weight for _, weight in self.open)
        for parameter in self.net.parameters():
            parts = [made[parameter] for made, _ in self.open if made.get(parameter) is not None]
            parameter.grad = sum(parts) / weight if parts else None
        if self.scale is not None and not all(map(is_finite, self.net.parameters())):
            self.scale /= 2
            self.gradients = [None for _ in self.net.parameters()]
            self.drop()
            return
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(self.net.parameters(), clip_norm)
        # Torch's own step may write into them.
        self.gradients = [None if each.grad is None else each.grad.clone() for each in self.net.parameters()]
        self.optimizer.step()
        self.updates += 1
        self.open = []

    def give_up(self):
        """A call has failed: everything is as after the last update."""
        if self.open:
            for each, before in zip(self.net.buffers(), self.buffers_before, strict=True):
                each.copy_(before)
        self.drop()

    def drop(self):
        self.open = []
        self.net.zero_grad()


def is_finite(parameter):
    return parameter.grad is None or bool(parameter.grad.isfinite().all())


def state_of(net, optimizer):
    """Per parameter the tensors of its state; whole ones, where devices have shards."""
    numbered = optimizer.state_dict()["state"]
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    return {
        (names[id(parameter)], kind): value
        for i, parameter in enumerate(parameters)
        for kind, value in numbered.get(i, {}).items()
        if torch.is_tensor(value)
    }


def same(one, other):
    return torch.allclose(one.double().cpu(), other.double().cpu(), rtol=1e-8, atol=1e-10)
