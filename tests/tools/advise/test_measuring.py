"""What is measured, without a clock that could matter: batches, memory, turns, budgets, loaders, failures."""

import contextlib
import types
from contextlib import closing

import pytest
import torch
from torch import nn

from mgpu_core.errors import Error
from mgpu_core.tools.advise.batches import batch_sizes, resized
from mgpu_core.tools.advise.benchmark import Budget, contest, steps_a_turn, stopwatch
from mgpu_core.tools.advise.from_trace import Peaks
from mgpu_core.tools.advise.host_share import HostShare, measured_share
from mgpu_core.tools.advise.loading import loader_seconds, rows_of
from mgpu_core.tools.advise.memory import count_memory
from mgpu_core.tools.advise.plan import plan_of
from mgpu_core.tools.advise.strategies import CAPTURED, DROP_IN, ENGINE, ONE, Loop, StepEngine, first_line, makers

F4 = 4  # bytes of a float


def small():
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


def planned(net=None, rows=6, ranks=2, **options):
    standard = {"device_ids": ["cpu"] * ranks, "batches": None, "optimizer": None, "loader": None}
    options = standard | {"repeats": 4, "seconds": 5} | options
    sample = torch.ones(rows, 4), torch.ones(rows, 2)
    return plan_of(small() if net is None else net, nn.functional.mse_loss, sample, **options)


def test_sizes_of_batches():
    assert batch_sizes(64, 2) == (16, 64, 256)
    assert batch_sizes(4, 3) == (3, 4, 16)
    assert batch_sizes(2, 2) == (2, 8)


def test_the_samples_own_batch_is_always_measured():
    assert planned(rows=8, batches=[32, 4]).batches == (4, 8, 32)
    assert planned(rows=8).batches == (2, 8, 32)


def test_ranks_of_this_machine(monkeypatch):
    monkeypatch.setattr("mgpu_core.tools.advise.plan.default_devices", list)
    assert planned(device_ids=None).devices == (torch.device("cpu"),) * 2
    monkeypatch.setattr("mgpu_core.tools.advise.plan.default_devices", lambda: [torch.device("cpu")] * 3)
    assert len(planned(device_ids=None).devices) == 3


def test_batches_repeat_or_cut_the_sample_in_memory_of_their_own():
    x = torch.arange(3.0).requires_grad_()
    (more,), (less,), (same,) = (resized([x], rows) for rows in (7, 2, 3))
    assert more.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert less.tolist() == [0, 1]
    same[0] = 9
    assert x[0] == 0
    assert not more.requires_grad
    image = torch.ones(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    assert resized([image], 5)[0].is_contiguous(memory_format=torch.channels_last)


def test_memory_of_a_small_net_by_hand():
    """Activations: the input, relu's result (the second layer's input is the same memory), the loss's two operands."""
    plan = planned(rows=10)
    found = count_memory(plan, resized(plan.sample, 5))
    assert found.parameters_nbytes == found.gradients_nbytes == (4 * 3 + 3 + 3 * 2 + 2) * F4
    assert found.optimizer_nbytes == 0
    assert found.activations_nbytes == (5 * 4 + 5 * 3 + 5 * 2 + 5 * 2) * F4
    assert found.total_nbytes == 2 * 23 * F4 + 55 * F4
    assert found.peaks == ()


def test_memory_counts_states_buffers_and_frozen_parameters():
    net = nn.Sequential(small(), nn.BatchNorm1d(2))  # weight, bias; mean, var, and a count of 8 bytes
    net[0][0].requires_grad_(False)
    plan = planned(net, optimizer=lambda parameters: torch.optim.Adam([p for p in parameters if p.requires_grad]))
    found = count_memory(plan, plan.sample)
    assert found.parameters_nbytes == (23 + 4 + 4) * F4 + 8
    assert found.gradients_nbytes == (8 + 4) * F4
    assert found.optimizer_nbytes == 2 * (8 + 4) * F4 + 4 * F4  # two moments; a step count of each of four tensors


def test_peaks_are_beyond_what_was_held_before(monkeypatch):
    held, done = {"cuda:0": 100, "cuda:1": 10}, []
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda gpu: held[str(gpu)])
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda gpu: 5 * held[str(gpu)])
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda gpu: done.append(f"wait {gpu}"))
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda gpu: done.append(f"reset {gpu}"))
    peaks = Peaks([torch.device("cuda", 0), torch.device("cuda", 1)])
    peaks.begin()
    assert done == ["wait cuda:0", "reset cuda:0", "wait cuda:1", "reset cuda:1"]
    assert peaks.found() == (("cuda:0", 400), ("cuda:1", 40))
    assert done[4:] == ["wait cuda:0", "wait cuda:1"]


