"""``place`` spreads a module over devices, and ``balance`` finds where to cut it; both leave the numbers alone."""

import copy
import itertools
import pickle
import threading
import time
import warnings

import pytest
import torch
from fakes.nets import cpu
from fakes.stacks import STACKS, Gpt, Mlp, loss_fn, resnet
from torch import nn

from mgpu_core import Pipeline, balance, place
from mgpu_core.pipeline.balance import BalanceTable, Part


def where(net):
    return {name: str(each.device) for name, each in itertools.chain(net.named_parameters(), net.named_buffers())}


def run(net, x, target):
    output = net(x)
    first = output["logits"] if isinstance(output, dict) else output
    loss_fn(output, target.to(first.device)).backward()
    return first.cpu(), {name: each.grad.cpu() for name, each in net.named_parameters()}


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("name", ["mlp", "lstm", "gpt"])
def test_outputs_and_gradients_are_those_of_the_whole_net(name, parts):
    stack = STACKS[name]
    net = stack.net()
    whole, first = copy.deepcopy(net).to(cpu(1)[0]), cpu(1)[0]
    before = [id(each) for each in net.parameters()]
    assert place(net, cpu(parts), stack.points(parts)) is net
    assert [id(each) for each in net.parameters()] == before
    x, target = stack.x.to(first), stack.target.to(first)
    output, grads = run(net, x, target)
    wanted, wanted_grads = run(whole, x, target)
    assert torch.equal(output, wanted)
    assert list(grads) == list(wanted_grads)
    assert all(torch.allclose(grads[each], wanted_grads[each], rtol=1e-12, atol=1e-15) for each in grads)


@pytest.mark.parametrize("split", [["layer2.1", "layer4"], {"layer2.1": 1, "layer4": 2, "fc": 0}])
def test_names_and_dicts_say_which_layer_is_where(split):
    net, devices = resnet(), cpu(3)
    place(net, devices, split)
    placed = where(net)
    assert (
        placed["conv1.weight"] == placed["layer1.0.conv1.weight"] == placed["layer2.0.bn1.running_mean"] == devices[0]
    )
    assert placed["layer2.1.conv1.weight"] == placed["layer3.1.bn2.running_var"] == devices[1]
    assert placed["layer4.0.conv1.weight"] == devices[2]
    assert placed["fc.weight"] == devices[0 if "fc" in split else 2]


def test_without_a_split_parts_have_about_as_many_bytes():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 64), nn.Linear(64, 4))
    devices = cpu(2)
    place(net, devices)
    assert [where(net)[f"{index}.weight"] for index in range(4)] == [*[devices[0]] * 3, devices[1]]


def test_a_tied_parameter_stays_one_and_is_where_it_is_used_first():
    net = place(Gpt().double(), cpu(2), ["blocks.2"])
    assert net.head.weight is net.tokens.weight
    assert where(net)["tokens.weight"] == cpu(2)[0]
    assert where(net)["blocks.2.linear1.weight"] == cpu(2)[1]
    net(STACKS["gpt"].x.to(cpu(1)[0]))
    assert net.head.weight is net.tokens.weight


def test_parameters_around_layers_go_with_the_first_of_these():
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift, self.linear = nn.Parameter(torch.ones(2)), nn.Linear(2, 2)

        def forward(self, x):
            return self.linear(x) + self.shift

    net = nn.Sequential(nn.Linear(2, 2), Shifted())
    place(net, cpu(2), {"1.linear": 1})
    assert where(net)["1.shift"] == cpu(2)[1]
    assert str(net(torch.ones(1, 2, device=cpu(1)[0])).device) == cpu(1)[0]


def test_a_layer_that_fails_gives_shared_parameters_back():
    net = place(Gpt().double(), cpu(2), ["head"])
    with pytest.raises(RuntimeError):
        net.head(torch.ones(2, 3, dtype=torch.float64, device=cpu(2)[1]))
    assert net.head.weight is net.tokens.weight


def test_keyword_arguments_and_none_cross():
    class Add(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.ones(1))

        def forward(self, x, *, others, mask=None):
            return {"sum": x + others[0] + self.bias, "mask": mask}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = Add(), Add()

        def forward(self, x):
            found = self.first(x, others=(x, None))
            return self.last(found["sum"], others=[x], mask=found["mask"])

    first, last = cpu(2)
    net = place(Net(), cpu(2), {"last": 1})
    output = net(torch.tensor([1.0, 2.0], device=last))
    assert str(net.first.bias.device) == first
    assert output["mask"] is None
    assert str(output["sum"].device) == last
    assert output["sum"].tolist() == [5.0, 8.0]


