"""The copies of the module: what they share, how they run, and which modules cannot be copied to answer requests."""

import warnings
import weakref
from functools import partial
from typing import ClassVar

import pytest
import torch
from fakes.nets import cpu
from torch import nn

from mgpu_core import Pipeline, Predictor
from mgpu_core.devices.graphs import ATTEMPTS, RETRY_AFTER
from mgpu_core.inference.served_replicas import GraphedModule


class Writing(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.is_harmless = True

    def forward(self, x):
        if not (x > 0).all():
            self.calls += 1
        return x


def test_a_module_that_writes_its_buffers_is_refused_and_the_predictor_goes_on():
    one = torch.ones(1, 1, device=cpu(1)[0])
    with Predictor(Writing(), cpu(2)) as predict:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the forward of Writing writes its buffer 'calls' in eval mode"):
                predict(-one)
            assert float(predict(one)) == 1


class ScalesOnce(nn.Linear):
    """Scales its weight in its first call in eval mode, as RWKV does."""

    is_scaled = False

    def forward(self, x):
        if not self.is_scaled:
            self.weight.data.mul_(2)
            self.weight.mul_(1)
            self.is_scaled = True
        return super().forward(x)


class ScalesAndFails(ScalesOnce):
    def forward(self, x):
        super().forward(x)
        raise ValueError("after it has scaled its weight")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_module_that_writes_a_parameter_once_answers_no_request(ranks):
    """Ranks of one device share parameters: each would scale them."""
    x = torch.ones(1, 3, device=cpu(1)[0])
    net = ScalesOnce(3, 2, device=cpu(1)[0]).eval()
    text = "call the module once in eval mode before the Predictor is made"
    with Predictor(net, cpu(ranks), max_batch=4, max_wait_ms=20) as predict:
        for each in [predict.submit(x) for _ in range(8)]:
            with pytest.raises(RuntimeError, match=text):
                each.result(30)
        for _ in range(2 * ranks):  # one after the other: each rank is asked
            with pytest.raises(RuntimeError, match=text):
                predict(x)
    with Predictor(ScalesAndFails(3, 2, device=cpu(1)[0]), cpu(ranks)) as predict:
        with pytest.raises(ValueError, match="after it has scaled its weight"):
            predict(x)
        with pytest.raises(RuntimeError, match=text):
            predict(x)
    with torch.no_grad():
        wanted = net(x)
    with Predictor(net, cpu(ranks)) as predict:
        assert torch.equal(predict(x), wanted)


class Past(nn.Module):
    """Keeps what it saw, in one of several ways."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.register_buffer("past", torch.zeros(1))
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        if self.way == "replaced buffer":
            self.past = self.past + x.sum(0)
        elif self.way == "written parameter":
            self.weight.data.mul_(2)
            self.weight.mul_(1)
        elif self.way == "replaced parameter":
            self.weight = nn.Parameter(self.weight + 1)
        elif self.way == "attribute":
            self.last = x
        return x


@pytest.mark.parametrize("way", ["replaced buffer", "written parameter", "replaced parameter"])
def test_answers_that_depend_on_requests_before_are_refused(way):
    kind, name = ("buffer", "past") if "buffer" in way else ("parameter", "weight")
    with Predictor(Past(way), cpu(2)) as predict:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"the forward of Past writes its {kind} '{name}' in eval mode"):
                predict(torch.ones(1, 1, device=cpu(1)[0]))


def test_assigned_attributes_are_told_of():
    with Predictor(Past("attribute"), cpu(1)) as predict:
        with pytest.warns(UserWarning, match="the forward of Past assigns last"):
            predict(torch.ones(1, 1, device=cpu(1)[0]))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            predict(torch.ones(1, 1, device=cpu(1)[0]))


def test_a_predictor_that_is_made_in_inference_mode():
    with torch.inference_mode():
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        x = torch.ones(1, 2, device=cpu(1)[0])
        with Predictor(module, cpu(2)) as predict:
            answer = predict(x)
    assert answer.shape == (1, 2)
    assert module.training


class Held(nn.Module):
    """Reaches its layer by an attribute that is no module."""

    def __init__(self, hold):
        super().__init__()
        self.layer = nn.BatchNorm1d(2)
        self.held = hold(self)

    def forward(self, x):
        return self.held(x)


SHARING = {
    "a closure": lambda net: lambda x: net.layer(x),
    "a closure over the layer": lambda net: (lambda layer: lambda x: layer(x))(net.layer),
    "a weak reference": lambda net: (lambda reference: lambda x: reference()(x))(weakref.ref(net.layer)),
    "a default": lambda net: lambda x, layer=net.layer: layer(x),
    "a partial of a closure": lambda net: partial(lambda x, scale: net.layer(x) * scale, scale=1.0),
}


@pytest.mark.parametrize("kind", SHARING)
def test_a_copy_that_reaches_the_module_itself_is_told_of(kind):
    net = Held(SHARING[kind]).to(cpu(1)[0])
    told = pytest.warns(UserWarning, match="held of Held reaches the module itself, by a closure, a weak reference or")
    with told, Predictor(net, cpu(2)):
        pass


@pytest.mark.parametrize("hold", [lambda net: net.layer, lambda net: net.layer.forward, lambda _: torch.relu])
def test_copies_with_layers_of_their_own_are_not_told_of(hold):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Predictor(Held(hold).to(cpu(1)[0]), cpu(2)):
            pass


def test_a_refresh_that_fails_keeps_the_old_weights():
    class Uncopyable(nn.Linear):
        refuses = False

        def __deepcopy__(self, memo):
            if self.refuses:
                raise OSError("no copy")
            made = nn.Linear(1, 1, bias=False)
            made.weight.data.copy_(self.weight.data)
            return made

    module = Uncopyable(1, 1, bias=False)
    module.weight.data.fill_(2.0)
    with Predictor(module, cpu(2)) as predict:
        module.weight.data.fill_(3.0)
        module.refuses = True
        with pytest.raises(OSError, match="no copy"):
            predict.refresh()
        assert float(predict(torch.ones(1, 1, device=cpu(1)[0]))) == 2


def test_bfloat16_by_autocast():
    with Predictor(nn.Linear(2, 2), cpu(1), amp_dtype=torch.bfloat16) as predict:
        assert predict(torch.ones(1, 2, device=cpu(1)[0])).dtype is torch.bfloat16


class Eager(nn.Module):
    """Counts its calls that do not run compiled code."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    calls: ClassVar[list[int]] = []

    def forward(self, x):
        if not torch.compiler.is_compiling():
            self.calls.append(len(x))
        return self.layers(x)


@pytest.mark.slow
def test_compiled_copies():
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    xs = [torch.rand(rows, 3) for rows in (1, 2, 5, 8)]
    with Predictor(module, ["cpu"] * 2, compile=True, max_wait_ms=0) as predict:
        answers = [predict(x) for x in xs]
    assert all(torch.allclose(one, module(x), atol=1e-6) for one, x in zip(answers, xs, strict=True))


@pytest.mark.slow
def test_eight_ranks_run_compiled_code_also_after_a_refresh(monkeypatch):
    """Torch keeps eight variants of a function: those of all ranks together are more."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    module, Eager.calls = Eager(), []
    with Predictor(module, ["cpu"] * 8, compile=True, max_batch=4, max_wait_ms=0) as predict:
        for _ in range(2):
            xs = [torch.rand(rows, 3) for rows in [1, 2, 3, 4] * 60]
            answers = [future.result(60) for future in [predict.submit(x) for x in xs]]
            assert all(torch.allclose(one, module.layers(x), atol=1e-6) for one, x in zip(answers, xs, strict=True))
            module.layers[0].weight.data.mul_(2)
            predict.refresh()
        assert all(each.batches for each in predict.stats())
    assert Eager.calls == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["", "layers", "layers.0"])
def test_modules_that_were_compiled_in_place_stay_compiled(name):
    seen = []

    def backend(graph, inputs):
        seen.append(len(inputs))
        return graph.forward

    module = Eager()
    module.get_submodule(name).compile(backend=backend)
    x = torch.rand(2, 3)
    with Predictor(module, ["cpu"] * 2, max_batch=1) as predict:
        assert torch.allclose(predict(x), module.layers(x), atol=1e-6)
    assert seen


@pytest.mark.slow
def test_workers_take_the_compiler_configuration_along():
    class Sized(nn.Module):
        def forward(self, x, task):
            return x * len(task)

    compiled = torch.compile(Sized(), backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(recompile_limit=64), Predictor(compiled, ["cpu"] * 2) as predict:
        for count in range(1, 30):
            assert float(predict(torch.ones(1, 1), "t" * count)) == count


def test_a_capture_needs_a_gpu_and_a_module_on_one():
    with pytest.raises(ValueError, match="capture=True needs CUDA devices"):
        Predictor(nn.Linear(1, 1), cpu(1), capture=True)
    with pytest.raises(ValueError, match="capture=True needs"):
        Predictor(Pipeline([nn.Linear(1, 1), nn.Linear(1, 1)], cpu(2)), capture=True)


class Recorder:
    """Stands in for CUDA: a replay computes the outputs again from what the static tensors hold."""

    def __init__(self, graphed, failures=0):
        self.graphed, self.failures, self.count, self.attempts = graphed, failures, 0, 0

    def record(self, device, work):
        self.attempts += 1
        if self.attempts <= self.failures:
            raise RuntimeError("operation not permitted when stream is capturing")
        assert not torch.is_inference_mode_enabled()  # generators would get a state that training cannot write
        assert not torch.is_grad_enabled()
        self.count += 1
        work()
        return Graph(self.graphed), []

    def forget(self):
        pass


class Graph:
    def __init__(self, graphed):
        self.graphed = graphed

    def replay(self):
        (recorded,) = [each for each, _ in self.graphed._recordings._recorded.values() if each.graph is self]
        recorded.outputs["y"].copy_(self.graphed._module(*recorded.leaves)["y"])


class Doubling(nn.Module):
    def forward(self, x, scale=2):
        return {"y": x * scale, "rows": "all"}


def graphed(**options):
    made = GraphedModule(Doubling(), torch.device("cpu"), "Doubling")
    made._recorder = Recorder(made, **options)
    return made


def test_one_graph_serves_all_rows_up_to_its_power_of_two():
    module = graphed()
    for rows in (1, 2, 3, 4, 5, 8, 7, 1):
        x = torch.rand(rows, 3)
        answer = module(x, 3)
        assert torch.equal(answer["y"], 3 * x)
        assert answer["rows"] == "all"
    assert module._recorder.count == 4  # of 1, 2, 4 and 8 rows
    module(torch.rand(8, 4), 3)
    module(torch.rand(8, 3), 2)
    assert module._recorder.count == 6


def test_outputs_of_a_replay_are_not_those_of_the_next():
    module, x = graphed(), torch.ones(2, 3)
    first = module(x)["y"]
    module(5 * x)
    assert torch.equal(first, 2 * x)


def test_the_graph_unused_for_longest_goes_first():
    module = graphed()
    for width in range(1, 17):
        module(torch.ones(1, width))
    module(torch.ones(1, 1))
    module(torch.ones(1, 17))
    assert module._recorder.count == 17
    module(torch.ones(1, 1))
    assert module._recorder.count == 17
    module(torch.ones(1, 2))
    assert module._recorder.count == 18


class Choosy(Doubling):
    def forward(self, x, scale=2):
        if self.is_off:
            raise IndexError("this request alone")
        return super().forward(x, scale)


@pytest.mark.filterwarnings("error")
def test_a_call_that_fails_by_itself_is_no_failed_recording():
    module, net, x = graphed(), Choosy(), torch.ones(2, 3)
    module._module, net.is_off = net, True
    with pytest.raises(IndexError, match="this request alone"):
        module(x)
    assert module._recorder.attempts == 0
    net.is_off = False
    assert torch.equal(module(x)["y"], 2 * x)
    assert module._recorder.count == 1


def test_a_module_that_cannot_be_recorded_runs_as_it_is():
    module, x = graphed(failures=100), torch.ones(3, 2)
    with pytest.warns(RuntimeWarning, match="Doubling runs as it is, not as a CUDA graph: recording it failed"):
        module(x)
    with warnings.catch_warnings(action="error"):
        for _ in range(100):
            assert torch.equal(module(x)["y"], 2 * x)
    assert module._recorder.attempts == ATTEMPTS


def test_a_recording_that_another_thread_has_broken_is_made_later():
    module, x = graphed(failures=1), torch.ones(3, 2)
    with pytest.warns(RuntimeWarning, match="a thread that waits for the whole device"):
        module(x)
    for _ in range(RETRY_AFTER + 1):
        assert torch.equal(module(x)["y"], 2 * x)
    assert module._recorder.count == 1


@pytest.mark.parametrize("is_inference", [False, True])
def test_a_recording_is_made_outside_inference_mode(is_inference):
    module, x = graphed(), torch.ones(3, 2)
    with torch.inference_mode(is_inference):
        assert torch.equal(module(x)["y"], 2 * x)
    assert module._recorder.count == 1
