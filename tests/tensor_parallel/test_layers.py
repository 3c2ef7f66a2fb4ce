"""Layers that are cut over ranks compute what the plain layers do: outputs, gradients, checkpoints, initial values."""

import copy
import pickle

import pytest
import torch
from fakes.nets import chunks, cpu, whole
from torch import nn

from mgpu_core import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear

LINEARS = pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
WITH_BIAS = pytest.mark.parametrize("bias", [True, False])


def first():
    return torch.device(cpu(1)[0])


def plain_linear(bias=True, in_features=11, out_features=9):
    """A float64 layer of small whole numbers on the first device, so that all results are exact."""
    return whole(nn.Linear(in_features, out_features, bias, dtype=torch.float64)).to(first())


def numbers(*shape):
    count = torch.Size(shape).numel()
    values = (torch.arange(float(count), dtype=torch.float64, device=first()) * 7 % 11 - 5).reshape(shape)
    return values.requires_grad_()


def run(layer, x):
    """Return the output, and run backward from whole numbers."""
    output = layer(x)
    output.backward(numbers(*output.shape).detach())
    return output


def gradient_of(shards, dim):
    return torch.cat([shard.grad.cpu() for shard in shards], dim)


def same(one, other):
    return torch.equal(one.detach().cpu(), other.detach().cpu())


@WITH_BIAS
def test_a_column_layer_is_the_plain_layer(ranks, bias):
    plain, x, mine = plain_linear(bias), numbers(4, 3, 11), numbers(4, 3, 11)
    layer = ColumnParallelLinear.from_linear(plain, cpu(ranks))
    wanted, output = run(plain, x), run(layer, mine)
    assert output.device == first()
    assert same(output, wanted)
    assert same(mine.grad, x.grad)
    assert same(gradient_of(layer.weights, 0), plain.weight.grad)
    assert layer.biases is None if plain.bias is None else same(gradient_of(layer.biases, 0), plain.bias.grad)
    assert [tuple(shard.shape) for shard in layer.weights] == [(count, 11) for count in chunks(9, ranks)]
    assert [shard.device for shard in layer.weights] == [torch.device(device) for device in cpu(ranks)]


@WITH_BIAS
def test_a_row_layer_is_the_plain_layer(ranks, bias):
    plain, x, mine = plain_linear(bias), numbers(4, 3, 11), numbers(4, 3, 11)
    layer = RowParallelLinear.from_linear(plain, cpu(ranks))
    wanted, output = run(plain, x), run(layer, mine)
    assert output.device == first()
    assert same(output, wanted)
    assert same(mine.grad, x.grad)
    assert same(gradient_of(layer.weights, 1), plain.weight.grad)
    assert layer.bias is None if plain.bias is None else same(layer.bias.grad, plain.bias.grad)
    assert [tuple(shard.shape) for shard in layer.weights] == [(9, count) for count in chunks(11, ranks)]


class Mlp(nn.Module):
    def __init__(self, up, down):
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x):
        hidden = self.up(x)
        return self.down([part.tanh() for part in hidden] if isinstance(hidden, list) else hidden.tanh())


def test_a_column_and_a_row_layer_are_two_plain_layers(ranks):
    torch.manual_seed(1)
    plain = Mlp(nn.Linear(5, 10, dtype=torch.float64), nn.Linear(10, 3, dtype=torch.float64)).to(first())
    cut = Mlp(
        ColumnParallelLinear.from_linear(plain.up, cpu(ranks), gather_output=False),
        RowParallelLinear.from_linear(plain.down, cpu(ranks), input_is_parallel=True),
    )
    x, mine = numbers(6, 5), numbers(6, 5)
    hidden = cut.up(mine)
    assert [tuple(part.shape) for part in hidden] == [(6, count) for count in chunks(10, ranks)]
    wanted, output = run(plain, x), run(cut, mine)
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(output, wanted, **close)
    torch.testing.assert_close(mine.grad, x.grad, **close)
    torch.testing.assert_close(gradient_of(cut.up.weights, 0), plain.up.weight.grad.cpu(), **close)
    torch.testing.assert_close(gradient_of(cut.down.weights, 1), plain.down.weight.grad.cpu(), **close)


@pytest.mark.parametrize("padding_idx", [None, 0, 4, -1])
def test_an_embedding_is_the_plain_embedding(ranks, padding_idx):
    plain = whole(nn.Embedding(10, 3, padding_idx, dtype=torch.float64)).to(first())
    layer = ParallelEmbedding.from_embedding(plain, cpu(ranks))
    tokens = torch.tensor([[0, 9, 4], [4, 5, 9]], device=first(), dtype=torch.int32)
    wanted, output = run(plain, tokens), run(layer, tokens)
    assert output.device == first()
    assert same(output, wanted)
    assert same(gradient_of(layer.weights, 0), plain.weight.grad)


def test_second_derivatives():
    up = ColumnParallelLinear.from_linear(plain_linear(in_features=2, out_features=3), cpu(2), gather_output=False)
    down = RowParallelLinear.from_linear(plain_linear(in_features=3, out_features=2), cpu(2), input_is_parallel=True)
    assert torch.autograd.gradgradcheck(lambda x: down([part**2 for part in up(x)]) ** 2, numbers(2, 2))