def test_moves_are_refused_by_name_and_dtypes_are_not():
    net = place(Mlp(), cpu(2), ["4"])
    for move in (net.to, net.cuda, net.cpu):
        with pytest.raises(RuntimeError, match=r"to\(\), cuda\(\) and cpu\(\)"):
            move("cpu")
    net.double()
    assert {each.dtype for each in net.parameters()} == {torch.float64}


def test_copies_and_pickles_work():
    x = torch.ones(2, 6, device=cpu(1)[0])
    net = place(Mlp(), cpu(2), ["4"])
    wanted = net(x)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(other(x), wanted)
        other[0].weight.data.zero_()
    assert torch.equal(net(x), wanted)


def test_all_that_a_layer_shares_is_brought_and_given_back():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    for layer, other in zip(net[2], net, strict=False):
        layer.weight, layer.bias = other.weight, other.bias
    x = torch.ones(1, 2, device=cpu(1)[0])
    wanted = copy.deepcopy(net).to(x.device)(x)
    assert torch.equal(place(net, cpu(2), ["2"])(x), wanted)
    assert [*map(id, net[2].parameters())] == [*map(id, net[:2].parameters())]


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (["2"], "3 devices need 2 names"),
        (["2", "lost"], "'lost', which is no module of Mlp"),
        ({"2": 3}, "0 to 2, not 3"),
        ({"2": True}, "not True"),
    ],
)
def test_splits_that_cannot_be(split, message):
    net = Mlp()
    before = where(net)
    with pytest.raises(ValueError, match=message):
        place(net, cpu(3), split)
    assert where(net) == before


def test_a_second_placement_and_too_many_devices_are_refused():
    with pytest.raises(ValueError, match="already"):
        place(place(Mlp(), cpu(2)), cpu(2))
    with pytest.raises(ValueError, match="already"):
        place(Pipeline(Mlp(), cpu(2)), cpu(2))
    with pytest.raises(ValueError, match="3 parts are more than the 2 layers"):
        place(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), cpu(3))


@pytest.mark.skipif(cpu(2)[0] == cpu(2)[1], reason="CPU ranks are one device")
def test_a_buffer_of_two_devices_is_refused():
    net = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    net[1].running_var = net[0].running_var
    with pytest.raises(ValueError, match="running_var"):
        place(net, cpu(2), ["1"])


class Slow(nn.Module):
    """A layer that takes some milliseconds."""

    def __init__(self, milliseconds):
        super().__init__()
        self.milliseconds = milliseconds

    def forward(self, x):
        time.sleep(self.milliseconds / 1e3)
        return x * 1.0


def test_balance_by_time_finds_the_slow_layer():
    net = nn.Sequential(*map(Slow, (1, 1, 1, 40)))
    split, table = balance(net, torch.ones(2, 2, device=cpu(1)[0]), 2)
    assert split == ["3"]
    assert [part.layers for part in table.parts] == [("0", "1", "2"), ("3",)]
    assert table.worst == 1


def test_balance_by_memory_counts_parameters_and_what_autograd_keeps():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(2, 64)).to(cpu(1)[0])
    split, table = balance(net, torch.ones(3, 4, device=cpu(1)[0]), 2, by="memory")
    # float32: 20 numbers and 3 x 4 inputs, 10 and 3 x 4, 192 and 3 x 2
    assert [part.nbytes for part in table.parts] == [4 * (20 + 12 + 10 + 12), 4 * (192 + 6)]
    assert split == ["2"]


def test_a_table_names_the_largest_part_and_the_cuts_next_to_it():
    layers = [Part((name,), 0.0, nbytes * 2**20) for name, nbytes in zip("abcde", [3, 1, 2, 4, 1], strict=True)]
    table = BalanceTable(layers, [2, 3], "memory")
    assert [part.nbytes / 2**20 for part in table.parts] == [4, 2, 5]
    assert table.worst == 2
    assert [(layer, part, cost / 2**20) for layer, part, cost in table.moves] == [("b", 1, 5), ("d", 1, 6)]
    text = str(table)
    assert "5 MiB; equal parts would take 3.667 MiB each" in text
    assert "with b in part 1: 5 MiB" in text
    assert "2*" in text


def test_balance_measures_each_layer_with_what_the_layers_before_have_filled():
    class Cache:
        def __init__(self):
            self.kept = []

    class Kept(nn.Linear):
        def forward(self, x, cache, losses):
            assert len(losses) == len(cache.kept)
            x = super().forward(x) + sum(cache.kept)
            cache.kept.append(x)
            losses.append(x.sum())
            return x

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Kept(2, 2) for _ in range(4))

        def forward(self, x, cache=None):
            cache, losses = Cache() if cache is None else cache, []
            for layer in self.layers:
                x = layer(x, cache, losses)
            return x + sum(losses)

    cache, x = Cache(), torch.ones(3, 2, device=cpu(1)[0])
    net = Net().to(x.device)
    assert len(balance(net, x, 2).split) == 1
    assert len(balance(net, (x, cache), 2).split) == 1
    assert cache.kept == []


