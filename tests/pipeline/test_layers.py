"""Which modules are layers, and where a cut by bytes lies."""

import pytest
from torch import nn

from mgpu_core.pipeline.layers import cut_by_bytes, in_order, largest_block, layers_of, least_cut


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.Tanh())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = Body(), nn.Linear(4, 4)


def names(net, *args):
    return [name for name, _ in layers_of(net, *args)]


def test_without_a_size_lists_at_the_root_are_opened():
    assert names(Model()) == ["body", "head"]
    assert names(nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.Tanh()), nn.Tanh())) == ["0.0", "0.1", "1"]


def test_a_module_that_holds_a_list_is_opened_if_it_is_large():
    blocks = ["body.blocks.0", "body.blocks.1", "body.blocks.2"]
    assert names(Model(), (), 100) == ["body.embed", *blocks, "head"]
    inner = [f"{block}.mlp.{index}" for block in blocks for index in (0, 1)]
    assert names(Model(), (), 10) == ["body.embed", *inner, "head"]


class Stage(nn.Module):
    """Blocks under names of their own, in no list, as some nets of timm have them."""

    def __init__(self):
        super().__init__()
        self.b1, self.b2 = nn.Bilinear(4, 4, 4), nn.Linear(4, 4)


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.stem, self.model.s1, self.model.s2 = nn.Linear(4, 4), Stage(), Stage()


def test_without_any_list_what_has_more_than_a_fair_share_is_opened():
    net = Wrapped()
    assert names(net, (), largest_block(net, 2)) == ["model.stem", "model.s1", "model.s2"]
    inner = ["model.s1.b1", "model.s1.b2", "model.s2.b1", "model.s2.b2"]
    assert names(net, (), largest_block(net, 3)) == ["model.stem", *inner]


def test_modules_around_a_name_are_opened():
    assert names(Model(), ["body.blocks.1"])[:2] == ["body.embed", "body.blocks.0"]
    assert "body.blocks.1.mlp" in names(Model(), ["body.blocks.1.mlp"])


def test_classes_that_a_model_does_not_want_split_are_layers():
    net = Model()
    net._no_split_modules = ["Block"]
    assert names(net, (), 10) == ["body.embed", "body.blocks.0", "body.blocks.1", "body.blocks.2", "head"]


def test_a_layer_of_two_names_counts_once():
    shared = nn.Linear(2, 2)
    assert names(nn.Sequential(shared, nn.Tanh(), shared)) == ["0", "1"]


def test_layers_come_in_the_order_of_their_calls_and_others_after_the_one_before():
    layers = [(name, nn.Identity()) for name in "abcd"]
    assert [name for name, _ in in_order(layers, "cab")] == ["c", "d", "a", "b"]
    assert [name for name, _ in in_order(layers, "")] == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("costs", "shares", "cut"),
    [([1, 1, 1, 1], [1, 1], [2]), ([4, 1, 1, 1, 1, 4], [1, 1, 1], [1, 5]), ([1, 1, 1], [2, 1], [2]), ([5], [1], [])],
)
def test_the_least_cut(costs, shares, cut):
    assert least_cut(costs, shares) == cut


def test_limits_are_kept_and_what_cannot_be_is_refused():
    assert least_cut([1, 1, 1, 1], [1, 1], [1, 1, 1, 1], [3, 1]) == [3]
    with pytest.raises(ValueError, match=r"no cut into 2 parts keeps to memory=\[1, 1\]: the 4 layers have 4 bytes"):
        least_cut([1, 1, 1, 1], [1, 1], [1, 1, 1, 1], [1, 1])
    with pytest.raises(ValueError, match="2 numbers"):
        least_cut([1, 1], [1, 1], [1, 1], [1])


def test_no_part_begins_with_a_layer_that_writes_its_input():
    layers = layers_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 2)))
    assert cut_by_bytes(layers, [1, 1], None) == ["2"]
    barred = layers_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True)))
    assert cut_by_bytes(barred, [1, 1], None) == ["1"]


def test_a_tied_tensor_counts_for_its_first_layer():
    net = nn.Sequential(nn.Linear(8, 8, bias=False), *(nn.Linear(8, 4) for _ in range(2)), nn.Linear(8, 8, bias=False))
    net[3].weight = net[0].weight
    assert cut_by_bytes(layers_of(net), [1, 1], None) == ["1"]


def test_a_fair_share_has_four_blocks():
    assert largest_block(nn.Linear(8, 8, bias=False), 2) == 8 * 8 * 4 / 2 / 4
