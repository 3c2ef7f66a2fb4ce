"""Attributes that a forward assigns: notes are kept, and what belongs to a batch is of its micro-batch."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from fakes.nets import cpu
from pipeline.own_code import Block, Plain
from torch import nn

from mgpu_core import Pipeline, TrainStep

ROWS = 8


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 8, dtype=torch.float64, generator=generator, device="cpu").to(cpu(1)[0])


def made(kind):
    torch.manual_seed(0)
    return kind().to(cpu(1)[0])


def in_turn(whole, chunks):
    """The outputs of micro-batches one after the other."""
    return torch.cat([whole(part) for part in batch().tensor_split(chunks)])


def losses(whole, chunks):
    """The mean loss of micro-batches one after the other, and its gradients."""
    whole.zero_grad()
    total = 0.0
    for part in batch().tensor_split(chunks):
        loss = whole(part).square().mean() / chunks
        loss.backward()
        total += float(loss.detach())
    return total


def same_gradients(net, whole):
    return all(
        torch.allclose(one.grad.cpu(), other.grad.cpu(), rtol=0, atol=1e-12)
        for one, other in zip(net.parameters(), whole.parameters(), strict=True)
    )


def step_of(net, chunks, **options):
    pipe = Pipeline(net, cpu(2), split_points=["blocks.2"], chunks=chunks, **options)
    return TrainStep(pipe, lambda output, target: output.square().mean(), torch.optim.SGD(net.parameters(), lr=0.0))


class Doubling(Plain):
    """Changes its layers once, and notes that on itself; by hooks, as models of transformers do."""

    is_ready = False

    def forward(self, x):
        if not self.is_ready:
            self.handles = [
                each.register_forward_hook(lambda layer, args, output: output * 1.5) for each in self.blocks
            ]
            self.is_ready = True
        return super().forward(x)


class Wrapping(Plain):
    """The same by another forward, noted by a method."""

    first = None

    def forward(self, x):
        if self.first is None:
            self.first = self.blocks[3].linear.forward
            self.blocks[3].linear.forward = lambda x, own=self.first: own(x) * 1.5
        return super().forward(x)


class Below(nn.Module):
    """The note is on a module between the root and the layers."""

    def __init__(self):
        super().__init__()
        self.inner = Doubling()

    def forward(self, x):
        return self.inner(x)

    @property
    def blocks(self):
        return self.inner.blocks


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("kind", [Doubling, Wrapping, Below])
def test_layers_that_are_changed_once_are_changed_once(kind, chunks):
    whole, net = made(kind), made(kind)
    start = "inner.blocks.2" if kind is Below else "blocks.2"
    pipe = Pipeline(net, cpu(2), split_points=[start], chunks=chunks)
    with torch.no_grad(), warnings.catch_warnings(action="error"):
        for _ in range(3):
            assert torch.allclose(pipe(batch()).cpu(), in_turn(whole, chunks).cpu(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [Doubling, Wrapping])
def test_a_step_changes_layers_once(kind):
    whole, net = made(kind), made(kind)
    step = step_of(net, 4)
    for _ in range(3):
        assert float(step(batch(), batch())) == pytest.approx(losses(whole, 4), abs=1e-12)
        assert same_gradients(net, whole)


class CalledBackwards(Plain):
    is_ready = False

    def forward(self, x):
        if not self.is_ready:
            for each in self.blocks:
                each.register_forward_hook(lambda layer, args, output: output * 1.5)
            self.is_ready = True
        for index in (2, 3, 0, 1):
            x = self.blocks[index](x)
        return x


def test_a_call_that_begins_again_changes_layers_once():
    whole, net = made(CalledBackwards), made(CalledBackwards)
    pipe = Pipeline(net, cpu(2), chunks=2)
    with torch.no_grad():
        for _ in range(2):
            assert torch.allclose(pipe(batch()).cpu(), in_turn(whole, 2).cpu(), rtol=0, atol=1e-12)


class Failing(Doubling):
    is_failing = True

    def forward(self, x):
        x = super().forward(x)
        if Failing.is_failing:
            raise MemoryError("out of memory")
        return x


def test_a_first_call_that_fails_leaves_no_hooks():
    whole, net = made(Doubling), made(Failing)
    pipe = Pipeline(net, cpu(2), split_points=["blocks.2"], chunks=2)
    with pytest.raises(MemoryError):
        pipe(batch())
    Failing.is_failing = False
    assert torch.allclose(pipe(batch()).cpu(), in_turn(whole, 2).cpu(), rtol=0, atol=1e-12)


class Counting(Plain):
    count = 0

    def forward(self, x):
        self.count += 1
        return super().forward(x) * self.count


def test_a_counter_around_layers_is_warned_of_and_kept_with_one_micro_batch():
    net = made(Counting)
    with pytest.warns(
        UserWarning, match=r"assigns count: each micro-batch of a call begins with the value from before"
    ):
        Pipeline(net, cpu(2), split_points=["blocks.2"], chunks=2)(batch())
    whole, net = made(Counting), made(Counting)
    pipe = Pipeline(net, cpu(2), split_points=["blocks.2"], chunks=1)
    with warnings.catch_warnings(action="error"):
        for _ in range(3):
            assert torch.allclose(pipe(batch()).cpu(), whole(batch()).cpu())


class Late(Doubling):
    captures = False

    def forward(self, x):
        return super().forward(x) if self.captures else Plain.forward(self, x)


def test_what_a_later_call_does_once_is_warned_of():
    net = made(Late)
    pipe = Pipeline(net, cpu(2), split_points=["blocks.2"], chunks=2)
    pipe(batch())
    net.captures = True
    with pytest.warns(UserWarning, match=r"is_ready.*: a call after the first does so"):
        pipe(batch())


def test_modules_that_a_forward_adds_are_refused_by_name():
    class Adding(Plain):
        def forward(self, x):
            self.last = nn.Identity()
            return self.last(super().forward(x))

    pipe = Pipeline(Adding(), cpu(2), split_points=["blocks.2"], chunks=2)
    with pytest.raises(RuntimeError, match="adds or replaces modules around layers: last"):
        pipe(batch())


class Gate(Block):
    """Keeps an auxiliary loss, as gates of experts do."""

    loss = None

    def forward(self, x):
        x = super().forward(x)
        self.loss = x.square().mean()
        return x


class Gated(Plain):
    def __init__(self):
        super().__init__(Gate)

    def forward(self, x):
        x = super().forward(x)
        return x + sum(each.loss for each in self.blocks)


class Listing(Block):
    """The same in a list of its own."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def forward(self, x):
        x = super().forward(x)
        self.losses.append(x.square().mean())
        return x