def test_the_hosts_share_of_a_step(monkeypatch):
    """The host takes 3 s for each forward and 5 s for each backward; the GPU, by its events, 0.04 s."""
    now, rows, slept = [0.0], [], []

    class Asked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x):
            rows.append(len(x))
            now[0] += 3
            output = self.layer(x)
            output.register_hook(self.backward)
            return output

        def backward(self, _):
            now[0] += 5

    class Event:
        def record(self):
            pass

        def query(self):
            return False

        def synchronize(self):
            pass

        def elapsed_time(self, _):
            return 40.0

    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event())
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    assert measured_share(planned(Asked(), rows=15, ranks=3)) == HostShare(5, 3.0, 5.0, 0.04)
    assert set(rows) == {2, 5}  # the host's and the GPU's
    assert len(slept) == rows.count(5) - Loop.warm_up  # the GPU is never in front of the host


class Clock:
    """A stopwatch that says what the test wants, and remembers who was on."""

    def __init__(self, seconds, fails=()):
        self.seconds, self.fails, self.turns = seconds, fails, []

    def __call__(self, way, rows, step, count):
        self.turns.append(way)
        if way in self.fails and len(self.turns) > self.fails[way]:
            raise torch.OutOfMemoryError("out of memory\nmore about it")
        step()
        return self.seconds[way]


def entered(plan, names):
    every = makers(plan)
    return {name: every[name] for name in names}


def test_ways_take_turns():
    plan = planned()
    clock = Clock({ONE: 2.0, DROP_IN: 3.0, ENGINE: 1.0})
    found = contest(entered(plan, (ONE, DROP_IN, ENGINE)), resized(plan.sample, 6), 4, Budget(1e6), clock)
    assert clock.turns == [ONE] * 3 + [DROP_IN] * 3 + [ENGINE] * 3 + [ONE, DROP_IN, ENGINE] * 4
    assert [(each.way, each.batch, each.seconds) for each in found] == [
        (ONE, 6, (2.0,) * 4),
        (DROP_IN, 6, (3.0,) * 4),
        (ENGINE, 6, (1.0,) * 4),
    ]


@pytest.mark.parametrize("turns", [0, 4, 7])
def test_a_way_that_fails_is_out_and_the_others_go_on(turns):
    plan = planned()
    clock = Clock({ONE: 2.0, ENGINE: 1.0}, fails={ONE: turns})
    one, engine = contest(entered(plan, (ONE, ENGINE)), resized(plan.sample, 6), 4, Budget(1e6), clock)
    assert (one.seconds, one.median_s, one.error) == ((), None, "OutOfMemoryError: out of memory")
    assert engine.seconds == (1.0,) * 4


def test_a_time_that_is_up_leaves_three_repeats():
    plan = planned()
    found = contest(entered(plan, (ONE,)), resized(plan.sample, 6), 9, Budget(-1.0), Clock({ONE: 1.0}))
    assert found[0].seconds == (1.0,) * 3
    found = contest(entered(plan, (ONE,)), resized(plan.sample, 6), 2, Budget(-1.0), Clock({ONE: 1.0}))
    assert found[0].seconds == (1.0,) * 2


