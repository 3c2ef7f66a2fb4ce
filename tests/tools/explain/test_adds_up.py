"""Every collective of a step is in one row of its table, whatever the step was."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import mgpu_core
from mgpu_core.tools.explain.phases import covered, moved_nbytes, outside, phases_of
from mgpu_core.tools.explain.scenes import scenes_of


def net():
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))


def train(model, *inputs):
    model(*inputs).square().sum().backward()


def plain(cpus):
    train(mgpu_core.DataParallel(net(), cpus), torch.randn(16, 6))


def gradient_of_the_input(cpus):
    train(mgpu_core.DataParallel(net(), cpus), torch.randn(16, 6, requires_grad=True))


def gradient_penalty(cpus):
    x = torch.randn(16, 6, requires_grad=True)
    (found,) = torch.autograd.grad(mgpu_core.DataParallel(net(), cpus)(x).sum(), x, create_graph=True)
    found.square().sum().backward()


def synchronised(cpus):
    module = mgpu_core.convert_sync_batchnorm(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)))
    train(mgpu_core.DataParallel(module, cpus), torch.randn(16, 6))


def replicated(cpus):
    class Scaled(nn.Linear):
        def forward(self, x, scale):
            return super().forward(x) * scale.sum()

    shared = mgpu_core.Replicate(torch.randn(50, requires_grad=True))
    train(mgpu_core.DataParallel(Scaled(6, 4), cpus), torch.randn(16, 6), shared)


def inside_another(cpus):
    inner = mgpu_core.DataParallel(net(), ["cpu"] * 2)
    train(mgpu_core.DataParallel(nn.Sequential(inner), cpus), torch.randn(16, 6))


def functional_forms(cpus):
    x = torch.randn(16, 6, requires_grad=True)
    parts = mgpu_core.scatter(x, cpus)
    mgpu_core.gather(parts, "cpu").sum().backward()
    mgpu_core.reduce([[torch.ones(3, requires_grad=True)]] * len(cpus), "cpu")[0].sum().backward()


def one_step(cpus, module, loss, *batch, **settings):
    step = mgpu_core.TrainStep(module, loss, torch.optim.SGD(module.parameters(), 0.1), cpus, **settings)
    step(*batch)
    step(*batch)
    step.close()


def engine(cpus):
    one_step(cpus, net(), functional.mse_loss, torch.randn(16, 6), torch.randn(16, 2), bucket_nbytes=64)


def engine_with_a_graph_before(cpus):
    before = torch.randn(16, 6, requires_grad=True) * 2
    module = net()
    step = mgpu_core.TrainStep(module, functional.mse_loss, torch.optim.SGD(module.parameters(), 0.1), cpus)
    step(before, torch.randn(16, 2), return_outputs=True)
    step.close()


def engine_with_sparse_gradients(cpus):
    module = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 2))
    one_step(cpus, module, functional.mse_loss, torch.randint(9, (16, 2)), torch.randn(16, 2))


def engine_with_sparse_gradients_alone(cpus):
    module = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten())
    one_step(cpus, module, functional.mse_loss, torch.randint(9, (16, 2)), torch.randn(16, 8))


def engine_around_the_wrapper(cpus):
    module = nn.Sequential(mgpu_core.DataParallel(net(), ["cpu"] * 2))
    one_step(cpus, module, functional.mse_loss, torch.randn(16, 6), torch.randn(16, 2))


def engine_synchronised(cpus):
    module = mgpu_core.convert_sync_batchnorm(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)))
    one_step(cpus, module, functional.mse_loss, torch.randn(16, 6), torch.randn(16, 4))


WAYS = [
    plain,
    gradient_of_the_input,
    gradient_penalty,
    synchronised,
    replicated,
    inside_another,
    functional_forms,
    engine,
    engine_with_a_graph_before,
    engine_with_sparse_gradients,
    engine_with_sparse_gradients_alone,
    engine_around_the_wrapper,
    engine_synchronised,
]


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("way", WAYS)
def test_the_table_has_every_collective_once(way, ranks):
    with mgpu_core.explain() as trace:
        way(["cpu"] * ranks)
    assert sum(len(step.collectives) for step in trace.steps) > 0 or ranks == 1
    for step in trace.steps:
        rows = phases_of(step)
        assert sum(len(row.collectives) for row in rows) == len(step.collectives)
        assert sum(row.moved_nbytes for row in rows) == sum(map(moved_nbytes, step.collectives))
        assert scenes_of(step)
        inside = [(max(begin, step.begin_ns), min(end, step.end_ns)) for row in rows for begin, end in row.times]
        parts = [round(part.seconds * 1e9) for part in outside(step, rows)]
        assert min(parts, default=1) > 0
        assert sum(parts) == step.end_ns - step.begin_ns - covered(inside)


@pytest.mark.several_ranks
def test_gradients_are_told_as_gradients(ranks):
    """And outputs as outputs: in steps of the engine, and of no wrapper, too."""
    for way in (engine_with_a_graph_before, functional_forms):
        with mgpu_core.explain() as trace:
            way(["cpu"] * ranks)
        titles = [scene["title"] for step in trace.steps for scene in scenes_of(step)]
        assert f"Gather (backward): 16 rows, {ranks} ranks" in titles
        assert f"Gather: 16 rows, {ranks} ranks" in titles
    with mgpu_core.explain() as trace:
        engine_with_a_graph_before(["cpu"] * ranks)
    assert trace.profile().gather_nbytes == 16 * 2 * 4


@pytest.mark.several_ranks
def test_only_parameters_are_buckets(ranks):
    with mgpu_core.explain() as trace:
        replicated(["cpu"] * ranks)
    assert [bucket.nbytes for bucket in trace.profile().buckets] == [4 * (6 * 4 + 4)]
    assert trace.step().contents[0].names == ("bias", "weight")
    with mgpu_core.explain() as trace:
        engine_around_the_wrapper(["cpu"] * ranks)
    assert [bucket.nbytes for bucket in trace.profile().buckets] == [4 * (6 * 4 + 4 + 4 * 2 + 2)]


def test_a_second_backward_is_a_scene_and_time_of_its_own():
    model = mgpu_core.DataParallel(net(), ["cpu"] * 2)
    with mgpu_core.explain() as trace:
        loss = model(torch.randn(16, 6)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    step = trace.step()
    scenes = scenes_of(step)
    assert [each["title"] for each in scenes if each["kind"] == "backward"] == ["Backward, 1 of 2", "Backward, 2 of 2"]
    back = [each for each in scenes if each["title"].startswith("Scatter (backward)")]
    assert [[tensor["nbytes"] for tensor in each["tensors"]] for each in back] == [[[64, 64]]] * 2
    spans = [span for span in step.spans if span.step == "backward" and span.rank == 0]
    total = sum(span.end_ns - span.begin_ns for span in spans) / 1e9
    assert trace.profile().backward_seconds >= total / 2


def test_a_metric_behind_the_step_is_not_the_step():
    model = mgpu_core.DataParallel(net(), ["cpu"] * 2)
    with mgpu_core.explain() as trace:
        for _ in range(2):
            train(model, torch.randn(16, 6))
            mgpu_core.reduce([torch.ones(3)] * 2, "cpu")
    assert [step.name for step in trace.steps] == ["data_parallel", "calls"] * 2
    assert trace.step().number == 2
    assert trace.table().startswith("recorded step 2: data_parallel")
    assert trace.step(-1).name == "calls"
    assert trace.profile().rows == 16
