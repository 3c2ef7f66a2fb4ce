"""The headings of the page on troubleshooting are messages that come, word for word.

Each is provoked here, or it is a string of the package; the page writes `...` for what differs.
"""

import re
import threading
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
from fakes.said import is_said
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.overrides import TorchFunctionMode

import mgpu_core
from mgpu_core import DataParallel, Replicate, gather
from mgpu_core.devices import drop_in

PAGE = (Path(__file__).parent.parent.parent / "docs" / "troubleshooting.md").read_text()
QUOTED = re.findall(r"^### `(.+?)`", PAGE, flags=re.MULTILINE)
OF_CPP = "terminate called without an active exception"  # said by C++ itself, when a process ends


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.function = function

    def forward(self, *args):
        return self.function(self, *args)


def over_two_ranks(function, *inputs, **options):
    return lambda: DataParallel(Call(function), ["cpu"] * 2, **options)(*inputs)


def same(self, *inputs):
    return inputs


def forward_of(module, *inputs, ranks=2):
    return lambda: DataParallel(module, ["cpu"] * ranks)(*inputs)


def assign(self, x):
    self.seen = x
    return x


class Mode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class SafeMode(Mode):
    mgpu_core_thread_safe = True


def in_a_mode():
    with Mode():
        DataParallel(nn.Linear(2, 2), ["cpu"] * 2)(ROWS)


def in_a_transform():
    torch.func.vmap(DataParallel(nn.Linear(2, 2), ["cpu"] * 2))(torch.ones(3, 4, 2))


class Holder:
    def __init__(self):
        self.x = torch.ones(4)


def without_accelerators():
    with mock.patch.object(drop_in, "has_accelerator", return_value=False):
        DataParallel(nn.Linear(2, 2), [0, 1])


def compiled_with_a_hook():
    net = torch.compile(nn.Linear(2, 2), backend="eager")
    net.register_forward_hook(lambda *_: None)
    DataParallel(net, ["cpu"] * 2)(ROWS)


def stepped(loss_fn=nn.functional.mse_loss):
    net = nn.Linear(2, 2)
    return mgpu_core.TrainStep(net, loss_fn, mgpu_core.optim.SGD(net.parameters(), lr=0.1), ["cpu"] * 2)


def too_slow(monkeypatch):
    end = threading.Event()
    monkeypatch.setenv("MGPU_CORE_TIMEOUT", "0.2")
    try:
        over_two_ranks(lambda self, x: end.wait() or x, ROWS)()
    finally:
        end.set()