class Listed(Plain):
    def __init__(self):
        super().__init__(Listing)

    def forward(self, x):
        for each in self.blocks:
            each.losses.clear()
        x = super().forward(x)
        return x + sum(each.losses[-1] for each in self.blocks)


class Cell(Block):
    state = None

    def forward(self, x):
        self.inside = (x * 1).detach()
        h = torch.tanh(self.linear(x) + (0 if self.state is None else self.state))
        self.state = h.detach()
        return x + h


class Recurrent(Plain):
    """Layers go on from a state that the module resets, and each is called twice."""

    def __init__(self):
        super().__init__(Cell)

    def forward(self, x):
        for cell in self.blocks:
            cell.state = None
        return super().forward(super().forward(x))


class Shared(Plain):
    """Losses in a dict of the module itself."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def forward(self, x):
        for index, block in enumerate(self.blocks):
            x = block(x)
            self.found[f"{index}"] = x.square().mean()
        return x + sum(self.found.values())


KEEPING = [Gated, Listed, Recurrent, Shared]


@pytest.mark.parametrize("kind", KEEPING)
def test_what_layers_keep_of_a_batch_is_that_of_their_micro_batch(kind):
    whole, net = made(kind), made(kind)
    pipe = Pipeline(net, cpu(2), split_points=["blocks.2"], chunks=4)
    with torch.no_grad():
        for _ in range(3):
            assert torch.allclose(pipe(batch()).cpu(), in_turn(whole, 4).cpu(), rtol=0, atol=1e-12)


def test_a_state_of_an_earlier_call_is_no_state_of_a_micro_batch():
    whole, net = made(Recurrent), made(Recurrent)
    with torch.no_grad():
        net(batch())
        pipe = Pipeline(net, cpu(2), split_points=["blocks.2"], chunks=4)
        assert torch.allclose(pipe(batch()).cpu(), in_turn(whole, 4).cpu(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("kind", KEEPING)
def test_a_step_differentiates_what_layers_keep(kind, schedule, checkpoint):
    whole, net = made(kind), made(kind)
    step = step_of(net, 4, schedule=schedule, checkpoint=checkpoint)
    for _ in range(2):
        assert float(step(batch(), batch())) == pytest.approx(losses(whole, 4), abs=1e-12)
        assert same_gradients(net, whole)


def test_what_a_layer_keeps_stays_after_the_call():
    whole, net = made(Gated), made(Gated)
    with torch.no_grad():
        Pipeline(net, cpu(2), split_points=["blocks.2"], chunks=4)(batch())
        in_turn(whole, 4)
    assert torch.allclose(net.blocks[0].loss.cpu(), whole.blocks[0].loss.cpu())


def test_a_step_whose_loss_reads_the_module_itself_is_refused_by_name():
    net = made(Gated)
    pipe = Pipeline(net, cpu(2), split_points=["blocks.2"], chunks=2)
    pipe(batch())

    def loss_fn(output, target):
        return output.square().mean() + net.blocks[0].loss

    step = TrainStep(pipe, loss_fn, torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="a step reads loss of a module itself"):
        step(batch(), batch())


def test_a_value_that_layers_carry_on_is_warned_of():
    class Average(Block):
        mean = torch.zeros(())

        def forward(self, x):
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
            return super().forward(x) + self.mean

    class Averages(Plain):
        def __init__(self):
            super().__init__(Average)
            for each in self.blocks:
                each.mean = torch.zeros((), dtype=torch.float64)

    whole, net = made(Averages), made(Averages)
    pipe = Pipeline(net, cpu(2), split_points=["blocks.2"], chunks=4)
    with torch.no_grad(), pytest.warns(UserWarning, match=r"blocks.0.mean.*go on from one another's value"):
        found = pipe(batch())
    with torch.no_grad():
        assert torch.allclose(found.cpu(), in_turn(whole, 4).cpu())


def test_a_copy_of_the_net_has_its_own_attributes():
    net = made(Gated)
    pipe = Pipeline(net, cpu(2), split_points=["blocks.2"], chunks=2)
    with torch.no_grad():
        wanted = pipe(batch())
        again = Pipeline(copy.deepcopy(made(Gated)), cpu(2), split_points=["blocks.2"], chunks=2)(batch())
    assert torch.equal(wanted, again)


class Patched(CalledBackwards):
    """A layer has a forward of its own, and is called in two stages: the call begins again more than once."""

    def __init__(self):
        super().__init__()
        own = self.blocks[0].forward
        self.blocks[0].forward = lambda x: own(x) * 2

    def forward(self, x):
        return self.blocks[0](super().forward(x))


def test_a_forward_of_a_layer_s_own_stays_where_a_call_begins_again():
    whole, net = made(Patched), made(Patched)
    pipe = Pipeline(net, cpu(2), chunks=2)
    with torch.no_grad():
        for _ in range(2):
            assert torch.allclose(pipe(batch()).cpu(), in_turn(whole, 2).cpu(), rtol=0, atol=1e-12)


class Saving(Plain):
    """A hook of a layer is a method of the module, which goes on from the value."""

    def __init__(self):
        super().__init__()
        self.blocks[1].register_forward_hook(self.save)

    def save(self, layer, args, output):
        self.saved = output

    def forward(self, x):
        return super().forward(x) + self.saved


class SavingBelow(Saving):
    """The hook is of a module inside a layer, and the method is an attribute, too."""

    def __init__(self):
        Plain.__init__(self)
        self.blocks[1].linear.register_forward_pre_hook(self.save_input)
        self.method = self.add

    def save_input(self, layer, args):
        self.saved = args[0]

    def add(self, x):
        self.added = x + self.saved
        return self.added

    def forward(self, x):
        self.method(Plain.forward(self, x))
        return self.added


@pytest.mark.filterwarnings("ignore:the forward of Saving")
@pytest.mark.parametrize("kind", [Saving, SavingBelow])
def test_methods_of_the_module_that_are_hooks_are_of_their_micro_batch(kind):
    whole, net = made(kind), made(kind)
    with torch.no_grad():
        net(batch())
    step = step_of(net, 4)
    for _ in range(2):
        assert float(step(batch(), batch())) == pytest.approx(losses(whole, 4), abs=1e-12)
        assert same_gradients(net, whole)


class Reads(Plain):
    """Its output depends on what a hook on a layer has kept."""

    def __init__(self):
        super().__init__()
        self.saved, self.kept = None, {}

    def forward(self, x):
        x = super().forward(x)
        return x + (self.kept["it"] if self.saved is None else self.saved)


def by_attribute(net):
    def hook(layer, args, output):
        net.saved = output

    return hook


def by_entry(net):
    def hook(layer, args, output):
        net.kept["it"] = output

    return hook


def by_dict(net):
    kept = net.kept

    def hook(layer, args, output):
        kept["it"] = output

    return hook


@pytest.mark.filterwarnings("ignore:the forward of Reads assigns saved. each micro-batch")
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("way", [by_attribute, by_entry, by_dict])
def test_closures_that_are_hooks_are_of_their_micro_batch(way, chunks):
    whole, net = made(Reads), made(Reads)
    for each in (whole, net):
        each.blocks[1].register_forward_hook(way(each))
    pipe = Pipeline(net, cpu(2), split_points=["blocks.2"], chunks=chunks)
    with torch.no_grad():
        for _ in range(3):
            assert torch.allclose(pipe(batch()).cpu(), in_turn(whole, chunks).cpu(), rtol=0, atol=1e-12)


def test_a_hook_that_fills_a_dict_of_its_own_is_told_of():
    net, kept = made(Plain), {}

    def hook(layer, args, output):
        kept["it"] = output

    net.blocks[1].register_forward_hook(hook)
    pipe = Pipeline(net, cpu(2), split_points=["blocks.2"], chunks=3)
    with pytest.warns(UserWarning, match=r"changes kept of a hook on blocks\.1: micro-batches share it"):
        pipe(batch())


def test_a_hook_that_sets_an_attribute_of_the_module_by_an_object_is_told_of():
    class Keeps:
        def __init__(self, net):
            self.net = net

        def __call__(self, layer, args, output):
            self.net.saved = output

    net = made(Plain)
    net.saved = None
    net.blocks[1].register_forward_hook(Keeps(net))
    pipe = Pipeline(net, cpu(2), split_points=["blocks.2"], chunks=2)
    with pytest.warns(UserWarning, match=r"assigns saved: a hook or another closure sets it on the module itself"):
        pipe(batch())


def test_a_net_whose_call_has_begun_again_is_freed_at_once():
    gc.collect()
    gc.disable()
    try:
        net = made(Gated)
        gone = weakref.ref(net)
        step = step_of(net, 2)
        step(batch(), batch())
        del net, step
        assert gone() is None
    finally:
        gc.enable()
