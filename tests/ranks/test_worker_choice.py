"""Threads or the caller's thread: what is measured, what is kept, and where only threads will do."""

import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from fakes.nets import cpu
from torch import nn
from torch.nn import functional as F

from mgpu_core import DataParallel, TrainStep, convert_sync_batchnorm, optim
from mgpu_core.ranks.worker_choice import SAMPLES, WARM_UP, WorkerChoice, check_workers, size_of

pytestmark = pytest.mark.usefixtures("with_gil")
CPUS, OTHERS = [torch.device("cpu")] * 2, [torch.device("meta")] * 2  # which stands for an accelerator
CALLS = 2 * (WARM_UP + SAMPLES)


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves on."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: SimpleNamespace(synchronize=list))
    return now


def call(choice, clock, seconds, size=(4,)):
    """One call, which takes the time of its way; returns the way."""
    is_timed = choice.begin(size)
    clock[0] += seconds[choice.now]
    if is_timed:
        choice.end(size)
    return choice.now


@pytest.mark.parametrize("faster", ["threads", "caller"])
def test_the_faster_way_is_kept(faster, clock):
    choice = WorkerChoice("auto", OTHERS, "auto")
    seconds = {"threads": 2.0, "caller": 2.0} | {faster: 1.0}
    tried = [call(choice, clock, seconds) for _ in range(CALLS)]
    assert tried.count("threads") == tried.count("caller") == CALLS // 2
    assert [call(choice, clock, seconds) for _ in range(5)] == [faster] * 5
    assert choice.chosen() == [[[4], faster]]


def test_each_size_is_measured(clock):
    choice = WorkerChoice("auto", OTHERS, "auto")
    for _ in range(CALLS):
        call(choice, clock, {"threads": 1.0, "caller": 2.0}, size=(4,))
        call(choice, clock, {"threads": 2.0, "caller": 1.0}, size=(64,))
    assert call(choice, clock, {"threads": 9.0, "caller": 9.0}, size=(4,)) == "threads"
    assert call(choice, clock, {"threads": 9.0, "caller": 9.0}, size=(64,)) == "caller"


def test_the_first_calls_count_for_nothing(clock):
    choice = WorkerChoice("auto", OTHERS, "auto")
    for i in range(CALLS):
        call(choice, clock, {"threads": 100.0 if i < 2 * WARM_UP else 1.0, "caller": 2.0})
    assert choice.chosen() == [[[4], "threads"]]


@pytest.mark.parametrize(
    "choice",
    [
        lambda: WorkerChoice("threads", OTHERS, "auto"),
        lambda: WorkerChoice("auto", OTHERS, "per_rank"),
        lambda: WorkerChoice("auto", OTHERS[:1], "auto"),
    ],
)
def test_where_there_is_nothing_to_choose_it_is_threads(choice, clock):
    choice = choice()
    assert {call(choice, clock, {"threads": 2.0, "caller": 1.0}) for _ in range(CALLS + 2)} == {"threads"}
    assert choice.chosen() == []


@pytest.mark.parametrize("devices", [CPUS, [OTHERS[0], CPUS[0]]])
@pytest.mark.parametrize("rng", ["auto", "per_rank"])
def test_on_the_cpu_it_is_always_the_caller(devices, rng, clock):
    choice = WorkerChoice("auto", devices, rng)
    assert {call(choice, clock, {"threads": 1.0, "caller": 2.0}) for _ in range(CALLS + 2)} == {"caller"}
    choice.resume([[[4], "threads"]])
    assert call(choice, clock, {"threads": 1.0, "caller": 2.0}) == "caller"
    assert choice.chosen() == []
    assert not choice.begin((4,), meets=True)
    assert choice.now == "threads"


@pytest.fixture
def without_gil(with_gil, monkeypatch):
    monkeypatch.setattr("sys._is_gil_enabled", lambda: False, raising=False)


@pytest.mark.usefixtures("without_gil")
def test_without_the_gil_it_is_threads():
    choice = WorkerChoice("auto", OTHERS, "auto")
    assert not choice.begin((4,))
    assert choice.now == "threads"


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_deterministic_algorithms_ask_for_threads():
    choice = WorkerChoice("auto", OTHERS, "auto")
    with deterministic():
        assert not choice.begin((4,))
        assert choice.now == "threads"


