"""Looking changes nothing: the same numbers, the same errors with the same notes, no hook and no tensor left behind."""

import collections

import pytest
import torch
from torch import nn

import mgpu_core
from mgpu_core.trace import tracer


class Selected(nn.Module):
    """Shows some of its parameters alone, as adapters do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def named_parameters(self, *args, **kwargs):
        return (each for each in super().named_parameters(*args, **kwargs) if each[0].endswith("bias"))

    def forward(self, x):
        return self.linear(x)


class Lazy(collections.abc.Mapping):
    def __init__(self, value):
        self.value = value

    def __getitem__(self, name):
        raise AssertionError("somebody looked")

    def __iter__(self):
        return iter(["value"])

    def __len__(self):
        return 1


class Returns(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.linear, self.wrap = nn.Linear(3, 2), wrap

    def forward(self, *args):
        return self.wrap(self.linear(args[0]))


def in_itself(x):
    nest = [x]
    nest.append(nest)
    return nest


def packed():
    return nn.utils.rnn.pack_sequence([torch.ones(3, 3), torch.ones(2, 3)])


PLAIN = torch.arange(12.0).reshape(4, 3)
ONE_RANK_INPUTS = {
    "packed": (nn.GRU(3, 2), lambda: (packed(),)),
    "sparse": (Returns(lambda y: y), lambda: (PLAIN, PLAIN.to_sparse())),
    "quantized": (Returns(lambda y: y), lambda: (PLAIN, torch.quantize_per_tensor(PLAIN, 0.1, 0, torch.qint8))),
    "nested": (Returns(lambda y: y), lambda: (PLAIN, torch.nested.nested_tensor([PLAIN, PLAIN[:2]]))),
    "scalar": (Returns(lambda y: y), lambda: (PLAIN, torch.tensor(3.0))),
}
ONE_RANK_OUTPUTS = {
    "in itself": in_itself,
    "lazy": Lazy,
    "none": lambda y: None,
    "dict": lambda y: {"a": [y, {"b": (y,)}]},
    "named": lambda y: torch.max(y, 1),
    "ordered": lambda y: collections.OrderedDict(a=y),
}


def outcome(run):
    """What comes out, or the error's type, text and notes."""
    torch.manual_seed(0)
    try:
        return run()
    except Exception as error:
        return type(error), str(error), getattr(error, "__notes__", [])


def values(obj):
    """Plain numbers of a nest's tensors."""
    if isinstance(obj, torch.Tensor):
        return obj.to_dense().tolist() if obj.is_sparse else obj.tolist()
    if isinstance(obj, nn.utils.rnn.PackedSequence):
        return obj.data.tolist()
    if isinstance(obj, Lazy):
        return values(obj.value)
    if isinstance(obj, dict):
        return {name: values(each) for name, each in obj.items()}
    return [values(each) if each is not obj else "itself" for each in obj] if isinstance(obj, list | tuple) else obj


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.filterwarnings("ignore:.*(nested|quantized|quantize).*")
@pytest.mark.parametrize("name", ONE_RANK_INPUTS)
def test_what_one_rank_is_given(name):
    module, inputs = ONE_RANK_INPUTS[name]
    model = mgpu_core.DataParallel(module, ["cpu"])
    expected = values(outcome(lambda: model(*inputs())))
    with mgpu_core.explain() as trace:
        found = values(outcome(lambda: model(*inputs())))
    assert found == expected
    assert isinstance(expected, list), expected
    assert [step.name for step in trace.steps] == ["data_parallel"]


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("name", ONE_RANK_OUTPUTS)
def test_what_one_rank_returns(name):
    model = mgpu_core.DataParallel(Returns(ONE_RANK_OUTPUTS[name]), ["cpu"])
    expected = values(outcome(lambda: model(PLAIN)))
    with mgpu_core.explain() as trace:
        assert values(outcome(lambda: model(PLAIN))) == expected
    assert [step.name for step in trace.steps] == ["data_parallel"]


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_step_on_a_packed_sequence():
    net = nn.GRU(3, 2)

    def loss(output, target):
        return (output[0].data.sum(dim=1) - target).square().mean()

    step = mgpu_core.TrainStep(net, loss, torch.optim.SGD(net.parameters(), 0.0), ["cpu"])
    expected = float(step(packed(), torch.zeros(5)))
    with mgpu_core.explain() as trace:
        assert float(step(packed(), torch.zeros(5))) == expected
    step.close()
    assert [each.name for each in trace.steps] == ["train_step"]


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_module_that_shows_some_parameters(ranks):
    model = mgpu_core.DataParallel(Selected(), ["cpu"] * ranks)
    expected = model(PLAIN)
    with mgpu_core.explain() as trace:
        assert torch.equal(model(PLAIN), expected)
    if ranks > 1:
        assert trace.step().contents[0].names == ("linear.bias", "linear.weight")


def test_errors_keep_their_notes():
    model = mgpu_core.DataParallel(Returns(lambda y: y.sum(1)), ["cpu"] * 3, dim=1)
    x = torch.ones(3, 9)
    expected = outcome(lambda: model(x))
    with mgpu_core.explain():
        assert outcome(lambda: model(x)) == expected
    assert expected[2] == ["while gathering outputs along dimension 1"]


def test_no_hook_is_left_on_what_comes_out(ranks):
    """Saved, and deeply copied, with it; and it is the user's own where a module returns its input."""
    own = (torch.ones(8, 3, requires_grad=True) * 2).requires_grad_()
    model = mgpu_core.DataParallel(nn.Identity(), ["cpu"] * ranks)
    with tracer.tracing() as trace:
        for _ in range(3):
            output = model(own)
        assert not output._backward_hooks
        assert not own._backward_hooks
        output.sum().backward()
    marks = [each for each in trace.events if getattr(each, "step", "") == "backward"]
    assert [each.rank for each in marks] == list(range(ranks))
    assert {each.whole_step for each in marks} == {max(trace.whole_steps)}
