"""A net that is cut over devices computes what the whole net does: outputs and gradients, in an ordinary loop."""

import copy
import pickle
import threading

import pytest
import torch
from fakes.nets import cpu
from fakes.stacks import STACKS, Gpt, Mlp, loss_fn, resnet
from torch import nn
from torch.utils.checkpoint import checkpoint

from mgpu_core import Pipeline, Replicate
from mgpu_core.pipeline.deferred import recomputing


def is_close(one, other, tolerance=1e-9):
    """Whether two tensors are equal but for the order of sums in float64."""
    return torch.allclose(one.cpu(), other.cpu(), rtol=tolerance, atol=tolerance)


def gradients(net):
    return {name: parameter.grad for name, parameter in net.named_parameters()}


def assert_same_gradients(net, reference):
    own, wanted = gradients(net), gradients(reference)
    assert list(own) == list(wanted)
    assert [name for name in own if not is_close(own[name], wanted[name])] == []


def pair(name, stages, **options):
    """A pipeline, the same net in one piece on the first device, and the batch there."""
    stack = STACKS[name]
    net = stack.net()
    whole, first = copy.deepcopy(net).to(cpu(1)[0]), cpu(1)[0]
    pipeline = Pipeline(net, cpu(stages), split_points=stack.points(stages), **options)
    return pipeline, whole, stack.x.to(first), stack.target.to(first)


@pytest.mark.parametrize("chunks", [1, 3, 8])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("name", STACKS)
def test_outputs_and_gradients_are_those_of_the_whole_net(name, stages, chunks):
    net, whole, x, target = pair(name, stages, chunks=chunks)
    output, wanted = net(x), whole(x)
    loss_fn(output, target.to(net.device_ids[-1])).backward()
    loss_fn(wanted, target).backward()
    if name == "lstm":
        assert output["none"] is None
        output, wanted = output["logits"], wanted["logits"]
    assert output.device == net.device_ids[-1]
    assert is_close(output, wanted)
    assert_same_gradients(net, whole)


@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
@pytest.mark.parametrize("name", STACKS)
def test_recomputed_stages_have_the_same_gradients(name, checkpoint):
    net, whole, x, target = pair(name, 3, chunks=3, checkpoint=checkpoint)
    loss_fn(net(x), target.to(net.device_ids[-1])).backward()
    loss_fn(whole(x), target).backward()
    assert_same_gradients(net, whole)


def test_names_order_and_identity_of_parameters_stay():
    net = STACKS["gpt"].net()
    before = dict(net.named_parameters())
    state = list(net.state_dict())
    pipeline = Pipeline(net, cpu(3), split_points=["blocks.1", "head"])
    assert [(name, id(each)) for name, each in pipeline.named_parameters()] == [(n, id(p)) for n, p in before.items()]
    assert list(pipeline.state_dict()) == state
    assert pipeline.module is net
    fresh = STACKS["gpt"].make().double()
    fresh.load_state_dict(pipeline.state_dict())
    pipeline.load_state_dict(fresh.state_dict())


def test_each_stage_has_a_device():
    devices, gpt = cpu(3), STACKS["gpt"].net()
    gpt.register_buffer("unused", torch.ones(1))
    net = Pipeline(gpt, devices, split_points=["blocks.1", "head"])
    where = {name: str(each.device) for name, each in net.state_dict().items()}
    assert where["tokens.weight"] == where["positions"] == where["unused"] == devices[0]
    assert where["blocks.1.linear1.weight"] == where["blocks.3.linear1.weight"] == devices[1]


def test_a_list_of_modules_is_a_stage_per_device():
    parts = [nn.Linear(3, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)), nn.Linear(4, 2)]
    whole = copy.deepcopy(nn.Sequential(*parts)).to(cpu(1)[0])
    x = torch.ones(5, 3, device=cpu(1)[0])
    net = Pipeline(parts, cpu(3), chunks=2)
    assert [name for name, _ in net.named_parameters()] == [name for name, _ in whole.named_parameters()]
    assert torch.allclose(net(x).cpu(), whole(x).cpu())