def test_ranks_that_meet_get_threads():
    for asked in ("auto", "threads"):
        choice = WorkerChoice(asked, OTHERS, "auto")
        assert not choice.begin((4,), meets=True)
        assert choice.now == "threads"


def test_calls_of_several_threads_may_end_after_the_choice(clock):
    """A wrapper is called from several threads: the last timed calls end when the choice has been made."""
    choice = WorkerChoice("auto", OTHERS, "auto")
    for _ in range(CALLS):
        assert choice.begin((4,))
    for _ in range(CALLS):
        call(choice, clock, {"threads": 1.0, "caller": 2.0})
    choice.end((4,))
    assert choice.chosen() == [[[4], "threads"]]


def test_a_choice_goes_on_from_a_state(clock):
    first, second = (WorkerChoice("auto", OTHERS, "auto") for _ in range(2))
    for _ in range(CALLS):
        call(first, clock, {"threads": 2.0, "caller": 1.0})
    second.resume(first.chosen())
    assert call(second, clock, {"threads": 1.0, "caller": 9.0}) == "caller"
    fixed = WorkerChoice("threads", OTHERS, "auto")
    fixed.resume(first.chosen())
    assert call(fixed, clock, {"threads": 1.0, "caller": 9.0}) == "threads"


def test_names_and_sizes():
    check_workers("caller")
    with pytest.raises(ValueError, match="workers must be one of threads, caller, auto, not 'processes'"):
        check_workers("processes")
    assert size_of([torch.ones(2, 3), torch.ones(1)]) == (2, 3)
    assert size_of([1]) is size_of([]) is None


# In a step, and in the drop-in.


def data(rows=16):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 8, generator=generator).double(), torch.arange(rows) % 4


def net_of(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), *more, nn.ReLU(), nn.Linear(6, 4)).double()


@pytest.mark.several_ranks
def test_a_step_says_how_its_ranks_run_and_keeps_it_in_its_state(ranks):
    net = net_of()
    step = TrainStep(net, F.cross_entropy, optim.SGD(net.parameters(), lr=0.1), cpu(ranks))
    for _ in range(CALLS + 1):
        step(*data())
    way, measures = step.plan()[0].workers, torch.device(cpu(1)[0]).type != "cpu"
    assert [each.workers for each in step.plan()] == [way] * ranks
    assert measures or way == "caller"
    state = step.state_dict()
    assert state["workers"] == ([[[16, 8], way]] if measures else [])
    other = net_of()
    resumed = TrainStep(other, F.cross_entropy, optim.SGD(other.parameters(), lr=0.1), cpu(ranks))
    for kept in ("caller", "threads"):
        state["workers"] = [[[16, 8], kept]]
        resumed.load_state_dict(state)
        resumed(*data())
        assert resumed.plan()[0].workers == (kept if measures else "caller")
    del state["workers"]  # a state of before
    resumed.load_state_dict(state)


@pytest.mark.usefixtures("without_gil")
@pytest.mark.several_ranks
def test_without_the_gil_a_step_and_the_drop_in_measure_nothing(ranks):
    class Notes(nn.Linear):
        def forward(self, x):
            seen.append(threading.get_ident())
            return super().forward(x)

    seen, net = [], Notes(8, 4).double()
    step = TrainStep(net, F.cross_entropy, optim.SGD(net.parameters(), lr=0.1), cpu(ranks), workers="auto")
    wrapper = DataParallel(net, cpu(ranks), workers="auto")
    step.check_loss(*data())
    for call in (lambda: step(*data()), lambda: wrapper(data()[0])):
        for _ in range(CALLS):
            seen.clear()
            call()
            assert (len(set(seen)) == ranks) == (torch.device(cpu(1)[0]).type != "cpu")
            assert (threading.get_ident() in seen) == (torch.device(cpu(1)[0]).type == "cpu")
    assert step.state_dict()["workers"] == []


