"""What a module tree finds, and whether it still holds after the module was changed."""

import pytest
import torch
from torch import nn

from mgpu_core.trees.module_tree import ModuleTree, tensors_of


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.register_buffer("table", torch.zeros(2))
        self.register_parameter("missing", None)
        self.register_buffer("nothing", None)
        self.tied = self.second
        self.scale = 1.0


class Other(nn.Linear):
    pass


def swap(net):
    net.first, net.second = net.second, net.first


def rename(net):
    """The last one, so that the order stays."""
    name = list(net._modules)[-1]
    net._modules["another"] = net._modules.pop(name)


def rename_parameter(net):
    name = list(net.first._parameters)[-1]
    net.first._parameters["another"] = net.first._parameters.pop(name)


def reorder(net):
    net._modules["first"] = net._modules.pop("first")


CHANGES = {
    "a layer is replaced": lambda net: setattr(net, "first", nn.Linear(3, 3)),
    "layers are swapped": swap,
    "a child has another name": rename,
    "a parameter has another name": rename_parameter,
    "children have another order": reorder,
    "a child is added": lambda net: net.add_module("late", nn.ReLU()),
    "a child is deleted": lambda net: delattr(net, "tied"),
    "a child becomes None": lambda net: setattr(net, "tied", None),
    "a child of a child": lambda net: net.first.add_module("late", nn.ReLU()),
    "a new parameter": lambda net: net.register_parameter("late", nn.Parameter(torch.ones(1))),
    "a parameter that was missing": lambda net: setattr(net, "missing", nn.Parameter(torch.ones(1))),
    "a parameter is replaced": lambda net: setattr(net.first, "weight", nn.Parameter(torch.ones(3, 3))),
    "weights are tied": lambda net: setattr(net.first, "weight", net.second.weight),
    "a parameter becomes None": lambda net: setattr(net.first, "bias", None),
    "a buffer is replaced": lambda net: setattr(net, "table", torch.zeros(2)),
    "a buffer that was missing": lambda net: setattr(net, "nothing", torch.zeros(2)),
    "buffers of another dtype": lambda net: net.double(),
    "a buffer is deleted": lambda net: delattr(net, "table"),
    "a class is changed": lambda net: setattr(net.first, "__class__", Other),
    "module.compile()": lambda net: net.first.compile(backend="eager"),
    "a layer is compiled": lambda net: setattr(net, "first", torch.compile(net.first, backend="eager")),
    "a bound method": lambda net: setattr(net.first, "again", net.second.forward),
    "a script": lambda net: setattr(net, "first", torch.jit.script(net.first)),
}


def names_of(tree):
    """All that the tree knows, by names and objects."""
    return [
        (
            node.module,
            type(node.module),
            [(name, id(tree.parameters[i])) for name, i in node.parameters],
            [(name, id(tree.buffers[i])) for name, i in node.buffers],
            [(name, id(tree.nodes[i].module)) for name, i in node.children],
            list(node.absent),
            list(node.holders),
            node.compiled,
        )
        for node in tree.nodes
    ]


@pytest.mark.parametrize("change", CHANGES)
def test_a_tree_is_no_longer_current_after_a_change(change):
    net = Net()
    tree = ModuleTree(net)
    before = names_of(tree)
    assert tree.is_current()
    CHANGES[change](net)
    assert not tree.is_current()
    assert names_of(ModuleTree(net)) != before


def put_back(net):
    first = net.first
    net.first = nn.Linear(3, 3)
    net.first = first


HARMLESS = {
    "nothing": lambda net: None,
    "modes": lambda net: net.eval(),
    "values": lambda net: net.first.weight.data.fill_(2.0),
    "values elsewhere": lambda net: setattr(net.first.weight, "data", torch.ones(3, 3)),
    "frozen": lambda net: net.first.requires_grad_(False),
    "attributes": lambda net: setattr(net, "scale", 2.0),
    "a function": lambda net: setattr(net, "activation", torch.relu),
    "hooks": lambda net: net.first.register_forward_hook(lambda *_: None),
    "put back": put_back,
}


@pytest.mark.parametrize("change", HARMLESS)
def test_a_tree_stays_current_where_it_would_be_read_the_same(change):
    net = Net()
    tree = ModuleTree(net)
    before = names_of(tree)
    HARMLESS[change](net)
    assert tree.is_current()
    assert names_of(ModuleTree(net)) == before


@pytest.mark.parametrize("change", ["module.compile()", "a layer is compiled", "a bound method", "a script"])
def test_some_trees_are_never_current(change):
    net = Net()
    CHANGES[change](net)
    assert not ModuleTree(net).is_current()


def test_a_tree_of_no_tensors_and_of_one_module():
    for net in (nn.ReLU(), nn.Sequential(), nn.Linear(2, 2)):
        tree = ModuleTree(net)
        assert tree.is_current()
        net.add_module("late", nn.ReLU())
        assert not tree.is_current()


def test_tensors_are_parameters_and_buffers():
    linear, norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
    found = list(map(id, tensors_of(nn.Sequential(linear, norm, linear))))
    assert found == list(map(id, [*linear.parameters(), *norm.parameters(), *norm.buffers()]))