def test_balance_leaves_the_net_as_it_was():
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.BatchNorm1d(3), nn.Dropout(0.5)).to(cpu(1)[0])
    before = copy.deepcopy(net.state_dict())
    state = torch.get_rng_state()
    balance(net, torch.ones(4, 3, device=cpu(1)[0]), 2)
    after = net.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(each.grad is None for each in net.parameters())
    assert not any(each._forward_pre_hooks for each in net.modules())


def test_a_pipeline_with_a_sample_is_cut_by_time():
    net = nn.Sequential(*map(Slow, (40, 1, 1, 1)))
    x = torch.ones(2, 2, device=cpu(1)[0])
    assert Pipeline(net, cpu(2), sample=x, chunks=2).split_points == ["1"]
    assert Pipeline(nn.Sequential(*map(Slow, (0, 0, 0, 0))), cpu(4), chunks=2).split_points == ["1", "2", "3"]


def test_a_placement_with_a_sample_is_cut_by_time():
    x = torch.ones(2, 2, device=cpu(1)[0])
    net = place(nn.Sequential(*map(Slow, (40, 1, 1, 1))), cpu(2), sample=x)
    assert [str(layer(x).device) for layer in net] == [cpu(2)[0], *[cpu(2)[1]] * 3]


@pytest.mark.parametrize("cut", [place, lambda net, ids, split: Pipeline(net, ids, split_points=split)])
def test_a_parameter_without_a_shape_is_refused(cut):
    with pytest.raises(ValueError, match="uninitialized parameter"):
        cut(nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 2)), cpu(2), ["1"])


@pytest.mark.parametrize(("options", "message"), [({"by": "luck"}, "time or memory"), ({"parts": 9}, "9 parts")])
def test_balances_that_cannot_be(options, message):
    x = torch.ones(1, 6, device=cpu(1)[0])
    with pytest.raises(ValueError, match=message):
        balance(Mlp().to(cpu(1)[0]), x, **{"parts": 2, **options})


class Interrupted(nn.Module):
    """Ends a call as Ctrl-C does, if it is told to."""

    def __init__(self):
        super().__init__()
        self.linear, self.error = nn.Linear(6, 6), None

    def forward(self, x):
        if self.error is not None:
            raise self.error
        return self.linear(x)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), KeyError("lost")])
def test_a_call_that_is_cut_off_leaves_nothing_behind(error):
    layer, x = Interrupted(), torch.ones(2, 6, device=cpu(1)[0])
    net = nn.Sequential(nn.Linear(6, 6), layer, nn.Linear(6, 6))
    net[2].weight = net[0].weight
    place(net, cpu(2), ["1"])
    modes, tied, wanted = torch._C._len_torch_function_stack(), net[2].weight, net(x)
    layer.error = error
    with pytest.raises(type(error)):
        net(x)
    assert torch._C._len_torch_function_stack() == modes
    assert net[2].weight is tied
    layer.error = None
    found = []
    thread = threading.Thread(target=lambda: found.append(net(x).detach()))
    thread.start()
    thread.join(60)
    assert torch.equal(found[0], wanted)
    assert torch.equal(net(x), wanted)