def test_a_sequential_is_cut_by_its_bytes():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 64), nn.Linear(64, 4))
    assert Pipeline(net, cpu(2)).split_points == ["3"]
    assert Pipeline(Mlp(), cpu(4)).split_points == ["1", "3", "5"]


def test_fewer_rows_than_chunks_are_fewer_micro_batches():
    seen = []

    class Spy(nn.Module):
        def forward(self, x):
            seen.append(len(x))
            return x

    net = Pipeline([Spy(), nn.Identity()], cpu(2), chunks=8)
    x = torch.arange(3.0, device=cpu(1)[0]).reshape(3, 1)
    assert torch.equal(net(x).cpu(), x.cpu())
    assert seen == [1, 1, 1]
    assert net(x[:0]).shape == (0, 1)


def test_keyword_arguments_nests_and_replicated_values_reach_their_stage():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Identity(), nn.Identity()

        def forward(self, pair, *, table=None, factor=1):
            x, y = pair
            return {"sum": self.last(self.first(x) + y) * factor + table["t"], "rest": (None, y)}

    rows = torch.arange(6.0, device=cpu(1)[0]).reshape(6, 1)
    table = {"t": Replicate(torch.full((1,), 100.0, device=cpu(1)[0]))}
    net = Pipeline(Net(), cpu(2), split_points=["last"], chunks=3, sample={"pair": (rows, rows), "table": table})
    output = net((rows, rows * 2), table=table, factor=2)
    assert torch.equal(output["sum"].cpu(), rows.cpu() * 6 + 100)
    assert output["rest"][0] is None
    assert torch.equal(output["rest"][1].cpu(), rows.cpu() * 2)


def test_both_modes_are_followed():
    net = Pipeline([nn.Dropout(0.5), nn.Identity()], cpu(2), chunks=2)
    x = torch.ones(64, 4, device=cpu(1)[0])
    assert 0 in net(x)
    net.eval()
    assert torch.equal(net(x).cpu(), x.cpu())
    assert not net.module.training
    assert 0 in net.train()(x)