def bad_variable(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("MGPU_CORE_CPU_RANKS", "many")
    DataParallel(nn.Linear(2, 2))


ROWS = torch.ones(4, 2)

# The beginning of a heading: what raises it, or warns of it.
PROVOKED = {
    "module must have": forward_of(nn.Linear(2, 2, device="meta"), ROWS),
    "the inputs differ": over_two_ranks(same, ROWS, torch.ones(5)),
    "... has shape ... and cannot": over_two_ranks(same, torch.ones(4), dim=1),
    "... is a PackedSequence": over_two_ranks(same, pack_sequence([torch.ones(1)])),
    "... is a nested": over_two_ranks(same, torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)),
    "... is a sparse": over_two_ranks(same, torch.eye(2).to_sparse()),
    "... is a quantized": lambda: over_two_ranks(same, torch.quantize_per_tensor(ROWS, 1.0, 0, torch.quint8))(),
    "... is on the meta": over_two_ranks(same, torch.ones(4, device="meta")),
    "... cannot be gathered": over_two_ranks(lambda self, x: x.sum().item(), torch.arange(4.0)),
    "the ranks' outputs differ": over_two_ranks(lambda self, x: list(x), torch.ones(3, 2)),
    "All dicts must": lambda: gather([{"a": ROWS}, {}], "cpu"),
    "... which does not fit": lambda: gather([torch.ones(2, 3), torch.ones(2, 4)], "cpu"),
    "Was asked to gather": over_two_ranks(lambda self, x: x.sum(), ROWS),
    "Dimension specified": over_two_ranks(lambda self, x: x.sum(), ROWS, dim=1),
    "Caught": over_two_ranks(lambda self, x: {}["key"], ROWS),
    "Expected more than": forward_of(nn.BatchNorm1d(2), ROWS[:2]),
    "the forward of ... assigns": over_two_ranks(assign, ROWS),
    "Attempted to use": forward_of(nn.LazyLinear(2), ROWS),
    "shares must": over_two_ranks(same, ROWS, shares=[1]),
    "shares[": over_two_ranks(same, ROWS, shares=[1, 0]),
    "device ... does": lambda: DataParallel(nn.Linear(2, 2), ["cpu", "cuda:77"]),
    "device_ids is": lambda: DataParallel(nn.Linear(2, 2), "cpu"),
    "Using -1": lambda: gather([ROWS], -1),
    "MGPU_CORE_CPU_RANKS": bad_variable,
    "rng must": over_two_ranks(same, ROWS, rng="mine"),
    "rank ... did": too_slow,
    "... is an active": in_a_mode,
    "a forward over": in_a_transform,
    "... which holds tensors": over_two_ranks(same, Holder()),
    "there is no accelerator": without_accelerators,
    "... was compiled": compiled_with_a_hook,
    "element 0": lambda: stepped()(ROWS, ROWS).backward(),
    "the batch has": lambda: stepped()(ROWS[:0], ROWS[:0]),
    "the loss must": lambda: stepped(lambda *_: 3.0)(ROWS, ROWS),
}


def told(provoke, monkeypatch):
    """All that is said: warnings, the exception and its notes."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        said = []
        try:
            provoke(monkeypatch) if provoke in (too_slow, bad_variable) else provoke()
        except (ValueError, TypeError, IndexError, RuntimeError, KeyError, mgpu_core.Error) as error:
            said += [str(error), *getattr(error, "__notes__", [])]
        return "\n".join([*said, *(str(warning.message) for warning in caught)])


def test_each_provoked_message_is_one_heading():
    for beginning in PROVOKED:
        assert sum(quoted.startswith(beginning) for quoted in QUOTED) == 1, beginning


def test_other_headings_are_strings_of_the_package():
    others = [quoted for quoted in QUOTED if not quoted.startswith((*PROVOKED, OF_CPP))]
    assert [quoted for quoted in others if not is_said(quoted)] == []
    assert len(others) > 20


@pytest.mark.parametrize("beginning", PROVOKED)
def test_message_is_word_for_word(beginning, monkeypatch):
    quoted = next(quoted for quoted in QUOTED if quoted.startswith(beginning))
    pattern = ".*".join(re.escape(part) for part in quoted.split("..."))
    text = told(PROVOKED[beginning], monkeypatch)
    assert re.search(pattern, text, flags=re.DOTALL), text


def test_what_the_page_advises_helps():
    table = torch.eye(2).to_sparse()
    net = Call(lambda self, x, whole, rows: x @ whole.to_dense() + rows.sum())
    out = DataParallel(net, ["cpu"] * 2)(ROWS, Replicate(table), Replicate(torch.ones(5)))
    assert out.tolist() == [[6, 6]] * 4
    with SafeMode():
        assert DataParallel(nn.Linear(2, 2), ["cpu"] * 2)(ROWS).shape == (4, 2)


@pytest.mark.parametrize(
    "quoted",
    [
        "torch sees 2 GPUs and mgpu_core's CUDA runtime 0",  # a value is not part of the message
        "NoSuchError: no usable NCCL: ...",
        "the optimizer's group ..., is no one of net.parameters()",
        "are no longer those of this step ... the parameters of",
        "Raises unless the user's module has the parameters",  # a docstring
        "are not closed either",  # a comment
    ],
)
def test_what_nobody_says_is_not_found(quoted):
    assert not is_said(quoted)