def test_ways_are_closed_when_somebody_interrupts():
    closed = []
    way = types.SimpleNamespace(warm_up=1, step=lambda batch: None, check=lambda: None, close=lambda: closed.append(1))

    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        contest({ONE: lambda: way}, (torch.ones(2),), 3, Budget(1), interrupt)
    assert closed == [1]


def test_short_steps_are_counted_together():
    assert [steps_a_turn(seconds) for seconds in (1.0, 0.02, 0.01, 0.0011, 0.0)] == [1, 1, 2, 19, 50]


def test_the_stopwatch_does_as_many_steps_as_it_is_told():
    done = []
    assert stopwatch((torch.device("cpu"),))(ONE, 4, lambda: done.append(1), 3) >= 0
    assert len(done) == 3


def test_budgets_are_parts_of_what_is_left():
    now = [10.0]
    budget = Budget(6.0, lambda: now[0])
    now[0] = 12.0
    assert (budget.left, budget.part(2).left) == (4.0, 2.0)


def test_which_ways_there_are(monkeypatch):
    assert list(makers(planned())) == [ONE, DROP_IN, ENGINE]
    assert list(makers(planned(ranks=1))) == [ONE, ENGINE]
    monkeypatch.setattr("mgpu_core.tools.advise.strategies.GRAPH_DEVICE", "cpu")
    assert list(makers(planned())) == [ONE, DROP_IN, ENGINE, CAPTURED]


def test_a_capture_that_does_not_happen_is_a_failure(monkeypatch):
    monkeypatch.setattr("mgpu_core.tools.advise.strategies.GRAPH_DEVICE", "cpu")
    plan = planned()
    with pytest.warns(UserWarning, match="this step is not captured"):
        found = contest(entered(plan, (CAPTURED,)), plan.sample, 3, Budget(1e6), Clock({CAPTURED: 1.0}))
    assert found[0].error == "Error: not captured: there are no CUDA graphs on cpu"


def test_replays_are_what_captured_means():
    with closing(StepEngine(planned(), capture=True)) as way:
        assert way.warm_up == 5
        with pytest.raises(Error, match="not captured: it is one of the first"):
            way.check()
        way._step.graphs.replays = 1
        way.check()


def test_errors_in_a_line():
    assert first_line(ValueError("\n  one \ntwo")) == "ValueError: one"
    assert first_line(KeyError()) == "KeyError"
    told = RuntimeError("Caught RuntimeError in replica 1 on device cpu.\nOriginal Traceback ...")
    told.__cause__ = RuntimeError("no memory\nleft")
    assert first_line(told) == "RuntimeError: no memory (in replica 1 on device cpu)"


def loading(batches, steps, workers=None):
    """Seconds for 4 rows, if each look at the clock finds the next of these times."""
    loader = batches if workers is None else type("Loader", (list,), {"num_workers": workers})(batches)
    times = iter(steps)
    return loader_seconds(loader, 4, Budget(1e6), lambda: next(times))


def test_loading_is_the_median_behind_the_first_batch():
    batch = torch.ones(4, 1), torch.ones(4)
    times = [0, 100, 101, 101, 104, 104, 106, 106, 107, 107, 108]  # the first is not looked at; then 1 3 2 1 1
    assert loading([batch] * 9, times) == 1
    assert loading([batch] * 2, [0, 100, 102, 102]) == 2


def test_loading_counts_rows_and_rounds_of_workers():
    assert loading([{"x": torch.ones(8, 1)}] * 2, [0, 1, 3, 3]) == 1  # 8 rows in 2 s
    batch = torch.ones(4, 1)
    assert loading([batch] * 4, [0, 100, 106, 106], workers=2) == 3  # two batches in 6 s
    with pytest.raises(ValueError, match="too few batches to be measured: wanted 4 or more"):
        loading([batch] * 3, [0, 1], workers=2)


def test_rows_of_batches():
    assert rows_of([{"n": 3, "x": torch.ones(5, 2)}, torch.ones(7)]) == 5
    assert [rows_of(each) for each in ("text", torch.tensor(1.0), [], None)] == [None] * 4