@LINEARS
def test_a_linear_layer_starts_as_the_plain_one_and_becomes_one(kind):
    torch.manual_seed(3)
    plain = nn.Linear(7, 5)
    torch.manual_seed(3)
    layer = kind(7, 5, cpu(3))
    back = layer.to_linear()
    assert type(back) is nn.Linear
    assert (back.in_features, back.out_features) == (7, 5)
    assert back.weight.device == first()
    assert same(back.weight, plain.weight)
    assert same(back.bias, plain.bias)
    with torch.no_grad():
        back.bias.fill_(9)
        back.weight.fill_(9)
    assert same(layer.to_linear().bias, plain.bias)
    assert kind(7, 5, cpu(3), bias=False).to_linear().bias is None


def test_an_embedding_starts_as_the_plain_one_and_becomes_one():
    torch.manual_seed(3)
    plain = nn.Embedding(7, 5, padding_idx=6)
    torch.manual_seed(3)
    back = ParallelEmbedding(7, 5, cpu(3), padding_idx=6).to_embedding()
    assert type(back) is nn.Embedding
    assert same(back.weight, plain.weight)
    assert back.padding_idx == 6
    assert back.weight[6].tolist() == [0.0] * 5


def test_the_plain_layer_keeps_its_own_memory_and_frozen_parameters_stay_frozen():
    plain = plain_linear()
    plain.weight.requires_grad_(False)
    layer = ColumnParallelLinear.from_linear(plain, cpu(2))
    assert [each.requires_grad for each in layer.parameters()] == [False, False, True, True]
    with torch.no_grad():
        plain.weight.zero_()
    assert layer.to_linear().weight.count_nonzero() > 0
    assert not layer.to_linear().weight.requires_grad


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: ColumnParallelLinear(4, 4, cpu(2)), ["weights.0", "weights.1", "biases.0", "biases.1"]),
        (lambda: RowParallelLinear(4, 4, cpu(2)), ["bias", "weights.0", "weights.1"]),
        (lambda: ParallelEmbedding(4, 4, cpu(2)), ["weights.0", "weights.1"]),
    ],
)
def test_checkpoints_copies_and_pickles(make, names):
    layer, other = make(), make()
    assert list(layer.state_dict()) == names
    other.load_state_dict(layer.state_dict())
    for each in (other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert all(same(one, two) for one, two in zip(each.parameters(), layer.parameters(), strict=True))
        assert [shard.device for shard in each.weights] == [torch.device(device) for device in cpu(2)]


def test_an_optimizer_trains_the_shards():
    plain, steps = plain_linear(), []
    layer = RowParallelLinear.from_linear(plain, cpu(3))
    for net in (plain, layer):
        run(net, numbers(4, 11))
        torch.optim.SGD(net.parameters(), lr=0.5).step()
        steps.append(net if net is plain else net.to_linear())
    assert same(steps[0].weight, steps[1].weight)
    assert same(steps[0].bias, steps[1].bias)


def test_as_many_features_as_ranks():
    assert [len(shard) for shard in ParallelEmbedding(3, 2, cpu(3)).weights] == [1, 1, 1]


def test_no_rows_and_no_graph():
    with torch.no_grad():
        assert ColumnParallelLinear(4, 6, cpu(3))(torch.ones(0, 4, device=first())).shape == (0, 6)
        assert RowParallelLinear(4, 6, cpu(3))(torch.ones(0, 4, device=first())).shape == (0, 6)
        assert RowParallelLinear(4, 6, cpu(3))(torch.ones(4, device=first())).shape == (6,)
        assert not ColumnParallelLinear(4, 6, cpu(3))(torch.ones(2, 4, device=first())).requires_grad


@LINEARS
def test_an_input_on_another_device_is_copied_and_its_gradient_comes_back(kind):
    x = numbers(2, 11).detach().cpu().requires_grad_()
    assert run(kind.from_linear(plain_linear(), cpu(3)), x).device == first()
    plain = plain_linear().cpu()
    assert same(x.grad, numbers(2, 9).detach().cpu() @ plain.weight)


@LINEARS
def test_autocast_gives_the_dtype_of_the_plain_layer(kind):
    with torch.autocast(first().type, torch.bfloat16):
        assert kind(4, 6, cpu(2))(torch.ones(2, 4, device=first())).dtype is torch.bfloat16


def test_the_text_says_sizes_and_devices():
    names = ", ".join(str(torch.device(device)) for device in cpu(2))
    sizes = f"in_features=4, out_features=6, bias=True, device_ids=[{names}]"
    assert ColumnParallelLinear(4, 6, cpu(2)).extra_repr() == f"{sizes}, gather_output=True"
    assert RowParallelLinear(4, 6, cpu(2)).extra_repr() == f"{sizes}, input_is_parallel=False"
    assert ParallelEmbedding(4, 6, cpu(2), 1).extra_repr() == f"4, 6, padding_idx=1, device_ids=[{names}]"