class Mode(nn.Module):
    """The mode is asked for by the code that is traced."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Identity(), nn.Identity()

    def forward(self, x):
        return self.last(self.first(x) + 1 if self.training else self.first(x))


def test_a_mode_that_traced_code_asks_for_is_followed():
    net, x = Pipeline(Mode(), cpu(2), split_points=["last"]), torch.zeros(2, 1, device=cpu(1)[0])
    assert net(x).tolist() == [[1], [1]]
    assert net.eval()(x).tolist() == [[0], [0]]


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_one_seed_gives_one_result(checkpoint):
    torch.manual_seed(0)
    net = Pipeline(Gpt(dropout=0.3), cpu(3), split_points=["blocks.1", "head"], chunks=4, checkpoint=checkpoint)
    tokens = (torch.arange(40).reshape(8, 5) % 11).to(cpu(1)[0])
    found = []
    for _ in range(3):
        net.zero_grad()
        torch.manual_seed(7)
        output = net(tokens)
        output.square().sum().backward()
        found.append([output.detach().cpu(), net.module.blocks[2].linear1.weight.grad.cpu()])
    assert all(torch.equal(*each) for other in found[1:] for each in zip(found[0], other, strict=True))


@pytest.mark.parametrize("make", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_a_copy_is_a_pipeline_of_its_own(make):
    net, _, x, _ = pair("gpt", 3, chunks=2)
    other = make(net)
    with torch.no_grad():
        before = net(x)
        assert torch.equal(other(x).cpu(), before.cpu())
        other.tokens.weight.zero_()
        assert not torch.equal(other(x).cpu(), before.cpu())
        assert torch.equal(net(x).cpu(), before.cpu())


def test_several_threads_may_call_one_pipeline():
    net, whole, x, _ = pair("mlp", 3, chunks=2)
    wanted, found = whole(x), []
    threads = [threading.Thread(target=lambda: found.append(net(x).detach())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(is_close(each, wanted) for each in found)


def test_a_resnet_is_equal_in_eval():
    torch.manual_seed(0)
    net = resnet().eval()
    whole, x = copy.deepcopy(net), torch.rand(4, 3, 32, 32, device=cpu(1)[0])
    pipeline = Pipeline(net, cpu(3), split_points=["layer2", "layer4"], chunks=2)
    with torch.no_grad():
        assert is_close(pipeline(x), whole(x), 1e-5)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_deferred_statistics_are_those_of_all_rows_once(momentum, checkpoint):
    layers = [nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=momentum), nn.Tanh(), nn.BatchNorm1d(3, momentum=momentum)]
    net = nn.Sequential(*layers).double()
    whole = copy.deepcopy(net).cpu()
    options = {"chunks": 3, "deferred_batch_norm": True, "checkpoint": checkpoint}
    pipeline = Pipeline(net, cpu(2), split_points=["2"], **options)
    for seed in (1, 2):
        x = torch.rand(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed), device="cpu")
        pipeline(x.to(cpu(1)[0])).sum().backward()
        rows = [[], []]
        for part in x.tensor_split([3, 5]):
            first = whole[0](part)
            normalised = nn.functional.batch_norm(first, None, None, whole[1].weight, whole[1].bias, training=True)
            rows[0].append(first.detach())
            rows[1].append(torch.tanh(normalised).detach())
        for layer, parts in zip((whole[1], whole[3]), rows, strict=True):
            layer(torch.cat(parts))
    for name, buffer in whole.named_buffers():
        assert is_close(net.state_dict()[name], buffer), name


def test_a_recomputed_forward_leaves_running_statistics_alone():
    net = nn.Sequential(nn.BatchNorm1d(2), nn.Identity())
    pipeline = Pipeline(net, cpu(2), split_points=["1"], chunks=2, checkpoint="always")
    pipeline(torch.ones(4, 2, device=cpu(1)[0], requires_grad=True)).sum().backward()
    assert int(net[0].num_batches_tracked) == 2


def test_recomputing_leaves_the_buffers_of_all_layers_alone():
    nets = [nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2)), nn.BatchNorm1d(2)]
    with recomputing(nets):
        for net in nets:
            net(torch.ones(4, 2))
    assert [int(each) for net in nets for each in net.buffers() if each.ndim == 0] == [0, 0, 0]


def test_deferred_statistics_are_over_pixels_and_in_training_alone():
    layers = [nn.BatchNorm2d(1), nn.BatchNorm2d(1, track_running_stats=False)]
    net = Pipeline(layers, cpu(2), chunks=1, deferred_batch_norm=True)
    x = torch.tensor([[[[0.0, 1.0]]]], device=cpu(1)[0])
    net(x)
    net.eval()(x)
    assert [each.item() for each in layers[0].buffers()] == pytest.approx([0.05, 0.95, 1])


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("norm", ["1", "inside"])
def test_deferred_statistics_leave_gradients_alone_where_layers_run_again(norm, chunks, own):
    """The normalisation is a layer, or inside one; checkpoints are the pipeline's or the net's own."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            parts = [nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 2, 1)]
            self.layers = nn.ModuleList([nn.Sequential(*parts[:2]), parts[2]] if norm == "inside" else parts)

        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False) if own else layer(x)
            return x

    torch.manual_seed(0)
    net = Net().double()
    whole, x = copy.deepcopy(net), torch.rand(4, 3, 5, 5, dtype=torch.float64)
    start = f"layers.{len(net.layers) - 1}"
    recomputes = "never" if own else "always"
    pipe = Pipeline(net, cpu(2), split_points=[start], chunks=chunks, checkpoint=recomputes, deferred_batch_norm=True)
    for _ in range(2):
        pipe(x.to(cpu(1)[0])).square().sum().backward()
        for part in x.chunk(chunks):
            whole(part).square().sum().backward()
    for one, other in zip(net.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(one.grad.cpu(), other.grad.cpu(), rtol=1e-9)
    found = next(each for each in net.modules() if isinstance(each, nn.BatchNorm2d))
    wanted = nn.BatchNorm2d(3).double()
    for _ in range(2):
        wanted(net.layers[0][0](x.to(cpu(1)[0])) if norm == "inside" else net.layers[0](x.to(cpu(1)[0])))
    assert torch.allclose(found.running_var.cpu(), wanted.running_var.cpu())
    assert torch.allclose(found.running_mean.cpu(), wanted.running_mean.cpu())
