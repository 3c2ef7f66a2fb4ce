"""A look is over when anything that was looked at is another object, or another number; and not before."""

import gc
from collections import OrderedDict, defaultdict

import pytest
import torch
from mgpu_core.train.module_look import module_look
from torch import nn

from mgpu_core import _core
from mgpu_core._core import Turn
from mgpu_core.look import Look


class Thing:
    number = 1 << 40  # made anew by whoever adds

    @property
    def fresh(self):
        return self.number + 1


def test_nothing_is_never_over():
    assert not Look().is_over()


def test_equal_numbers_that_are_made_anew_are_the_same():
    thing, tensor = Thing(), torch.zeros(3, 4)
    look = Look([], [(thing, "fresh"), (tensor, "shape")], [tensor.data_ptr, tensor.stride, lambda: 0.5 * 3])
    assert thing.fresh is not thing.fresh
    assert not look.is_over()
    thing.number = 7
    assert look.is_over()
    look.take_again()
    assert not look.is_over()


@pytest.mark.parametrize(
    "change",
    [
        lambda entries: entries.update(a=2),
        lambda entries: entries.update(c=1),
        lambda entries: entries.pop("b"),
        lambda entries: entries.update(a=True),  # equal, and no number
        lambda entries: entries.clear(),
        lambda entries: entries.update(b=[]),  # equal, and another list
        lambda entries: (entries.pop("a"), entries.update(a=1)),
    ],
)
@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda entries: defaultdict(int, entries)])
def test_entries_of_dicts(kind, change):
    entries = kind({"a": 1, "b": []})
    look = Look([[], entries, {}])
    assert not look.is_over()
    change(entries)
    assert look.is_over()


@pytest.mark.parametrize(
    "change", [lambda x: x.append(3), lambda x: x.pop(), lambda x: x.reverse(), lambda x: x.__setitem__(0, None)]
)
def test_entries_of_lists(change):
    entries = [object(), object()]
    look = Look([entries, [1]])
    assert not look.is_over()
    change(entries)
    assert look.is_over()


def test_what_goes_from_one_container_to_the_next():
    """One after the other, the entries are the same."""
    one, other = [1, 2], [3]
    look = Look([one, other])
    other.insert(0, one.pop())
    assert look.is_over()
    one.append(other.pop(0))
    assert not look.is_over()


def test_tuples_of_what_cannot_be_compared():
    tensors = torch.ones(2), torch.ones(2)
    look = Look((), (), [lambda: tuple(tensors)])
    assert not look.is_over()
    tensors = tensors[0], torch.ones(2)
    assert look.is_over()  # and no error of "the truth value of a tensor"


def test_errors_are_the_caller_s():
    thing = Thing()
    with pytest.raises(AttributeError, match="nowhere"):
        Look([], [(thing, "nowhere")])
    with pytest.raises(ZeroDivisionError):
        Look([], [], [lambda: 1 // 0])
    thing.here = 1
    look = Look([], [(thing, "here")])
    del thing.here
    with pytest.raises(AttributeError, match="here"):
        look.is_over()
    with pytest.raises(TypeError, match="must be a list or a dict"):
        Look([(1, 2)])


@pytest.mark.parametrize("arguments", [(), ([], []), ([], [], ()), ([], [1], []), ([], [(1, "a", 2)], [])])
def test_wrong_arguments(arguments):
    with pytest.raises(TypeError, match="lists of containers"):
        _core.look_at(*arguments)
    with pytest.raises(TypeError, match="lists of containers"):
        _core.looks_like(*arguments, *([[]] * (len(arguments) == 3)))


def test_nothing_is_held_twice():
    """Each object that is looked at is let go of as often as it was taken."""
    entries, thing = {"a": object()}, Thing()
    thing.kept = object()
    watched = [[entries], [(thing, "kept")], [lambda: thing.kept]]
    for _ in range(3):
        found = _core.look_at(*watched)
        assert _core.looks_like(*watched, found)
        assert not _core.looks_like(*watched, [])
    del found
    gc.collect()
    before = len(gc.get_referrers(thing.kept)), len(gc.get_referrers(entries["a"]))
    for _ in range(1000):
        _core.looks_like(*watched, _core.look_at(*watched))
    assert (len(gc.get_referrers(thing.kept)), len(gc.get_referrers(entries["a"]))) == before


MODULE_CHANGES = {
    "mode": lambda net: net[1].eval(),
    "module": lambda net: net.append(nn.ReLU()),
    "parameter": lambda net: setattr(net[0], "bias", nn.Parameter(torch.zeros(2))),
    "no parameter": lambda net: setattr(net[0], "bias", None),
    "moved": lambda net: setattr(net[0].weight, "data", net[0].weight.detach().clone()),
    "transposed": lambda net: setattr(net[0].weight, "data", net[0].weight.detach().t()),
    "frozen": lambda net: net[0].weight.requires_grad_(False),
    "hook": lambda net: net[1].register_forward_hook(lambda *_: None),
    "second hook": lambda net: net[0].register_forward_pre_hook(lambda *_: None),
    "gradient hook": lambda net: net[0].weight.register_hook(lambda g: g),
    "second gradient hook": lambda net: net[0].bias.register_hook(lambda g: g),
    "accumulated": lambda net: net[0].weight.register_post_accumulate_grad_hook(lambda p: None),
    "dtype": lambda net: net.half(),
}


@pytest.mark.parametrize("change", MODULE_CHANGES.values(), ids=MODULE_CHANGES)
def test_what_ends_a_look_at_a_module(change):
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    net[0].register_forward_pre_hook(lambda *_: None)
    net[0].bias.register_hook(lambda g: g)
    look = module_look(list(net.modules()), list(net.parameters()))
    assert not look.is_over()
    change(net)
    assert look.is_over()


def test_a_look_at_a_script():
    script = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    look = module_look(list(script.modules()), list(script.parameters()))
    script(torch.ones(1, 2)).sum().backward()
    assert not look.is_over()
    script.eval()
    assert look.is_over()


def test_a_turn_is_one_s_at_a_time():
    turn = Turn("not now")
    with turn:
        for _ in range(2):  # who is refused does not end the other's
            with pytest.raises(RuntimeError, match=r"^not now$"):
                turn.__enter__()
    with pytest.raises(ValueError, match="x"), turn:
        raise ValueError("x")
    with turn:
        pass
