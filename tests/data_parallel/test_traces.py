"""Traces of torch do not see what kernels write: they are refused, or take a wrapper for a leaf."""

import pytest
import torch
from fakes.nets import cpu
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import mgpu_core
from mgpu_core import DataParallel, Pipeline, Predictor, TrainStep, comm, gather, kernels, reduce, replicate, scatter


def mse(output, target):
    return (output - target).square().mean()


def frozen():
    return nn.Linear(4, 3).requires_grad_(False).to(cpu(1)[0])


def x_of(rows=6):
    return torch.randn(rows, 4, device=cpu(1)[0])


OPERATIONS = {
    "DataParallel": lambda x: DataParallel(NET, cpu(2))(x),
    "DataParallel, caller": lambda x: DataParallel(NET, cpu(2), workers="caller")(x),
    "data_parallel": lambda x: mgpu_core.data_parallel(NET, x, cpu(2)),
    "Pipeline": lambda x: PIPELINE(x),
    "TrainStep": lambda x: STEP(x, x[:, :3]),
    "Predictor": lambda x: PREDICTOR(x),
    "Predictor.submit": lambda x: PREDICTOR.submit(x).result(),
    "scatter": lambda x: scatter(x, cpu(2))[0],
    "gather": lambda x: gather([x, x], cpu(1)[0]),
    "reduce": lambda x: reduce([x, x], cpu(1)[0]),
    "replicate": lambda x: replicate(NET, cpu(2))[0](x),
    "comm.broadcast": lambda x: comm.broadcast(x, cpu(2))[1],
    "comm.reduce_add": lambda x: comm.reduce_add([x, x]),
    "comm.gather": lambda x: comm.gather([x, x]),
    "comm.scatter": lambda x: comm.scatter(x, cpu(2))[0],
    "comm.all_reduce": lambda x: comm.all_reduce([x.clone(), x.clone()]),
    "kernels.scale_cast": lambda x: kernels.scale_cast(x, 2.0, torch.float64),
    "kernels.sum_ranks": lambda x: kernels.sum_ranks([x, x]),
    "kernels.pack": lambda x: kernels.pack([x]),
    "kernels.l2_norm": lambda x: kernels.l2_norm([x]),
}
NET = PIPELINE = STEP = PREDICTOR = None


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    here, net = globals(), nn.Linear(4, 3).to(cpu(1)[0])
    monkeypatch.setitem(here, "NET", frozen())
    monkeypatch.setitem(here, "PIPELINE", Pipeline(nn.Sequential(frozen(), nn.Tanh()), cpu(2), split_points=["1"]))
    monkeypatch.setitem(here, "STEP", TrainStep(net, mse, torch.optim.SGD(net.parameters(), 0.1), cpu(2)))
    with Predictor(frozen(), cpu(2)) as predictor:
        monkeypatch.setitem(here, "PREDICTOR", predictor)
        yield


class Called(nn.Module):
    """A module that calls a function."""

    def __init__(self, function):
        super().__init__()
        self._function = function

    def forward(self, x):
        return self._function(x)


TRACES = {
    "export": lambda function, x: torch.export.export(Called(function), (x,)),
    "jit.trace": lambda function, x: torch.jit.trace(function, x, check_trace=False),
    "make_fx": lambda function, x: make_fx(function)(x),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("how", TRACES)
def test_a_trace_is_refused(how, operation):
    function = OPERATIONS[operation]
    function(x_of())  # as it is, it works
    with pytest.raises(TypeError, match=r"do not see what mgpu_core writes .*`\.module`"):
        TRACES[how](function, x_of())


def test_a_wrapper_is_no_root_of_a_symbolic_trace():
    with pytest.raises(TypeError, match=r"Trace the module itself"):
        fx.symbolic_trace(DataParallel(frozen(), cpu(2)))


@pytest.mark.parametrize("grad", [True, False])
def test_a_wrapper_inside_is_a_leaf_of_a_symbolic_trace(grad):
    net = nn.Sequential(nn.Linear(4, 4), DataParallel(nn.Linear(4, 3), cpu(2)), nn.Tanh()).to(cpu(1)[0])
    traced = fx.symbolic_trace(net)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["0", "1", "2"]
    x = x_of()
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(traced(x), net(x))


def test_the_module_itself_is_traced():
    model = DataParallel(frozen(), cpu(2))
    traced = torch.jit.trace(model.module, x_of())
    x = x_of()
    torch.testing.assert_close(traced(x), model(x))
