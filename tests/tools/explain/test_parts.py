"""Where the parts of a module are: in the table and on the page, of a pipeline and of a placed module."""

import pytest
import torch
from fakes.stacks import mse
from torch import nn

import mgpu_core
from mgpu_core.support.tables import human_nbytes
from mgpu_core.tools.explain.downsample import thinned
from mgpu_core.tools.explain.page import page_data

FIRST, SECOND = 4 * (6 * 3 + 3), 4 * (3 * 5 + 5)


def stack():
    return nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 5))


def parts_of(trace, number=-1):
    (module,) = page_data(trace)["steps"][number]["parts"]
    assert module["name"] == "Sequential"
    return [(part["device"], list(part["layers"]), part["nbytes"]) for part in module["parts"]]


def test_a_step_over_a_pipeline_has_its_stages():
    net = stack()
    pipeline = mgpu_core.Pipeline(net, ["cpu"] * 2, split_points=["2"], chunks=2)
    step = mgpu_core.TrainStep(pipeline, mse, torch.optim.SGD(net.parameters(), 0.1))
    with mgpu_core.explain() as trace:
        for _ in range(2):
            step(torch.ones(4, 6), torch.ones(4, 5))
    for number in range(2):
        assert parts_of(trace, number) == [("cpu", ["0", "1"], FIRST), ("cpu", ["2"], SECOND)]
    table = trace.table()
    assert f"parts of Sequential:\n  cpu: 0 to 1, {FIRST} B\n  cpu: 2, {SECOND} B" in table
    assert [str(part) for part in pipeline.parts] == [f"cpu: 0 to 1, {FIRST} B", f"cpu: 2, {SECOND} B"]


@pytest.mark.several_ranks
def test_a_call_of_a_placed_module_is_a_step_of_its_own(ranks):
    net = mgpu_core.place(nn.Sequential(*(nn.Linear(4, 4) for _ in range(ranks))), ["cpu"] * ranks)
    with mgpu_core.explain() as trace:
        net(torch.ones(2, 4))
        with torch.no_grad():
            net(torch.ones(2, 4))
    assert [step.name for step in trace.steps] == ["place", "place"]
    assert parts_of(trace) == [("cpu", [str(part)], 80) for part in range(ranks)]
    assert trace.table().startswith("recorded step 1: place, ")
    assert trace.table().count("\n  cpu: ") == ranks


def test_a_placed_module_in_a_predictor_is_part_of_its_batches():
    net = mgpu_core.place(stack().eval(), ["cpu"] * 2, split=["2"])
    with mgpu_core.Predictor(net, max_batch=1) as predict, mgpu_core.explain(steps=2) as trace:
        for _ in range(5):
            predict(torch.ones(1, 6))
    assert [step.name for step in trace.steps] == ["inference"]
    assert len(trace.batches) == 5
    assert parts_of(trace) == [("cpu", ["0", "1"], FIRST), ("cpu", ["2"], SECOND)]
    assert f"  cpu: 2, {SECOND} B" in trace.table()


def test_two_modules_of_a_class_keep_apart():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = mgpu_core.place(stack(), ["cpu"] * 2, split=["2"])
            self.other = mgpu_core.place(stack(), ["cpu"] * 2, split=["1"])

        def forward(self, x):
            return self.one(x) + self.other(x)

    net = mgpu_core.DataParallel(Both(), ["cpu"])
    with mgpu_core.explain() as trace:
        net(torch.ones(2, 6))
    assert [part.parts[0][1] for part in trace.step().parts] == [("0", "1"), ("0",)]


def test_a_net_without_parts_has_none():
    with mgpu_core.explain() as trace:
        mgpu_core.DataParallel(nn.Linear(2, 2), ["cpu"] * 2)(torch.ones(4, 2))
    assert page_data(trace)["steps"][0]["parts"] == []
    assert "parts of" not in trace.table()


def test_layers_that_are_too_many_for_a_page_are_counted():
    net = mgpu_core.place(nn.Sequential(*(nn.Linear(1, 1) for _ in range(9))), ["cpu"] * 2, split=["7"])
    with mgpu_core.explain() as trace:
        net(torch.ones(1, 1))
    less = thinned(page_data(trace)["steps"][0], 4)
    assert [list(part["layers"]) for part in less["parts"][0]["parts"]] == [["0", "1", "5", "6"], ["7", "8"]]
    assert less["parts"][0]["parts"][0]["nbytes"] == 56
    assert less["parts"][0]["about"][0].endswith(human_nbytes(56))
    assert less["left_out"] == "Too much for this page: 3 layers."
