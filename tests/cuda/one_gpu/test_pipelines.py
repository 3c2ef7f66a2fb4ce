"""Stages on one device, and on a GPU, the CPU and the GPU again: values and gradients are those of the whole net."""

import copy

import pytest
import torch
from fakes.here import alike, optimizer_of
from torch.nn import functional

import mgpu_core

gpu_only = pytest.mark.usefixtures("gpu_only")


@pytest.mark.parametrize(("schedule", "checkpoint"), [("1f1b", "never"), ("gpipe", "always"), ("1f1b", "except_last")])
def test_two_stages_on_one_device(here, schedule, checkpoint):
    net = here.net()
    alone = copy.deepcopy(net)
    pipe = mgpu_core.Pipeline(net, here.team(2), split_points=["5"], chunks=4, schedule=schedule, checkpoint=checkpoint)
    ((x, _),) = here.batches(1)
    torch.testing.assert_close(pipe(x), alone(x), rtol=1e-9, atol=1e-12)
    trained(here, pipe, alone)


@gpu_only
def test_stages_on_the_gpu_the_cpu_and_the_gpu(here):
    with here.late():
        for _ in range(3):
            net = here.net()
            alone = copy.deepcopy(net)
            pipe = mgpu_core.Pipeline(net, [here.name, "cpu", here.name], split_points=["3", "7"], chunks=6)
            trained(here, pipe, alone)


@gpu_only
def test_placed(here):
    with here.late():
        net = here.net()
        alone = copy.deepcopy(net)
        mgpu_core.place(net, [here.name, "cpu", here.name], ["3", "7"])
        ours, theirs = (optimizer_of("sgd", each.parameters(), theirs=True) for each in (net, alone))
        for x, y in here.batches(10):
            for model, optimizer in ((net, ours), (alone, theirs)):
                optimizer.zero_grad()
                output = model(x)
                functional.cross_entropy(output, y.to(output.device)).backward()
                optimizer.step()
            here.poison()
        alike(net, alone)


def trained(here, pipe, alone):
    optimizer = optimizer_of("adamw", pipe.parameters())
    step = mgpu_core.TrainStep(pipe, functional.cross_entropy, optimizer)
    here.compare(step, alone, "adamw", steps=8, each=here.poison)