NETS = {
    "mlp": lambda: nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4)),
    "dropout": lambda: nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.3), nn.Linear(64, 4)),
    "wide": lambda: nn.Sequential(nn.Linear(8, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 4)),
    "cnn": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 4)), nn.Conv2d(1, 8, 2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
        nn.Linear(120, 4),
    ),
    "encoder": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 4)), nn.TransformerEncoderLayer(4, 2, 64, 0.1, batch_first=True), nn.Flatten(),
        nn.Linear(8, 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("net", NETS)
def test_twenty_runs_with_the_defaults_have_the_same_bits(net, threads):
    before, results = torch.get_num_threads(), set()
    x, y = torch.randn(512, 8, generator=torch.Generator().manual_seed(1)), torch.arange(512) % 4
    torch.set_num_threads(threads)
    try:
        for _ in range(20):
            torch.manual_seed(0)
            module = NETS[net]()
            step = TrainStep(module, F.cross_entropy, optim.AdamW(module.parameters(), lr=0.01), ["cpu"] * 2)
            losses = [float(step(x, y)) for _ in range(9)]
            results.add((*losses, *(float(each.double().sum()) for each in module.parameters())))
            step.close()
    finally:
        torch.set_num_threads(before)
    assert len(results) == 1


@pytest.mark.parametrize("dropout", [(), (nn.Dropout(0.5),)])
@pytest.mark.several_ranks
def test_both_ways_give_the_same_bits_with_one_intra_op_thread(ranks, dropout):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        results = []
        for workers in ("threads", "caller"):
            net = net_of(*dropout)
            step = TrainStep(net, F.cross_entropy, optim.SGD(net.parameters(), lr=0.1), cpu(ranks), workers=workers)
            torch.manual_seed(3)
            results.append([*[step(*data()) for _ in range(4)], *net.parameters()])
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *results))


class Checkpointed(nn.Module):
    """Recomputes its inside in the backward, with dropout."""

    def __init__(self, reentrant):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.5), nn.Linear(6, 4)).double()
        self.reentrant = reentrant

    def forward(self, x):
        if self.reentrant is None:
            return self.inner(x)
        return torch.utils.checkpoint.checkpoint(self.inner, x.requires_grad_(), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("workers", ["threads", "caller"])
@pytest.mark.several_ranks
def test_a_checkpoint_draws_the_numbers_of_its_own_rank_again(ranks, workers, reentrant):
    gradients = []
    for way in (None, reentrant):
        torch.manual_seed(0)
        net = Checkpointed(way)
        step = TrainStep(net, F.cross_entropy, optim.SGD(net.parameters(), lr=0.1), cpu(ranks), workers=workers)
        torch.manual_seed(3)
        step(*data())
        gradients.append([each.grad for each in net.parameters()])
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(*gradients, strict=True))


def test_the_caller_is_refused_where_ranks_meet():
    net = convert_sync_batchnorm(net_of(nn.BatchNorm1d(6)))
    with pytest.raises(ValueError, match=r'workers="caller" .* meet in synchronised layers'):
        TrainStep(net, F.cross_entropy, optim.SGD(net.parameters(), lr=0.1), cpu(2), workers="caller")
    step = TrainStep(net, F.cross_entropy, optim.SGD(net.parameters(), lr=0.1), cpu(2))
    step(*data())
    assert step.plan()[0].workers == "threads"


@pytest.mark.parametrize("workers", ["threads", "caller", "auto"])
def test_the_drop_in_computes_the_same_in_every_way(ranks, workers):
    net = net_of()
    x, y = data()
    F.cross_entropy(net(x), y).backward()
    wanted = [each.grad.clone() for each in net.parameters()]
    wrapped = DataParallel(net, cpu(ranks), workers=workers)
    for _ in range(CALLS + 2):
        net.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        assert all(torch.allclose(a.grad, b, rtol=0, atol=1e-12) for a, b in zip(net.parameters(), wanted, strict=True))


def test_a_failure_in_the_callers_thread_names_its_rank():
    class Fails(nn.Linear):
        def forward(self, x):
            if x[0, 0] > 7:
                raise KeyError("as asked")
            return super().forward(x)

    net = Fails(8, 4).double()
    x = torch.arange(16.0).double()[:, None].expand(16, 8).contiguous()
    with pytest.raises(KeyError, match="Caught KeyError in replica 1 on device cpu"):
        DataParallel(net, cpu(2), workers="caller")(x)
    step = TrainStep(net, F.mse_loss, optim.SGD(net.parameters(), lr=0.1), cpu(2), workers="caller")
    with pytest.raises(KeyError, match="Caught KeyError in replica 1 on device cpu"):
        step(x, torch.zeros(16, 4).double())
    step(x[:8] * 0, torch.zeros(8, 4).double())
    assert step.steps == 1
