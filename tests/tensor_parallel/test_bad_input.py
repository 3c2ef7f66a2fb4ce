"""Arguments and inputs that cannot work are refused by name, before anything is computed or moved."""

import pytest
import torch
from fakes.nets import cpu
from torch import nn

from mgpu_core import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear


def x(*shape):
    return torch.ones(*shape, device=cpu(1)[0])


def parts(*counts):
    return [torch.ones(2, count, device=device) for count, device in zip(counts, cpu(len(counts)), strict=True)]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ColumnParallelLinear(8, 2, cpu(3)), ValueError, "out_features must be at least .* 2 for 3 ranks"),
        (lambda: RowParallelLinear(2, 8, cpu(3)), ValueError, "in_features must be at least .* 2 for 3 ranks"),
        (lambda: ParallelEmbedding(2, 8, cpu(3)), ValueError, "num_embeddings must be at least .* 2 for 3 ranks"),
        (lambda: RowParallelLinear(8, 8, []), ValueError, "device_ids is empty"),
        (lambda: RowParallelLinear(8, 8, ["cuda:99"]), ValueError, "cuda:99 does not exist"),
        (lambda: RowParallelLinear(8, 8, [1.5]), TypeError, "a device is an int"),
        (lambda: ColumnParallelLinear.from_linear(nn.ReLU(), cpu(2)), TypeError, "nn.Linear, not ReLU"),
        (lambda: RowParallelLinear.from_linear(nn.Embedding(4, 4), cpu(2)), TypeError, "nn.Linear, not Embedding"),
        (lambda: ParallelEmbedding.from_embedding(nn.Linear(4, 4), cpu(2)), TypeError, "nn.Embedding, not Linear"),
        (lambda: RowParallelLinear.from_linear(nn.LazyLinear(4), cpu(2)), ValueError, "uninitialized"),
        (lambda: ParallelEmbedding.from_embedding(nn.Embedding(4, 4, max_norm=1.0), cpu(2)), ValueError, "max_norm"),
        (lambda: ParallelEmbedding.from_embedding(nn.Embedding(4, 4, sparse=True), cpu(2)), ValueError, "sparse"),
    ],
)
def test_layers_that_cannot_be_made(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("layer", "value", "error", "message"),
    [
        (lambda: ColumnParallelLinear(4, 6, cpu(2)), lambda: x(2, 5), ValueError, r"of input must be 4, .*\(2, 5\)"),
        (lambda: ColumnParallelLinear(4, 6, cpu(2)), lambda: x(4)[0], ValueError, "of input must be 4"),
        (lambda: ColumnParallelLinear(4, 6, cpu(2)), lambda: parts(2, 2), TypeError, "input must be a tensor, not li"),
        (lambda: RowParallelLinear(4, 6, cpu(2)), lambda: x(2, 5), ValueError, "of input must be 4"),
        (lambda: RowParallelLinear(4, 6, cpu(2)), lambda: parts(2, 2), TypeError, "input must be a tensor, not list"),
        (lambda: RowParallelLinear(4, 6, cpu(2), True, True), lambda: x(2, 4), TypeError, "not a tensor"),
        (lambda: RowParallelLinear(4, 6, cpu(2), True, True), lambda: parts(4), ValueError, "2 ranks, 1 tensors"),
        (lambda: RowParallelLinear(4, 6, cpu(2), True, True), lambda: parts(3, 1), ValueError, r"input\[0\] must be 2"),
        (lambda: ParallelEmbedding(4, 6, cpu(2)), lambda: x(2), TypeError, "int32 or int64 tensor, not torch.float32"),
        (lambda: ParallelEmbedding(4, 6, cpu(2)), lambda: [1, 2], TypeError, r"int32 or int64 tensor, not \[1, 2\]"),
    ],
)
def test_inputs_that_do_not_fit(layer, value, error, message):
    with pytest.raises(error, match=message):
        layer()(value())


def test_a_part_on_another_device():
    layer = RowParallelLinear(4, 6, cpu(2), input_is_parallel=True)
    with pytest.raises(ValueError, match=r"input\[1\] must be on .*, but is on meta"):
        layer([parts(2)[0], torch.ones(2, 2, device="meta")])


@pytest.mark.parametrize("token", [-1, 10, 11])
def test_a_token_outside_the_vocabulary(ranks, token):
    layer = ParallelEmbedding(10, 2, cpu(ranks))
    with pytest.raises(IndexError):
        layer(torch.tensor([0, token], device=cpu(1)[0]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: ColumnParallelLinear(4, 6, cpu(2)),
        lambda: RowParallelLinear(4, 6, cpu(2)),
        lambda: ParallelEmbedding(4, 6, cpu(2)),
    ],
)
def test_a_move_is_refused_and_a_dtype_is_changed(make):
    layer = make()
    net = nn.Sequential(nn.ReLU(), layer)
    for move in (layer.to, net.to, lambda device: net.to_empty(device=device)):
        with pytest.raises(RuntimeError, match="several devices"):
            move("meta")
    assert {each.dtype for each in net.double().parameters()} == {torch.float64}
    assert [each.device for each in layer.weights] == [torch.device(device) for device in cpu(2)]