def test_threads_that_call_a_placed_net_at_once_take_turns():
    inside, most = [], []

    class Busy(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x):
            inside.append(id(self))
            most.append(inside.count(id(self)))
            time.sleep(0.01)
            inside.remove(id(self))
            return self.linear(x)

    net, x = nn.Sequential(Busy(), Busy()), torch.ones(1, 2, device=cpu(1)[0])
    place(net, cpu(2), ["1"])
    wanted, found = net(x), []
    threads = [threading.Thread(target=lambda: found.append(net(x).detach())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert max(most) == 1
    assert all(torch.equal(each, wanted) for each in found)
    assert len(found) == 4


def test_code_between_layers_may_mix_tensors_of_two_devices():
    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(2, 2), nn.Linear(4, 2)
            self.scale, self.mask = nn.Parameter(torch.full((2,), 3.0)), nn.Parameter(torch.ones(2))

        def forward(self, x):
            early = self.first(x * self.mask)
            late = self.last(torch.cat([early, early], 1))
            late += early
            return late * self.scale + x

    net = Mixing()
    whole, x = copy.deepcopy(net).to(cpu(1)[0]), torch.ones(3, 2, device=cpu(1)[0])
    place(net, cpu(2), ["last"])
    output, wanted = net(x), whole(x)
    assert torch.allclose(output.cpu(), wanted.cpu())
    output.sum().backward()
    wanted.sum().backward()
    for own, each in zip(net.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(own.grad.cpu(), each.grad.cpu())


def test_a_placed_net_keeps_parameters_gradients_and_attributes():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).cpu()
    net(torch.ones(1, 2, device="cpu")).sum().backward()
    net[1].weight.mine = "kept"
    before = [(id(each), each.grad.clone()) for each in net.parameters()]
    place(net, cpu(2), ["1"])
    for (number, grad), each in zip(before, net.parameters(), strict=True):
        assert id(each) == number
        assert each.is_leaf
        assert each.grad.device == each.device
        assert torch.equal(each.grad.cpu(), grad)
    assert net[1].weight.mine == "kept"


def test_layers_that_are_replaced_or_wrapped_belong_to_the_part_of_their_name():
    net, x = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(1, 2, device=cpu(1)[0])
    place(net, cpu(2), ["1"])
    net[2] = nn.Sequential(net[2], nn.Linear(2, 2))
    net[0] = nn.Linear(2, 2)
    net(x)
    assert [str(net[index].weight.device) for index in (0, 1)] == cpu(2)
    assert {str(each.device) for each in net[2].parameters()} == {cpu(2)[1]}


def test_shares_and_memory_move_the_cut():
    layers = [nn.Linear(4, 4, bias=False) for _ in range(6)]
    net = place(nn.Sequential(*layers), cpu(2), shares=[2, 1])
    assert [net.forward.placement.stage_of(each.weight) for each in layers] == [0, 0, 0, 0, 1, 1]
    layers = [nn.Linear(4, 4, bias=False) for _ in range(6)]
    net = place(nn.Sequential(*layers), cpu(2), memory=[64, 1e9])
    assert [net.forward.placement.stage_of(each.weight) for each in layers] == [0, 1, 1, 1, 1, 1]
    with pytest.raises(ValueError, match="split says where to cut"):
        place(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), cpu(2), ["1"], shares=[1, 1])


class CalledFirst(nn.Module):
    """Registers last what it calls first."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.embedding = nn.Linear(4, 4)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x


def stages_of(net):
    return [net.forward.placement.stage_of(each.weight) for each in (net.embedding, *net.blocks)]


@pytest.mark.parametrize("split", [None, ["blocks.2"]])
def test_a_first_call_without_gradients_shows_the_order(split, recwarn):
    net = CalledFirst()
    x, alone = torch.rand(3, 4, device=cpu(1)[0]), copy.deepcopy(net).to(cpu(1)[0])
    net = place(net, cpu(2), split)
    parameters = list(net.parameters())
    assert stages_of(net)[0] == 1
    with torch.no_grad():
        assert torch.equal(net(x).cpu(), alone(x).cpu())
    assert stages_of(net) == [0, 0, 0, 1, 1, 1]
    assert all(one is other for one, other in zip(net.parameters(), parameters, strict=True))
    assert torch.equal(net(x).cpu(), alone(x).cpu())
    assert not recwarn.list


def test_no_parameter_moves_while_a_graph_may_hold_it():
    net = CalledFirst()
    x, alone = torch.rand(3, 4, device=cpu(1)[0]), copy.deepcopy(net).to(cpu(1)[0])
    net = place(net, cpu(2))
    before = stages_of(net)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        output = net(x)
    moves = torch.device(cpu(2)[0]) != torch.device(cpu(2)[1])
    assert stages_of(net) == (before if moves else [0, 0, 0, 1, 1, 1])
    assert [str(each.message) for each in caught if "were called after a later stage" in str(each.message)] == (
        [str(each.message) for each in caught] if moves else []
    )
    assert len(caught) == moves
    output.sum().backward()
    alone(x).sum().backward()
    assert all(
        torch.equal(one.grad.cpu(), other.grad.cpu())
        for one, other in zip(net.parameters(), alone.parameters(), strict=True)
    )


def test_threads_may_make_the_first_call_of_a_copy():
    net = place(CalledFirst(), cpu(2))
    x = torch.rand(3, 4, device=cpu(1)[0])
    for _ in range(10):
        copied, found = copy.deepcopy(net), [None] * 4

        def call(index, copied=copied, found=found):
            with torch.no_grad():
                found[index] = copied(x)

        threads = [threading.Thread(target=call, args=(index,)) for index in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        with torch.no_grad():
            assert all(torch.equal(each.cpu(), net(x).cpu()) for each in found)
