"""A graph per device: what is recorded, launched and waited for in which order, and that replays are the steps."""

import copy
import cProfile
import gc
import math
import pstats
import warnings
from collections import Counter

import pytest
import torch
from fakes.graphs import Event, Recorder, give_graphs, without_gpu
from step.nets import Branches, mse
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from mgpu_core import TrainStep, convert_sync_batchnorm, optim
from mgpu_core.step.graph_cache import WARM_UP
from mgpu_core.trace import tracer
from mgpu_core.trace.events import Contents

TWO = ["fake:0", "fake:1"]
FOUR = ["fake:0", "fake:1", "fake:2", "fake:3"]
DEVICES = {"two": TWO, "four": FOUR, "shared": ["fake:1", "fake:0", "fake:1"]}


@pytest.fixture(autouse=True)
def the_fakes_have_graphs(monkeypatch):
    give_graphs(monkeypatch, torch.device("fake:0").type)


class Attention(nn.Module):
    """One head over what came before, and a residual, in a checkpoint."""

    def __init__(self, width):
        super().__init__()
        self.mix, self.out, self.norm = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x):
        return checkpoint(self.attend, x, use_reentrant=False)

    def attend(self, x):
        query, key, value = self.mix(self.norm(x)).chunk(3, -1)
        scores = (query @ key.transpose(1, 2)).tril()
        return x + self.out(scores @ value)


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.blocks = nn.Embedding(11, 6), nn.Sequential(Attention(6), Attention(6))

    def forward(self, tokens):
        return self.blocks(self.words(tokens)) @ self.words.weight.T


def mlp():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


def cnn():
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2))


def seeded(i):
    return torch.Generator("cpu").manual_seed(abs(i))


def numbers(i, *shape):
    return torch.randn(*shape, generator=seeded(i), dtype=torch.float64, device="cpu")


def language_loss(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def batch_of(name, i, rows):
    if name == "gpt":
        tokens = torch.randint(11, (rows, 5), generator=seeded(i), device="cpu")
        return tokens, tokens.roll(-1, 1).masked_fill(tokens > 11 - rows + i % 3, -100)
    return numbers(i, rows, *((4,) if name == "mlp" else (1, 6, 6))), numbers(-i, rows, 2)


NETS = {"mlp": (mlp, mse), "cnn": (cnn, mse), "gpt": (Gpt, language_loss)}


def pair(name, devices, make, **settings):
    """Two steps over equal nets: one records, one does not."""
    torch.manual_seed(0)
    net, loss_fn = NETS[name][0]().double().to(devices[0]), NETS[name][1]
    twin = copy.deepcopy(net)
    captured = without_gpu(TrainStep(net, loss_fn, make(net.parameters()), devices, capture=True, **settings))
    return captured, TrainStep(twin, loss_fn, make(twin.parameters()), devices, **settings)


def assert_same(captured, plain):
    for one, other in zip(captured.module.parameters(), plain.module.parameters(), strict=True):
        assert torch.equal(one, other)
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)
    assert all(map(torch.equal, captured.module.buffers(), plain.module.buffers()))
    captured.check_replicas()


def adamw(parameters):
    return optim.AdamW(parameters, lr=0.01)


class Interrupts:
    """A communication hook that adds up the devices, unless it is to be cut off."""

    error = None

    def __call__(self, bucket):
        if self.error is not None:
            raise self.error
        total = bucket.tensors[0].clone()
        for tensor in bucket.tensors[1:]:
            total += tensor.to(total.device)
        for tensor in bucket.tensors:
            tensor.copy_(total)


@pytest.mark.parametrize("workers", ["threads", "caller"])
@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("name", NETS)
def test_replays_are_steps(name, devices, workers):
    """Rows, rates and frozen parameters that change; steps that fail or are cut off at their sums: the same bits."""
    steps = pair(name, DEVICES[devices], adamw, workers=workers, bucket_nbytes=200, clip_norm=0.7)
    schedules = [ExponentialLR(step.optimizer, 0.95) for step in steps]
    hook = Interrupts()
    for step in steps:
        step.register_comm_hook(hook)
    with warnings.catch_warnings(action="ignore"):
        for i in range(28):
            batch = batch_of(name, i, 8 if i % 3 else 3)
            hook.error = {14: ValueError("no"), 17: KeyboardInterrupt()}.get(i)
            if hook.error is not None:
                for step in steps:
                    with pytest.raises(type(hook.error)):
                        step(*batch)
            elif i == 20:
                for step in steps:
                    next(step.module.parameters()).requires_grad_(False)
            else:
                losses = [step(*batch) for step in steps]
                assert torch.equal(*losses)
            assert_same(*steps)
            for schedule in schedules:
                schedule.step()
    assert steps[0].graphs.replays >= 12
    states = [step.optimizer.state_dict()["state"] for step in steps]
    for position, state in states[1].items():
        assert all(torch.equal(states[0][position][key], value) for key, value in state.items())


SETTINGS = {
    "sharded optimizer": {"shard": "optimizer"},
    "narrow sums": {"comm_dtype": torch.float32},
    "torch's optimizer": {},
    "ring": {"algorithm": "ring"},
    "one bucket": {"bucket_nbytes": 1 << 20},
    "a share each": {"shares": [1, 2, 3, 2]},
    "checked": {"error_if_nonfinite": True},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", ["cnn", "gpt"])
def test_the_rest_of_the_step_is_the_ordinary_one(name, settings):
    """Whatever comes after the passes is not recorded, so nothing of it has to be refused."""
    make = torch.optim.AdamW if settings == "torch's optimizer" else optim.AdamW
    steps = pair(name, FOUR, make, **{"bucket_nbytes": 200} | SETTINGS[settings])
    losses = []
    for i in range(10):
        losses.append([step(*batch_of(name, i, 8)) for step in steps])
        if settings != "sharded optimizer":
            assert_same(*steps)
    assert all(torch.equal(*pair) for pair in losses)  # none lies where the next replay writes
    assert steps[0].graphs.replays == 10 - WARM_UP - 1
    values = [step.module.state_dict().values() for step in steps]
    assert all(map(torch.equal, *values))


def test_a_loss_without_labels_on_a_device():
    """And a batch with fewer rows than devices: theirs add nothing, and no sum of an earlier step."""
    steps = pair("gpt", FOUR, adamw)
    with warnings.catch_warnings(action="ignore"):
        for i in range(14):
            tokens, labels = batch_of("gpt", i, 8)
            labels[4:6] = -100  # of device 2
            rows = 8 if i % 2 else 3
            assert torch.equal(*[step(tokens[:rows], labels[:rows]) for step in steps])
            assert_same(*steps)
    assert steps[0].graphs.replays == 14 - 2 * WARM_UP - 1


WINDOWS = {"one": ["fake:0"], "two": TWO, "four": FOUR}


@pytest.mark.parametrize("devices", WINDOWS)
@pytest.mark.parametrize("name", ["cnn", "gpt"])
def test_calls_of_a_window_are_replays(name, devices):
    """Also beside calls that are not: short ones, a flush, failures, outputs, a layout that changes; the same bits."""
    steps = pair(name, WINDOWS[devices], adamw, bucket_nbytes=200, accumulate=3)
    with warnings.catch_warnings(action="ignore"):
        for i in range(54):
            batch = batch_of(name, i, 8 if i % 19 else 3)
            if i in (20, 21, 31, 40):  # in the middle of windows
                for step in steps:
                    if i == 20:
                        step.flush()
                    elif i == 21:
                        next(step.module.parameters()).requires_grad_(False)
                    elif i == 31:
                        with pytest.raises((ValueError, RuntimeError), match="size"):
                            step(batch[0][..., :1], batch[1])
                    else:
                        next(step.module.parameters()).requires_grad_(True)
                continue
            more = {"return_outputs": True} if i == 26 else {}
            results = [step(*batch, **more) for step in steps]
            assert torch.equal(*[each[0] if more else each for each in results])
            assert_same(*steps)
    assert steps[0].steps == steps[1].steps
    assert steps[0].graphs.replays >= 20


def test_a_window_of_other_parameters_in_each_call():
    """Inside no_sync, too, with a rank that has no rows, and a call that cannot be recorded."""
    torch.manual_seed(0)
    nets = [Branches().double().to("fake:0")]
    nets.append(copy.deepcopy(nets[0]))
    steps = [TrainStep(net, mse, adamw(net.parameters()), TWO, capture=net is nets[0]) for net in nets]
    recorder = without_gpu(steps[0])._captured.recorder
    record = recorder.record
    with warnings.catch_warnings(action="ignore"):
        for i in range(30):
            recorder.record = fails if i == 2 * WARM_UP + 1 else record
            for step in steps:
                with step.no_sync():
                    step(numbers(i, 6, 4), 0, numbers(-i, 6, 2))
                rows = 6 if i % 4 else 1
                step(numbers(i, rows, 4), i % 3 % 2, numbers(-i, rows, 2))
            assert_same(*steps)
    assert steps[0].graphs.replays >= 30


def fails(device, work):
    work()
    raise ValueError("no")


def test_branches_in_turn_are_two_recordings():
    """Each knows its own parameters, whatever the step before has used."""
    torch.manual_seed(0)
    nets = [Branches().double().to("fake:0")]
    nets.append(copy.deepcopy(nets[0]))
    steps = [TrainStep(net, mse, adamw(net.parameters()), TWO, capture=net is nets[0]) for net in nets]
    without_gpu(steps[0])
    for i in range(16):
        batch = numbers(i, 6, 4), i % 2, numbers(-i, 6, 2)
        assert torch.equal(*[step(*batch) for step in steps])
        assert_same(*steps)
    assert len(steps[0].graphs) == 2
    assert steps[0].graphs.replays >= 16 - 2 * WARM_UP - 1


def test_a_nan_in_a_replay_is_told_and_leaves_all_as_before():
    steps = pair("cnn", TWO, adamw, error_if_nonfinite=True)
    for i in range(6):
        for step in steps:
            step(*batch_of("cnn", i, 8))
    x, y = batch_of("cnn", 6, 8)
    x[5] = float("nan")
    told = []
    for step in steps:
        with pytest.raises(FloatingPointError) as raised:
            step(x, y)
        told.append(str(raised.value))
    assert told[0] == told[1]
    assert "rank 1" in told[0]
    for i in range(3):
        assert torch.equal(*[step(*batch_of("cnn", i, 8)) for step in steps])
        assert_same(*steps)
    assert steps[0].graphs.replays == 6 - WARM_UP - 1 + 1 + 3


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda net: convert_sync_batchnorm(net), "ranks meet in synchronised layers"),
        (lambda net: (net[0].weight.register_hook(lambda grad: grad), net)[1], "a parameter has a hook"),
    ],
    ids=["meet", "hook"],
)
def test_what_is_not_recorded_says_why(change, reason):
    net = change(cnn().double().to("fake:0"))
    step = without_gpu(TrainStep(net, mse, adamw(net.parameters()), TWO, capture=True))
    step(*batch_of("cnn", 0, 8))
    with pytest.warns(UserWarning, match=f"not captured: {reason}"):
        step(*batch_of("cnn", 1, 8))
    for i in range(5):
        step(*batch_of("cnn", i, 8))
    assert step.graphs.replays == 0


def test_who_is_recorded_launched_and_waited_for():
    """Graphs are launched before any sum, and the sum of a bucket waits for this bucket of every device alone."""
    step, _ = pair("mlp", TWO, adamw, bucket_nbytes=300)
    log = step._captured.recorder.log
    step.register_comm_hook(lambda bucket: log.append(f"sum {bucket.index}"))
    for i in range(WARM_UP + 1):
        step(*batch_of("mlp", i, 8))
    del log[:]
    step(*batch_of("mlp", 8, 8))
    launches = [f"{what} {device}" for device in TWO for what in ["launch", "event", "event", "event"]]
    sums = [f"{what}" for bucket in range(3) for what in ["wait fake:0", "wait fake:1", f"sum {bucket}"]]
    recordings = [f"{what} {device}" for device in TWO for what in ["record", "event", "event", "event"]]
    updates = [f"launch {device}" for device in TWO]
    assert log == [*recordings, "record fake:0", "record fake:1", *launches, *sums, *updates]
    del log[:]
    step(*batch_of("mlp", 9, 8))
    assert log == [*launches, *sums, *updates]
    step.accumulate = 3
    for i in range(3 * WARM_UP):  # calls that add are recorded before the first ones are
        step(*batch_of("mlp", i, 8))
    del log[:]
    for i in range(3):
        step(*batch_of("mlp", i, 8))
    assert log == [*recordings, *launches * 3, *sums, *updates]


class LaunchesNothing(Recorder):
    """Its graphs cost the host a call each, as on a GPU."""

    def record(self, device, work):
        replay, statics = super().record(device, work)
        replay.replay = lambda: self.log.append(f"launch {device}")
        for static in statics:
            static.zero_()
        return replay, statics


class Empty(TorchDispatchMode):
    """Counts the tensors of float64 without values that are made."""

    mgpu_core_thread_safe = True
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.empty.memory_format and (kwargs or {}).get("dtype") == torch.float64
        return func(*args, **kwargs or {})


class LooksInside(Recorder):
    """Notes how much memory of float64 each recording makes."""

    def record(self, device, work):
        empty = Empty()

        def looked_at():
            with empty:
                return work()

        recorded = super().record(device, looked_at)
        self.log.append(f"{empty.count} of {device}")
        return recorded


def test_the_kernels_of_an_update_have_their_memory_from_its_recording():
    """A graph keeps what is made inside; of what is made before, nobody would."""
    net = mlp().to("fake:0")
    step = TrainStep(net, mse, adamw(net.parameters()), TWO, capture=True, bucket_nbytes=150)
    recorder = LooksInside(step)
    without_gpu(step, recorder)
    for i in range(WARM_UP + 2):
        step(torch.ones(4, 4, device="cpu"), torch.full((4, 2), float(i), device="cpu"))
    assert step.graphs.replays == 1, step.graphs.reason
    made = [each for each in recorder.log if " of " in each]
    buckets = sum(each == "wait fake:0" for each in recorder.log)
    assert made == ["0 of fake:0", "0 of fake:1", f"{buckets} of fake:0", f"{buckets} of fake:1"]
    assert buckets > 1


class Copies(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.devices = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default and args[1].device.type == "cpu":
            self.devices[str(args[0].device)] += 1
        return func(*args, **kwargs or {})


def test_a_replay_costs_the_host_few_calls():
    net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(5)]).to("fake:0")
    step = TrainStep(
        net, mse, optim.SGD(net.parameters(), lr=0.1), FOUR, capture=True, bucket_nbytes=288, error_if_nonfinite=False
    )
    recorder = LaunchesNothing(step)
    without_gpu(step, recorder)
    x, y = torch.ones(16, 8, device="cpu"), torch.ones(16, 8, device="cpu")
    for _ in range(WARM_UP + 3):
        step(x, y)
    gc.collect()  # what other tests have left calls functions when it goes
    del recorder.log[:]
    profile = cProfile.Profile()
    torch.set_default_device(None)  # a default device costs a call for each operation
    profile.runcall(step, x, y)
    torch.set_default_device("fake:0")
    calls = pstats.Stats(profile)
    assert calls.total_calls - sum(calls.stats[key][1] for key in calls.stats if "/tests/" in key[0]) <= 660
    counts = Counter(each.split()[0] for each in recorder.log)
    assert counts == {"launch": 4 + 4, "wait": 5 * 4}  # passes, updates
    with Copies() as copies:
        step(x, y)
    assert copies.devices == dict.fromkeys(FOUR, 2)  # the rows of x and y


class Teacher(nn.Module):
    """A loss with a frozen net of its own; ``follow`` assigns new values to it."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2).requires_grad_(False)

    def forward(self, output, x):
        return mse(output, self.net(x))

    def follow(self):
        for parameter in self.net.parameters():
            parameter.data = parameter.data * 0.5


class Normed(nn.Module):
    """Its batch comes in several shapes of one nest, and in two layouts."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 2), nn.BatchNorm1d(2)

    def forward(self, x, sign=1.0):
        if isinstance(x, list):
            x = 2 * x[0]
        elif isinstance(x, tuple):
            x = x[0]
        if not x.is_contiguous():
            x = 3 * x
        return self.norm(self.first(x)) * math.copysign(1.0, sign)

    def follow(self):
        self.norm.running_mean.data = self.norm.running_mean.data + 1


ONE_AND_TWO = pytest.mark.parametrize("devices", [["fake:0"] * 2, TWO], ids=len)


def pair_of(net, loss_fn, devices):
    net, loss_fn = (
        net.double().to("fake:0"),
        loss_fn.double().to("fake:0") if isinstance(loss_fn, nn.Module) else loss_fn,
    )
    twins, settings = (copy.deepcopy(net), copy.deepcopy(loss_fn)), {"error_if_nonfinite": False, "workers": "threads"}
    captured = without_gpu(TrainStep(net, loss_fn, adamw(net.parameters()), devices, capture=True, **settings))
    plain = TrainStep(*twins, adamw(twins[0].parameters()), devices, static_graph=True, **settings)
    return captured, plain


@ONE_AND_TWO
@pytest.mark.parametrize("where", ["buffer", "loss"])
def test_values_that_are_assigned_between_replays_are_seen(devices, where):
    """The memory of before may be gone, though the tensor is the same."""
    steps = pair_of(Normed(), mse, devices) if where == "buffer" else pair_of(nn.Linear(4, 2), Teacher(), devices)
    for i in range(18):
        x = numbers(i, 8, 4)
        if i % 8 == 7:
            for step in steps:
                (step.module if where == "buffer" else step.loss_fn).follow()
        assert torch.equal(*[step(x, numbers(-i, 8, 2) if where == "buffer" else x) for step in steps])
        assert_same(*steps)
    assert steps[0].graphs.replays >= 5


@ONE_AND_TWO
def test_batches_that_differ_in_more_than_shapes_are_recorded_apart(devices):
    steps = pair_of(Normed(), mse, devices)
    kinds = [
        lambda x: ((x,), {}),
        lambda x: (([x],), {}),
        lambda x: (((x,),), {}),
        lambda x: ((x.T.contiguous().T,), {}),
        lambda x: ((x,), {"sign": 0.0}),
        lambda x: ((x,), {"sign": -0.0}),
    ]
    with warnings.catch_warnings(action="ignore"):
        for first in (0, 3):
            for i in range(18):
                args, kwargs = kinds[first + i % 3](numbers(i, 8, 4))
                assert torch.equal(*[step(*args, numbers(-i, 8, 2), **kwargs) for step in steps])
                assert_same(*steps)
            assert len(steps[0].graphs) == (3 if first == 0 else 4)


def test_states_that_are_loaded_leave_the_graphs_of_several_devices():
    steps = pair("mlp", TWO, adamw)
    for i in range(20):
        assert torch.equal(*[step(*batch_of("mlp", i, 8)) for step in steps])
        for step in steps if i % 4 == 3 else ():
            step.load_state_dict(copy.deepcopy(step.state_dict()))
            step.optimizer.load_state_dict(copy.deepcopy(step.optimizer.state_dict()))
    assert len(steps[0].graphs) == 1
    assert steps[0].graphs.replays == 20 - WARM_UP - 1


class Twice(nn.Module):
    """The inner layer's gradients are made twice: by a reentrant checkpoint, and after it."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        x = x.requires_grad_(True)
        return self.last(checkpoint(self.inner, self.inner(x), use_reentrant=True))


def test_a_bucket_that_is_added_to_has_another_event():
    """A graph that recorded one twice would let the sums go on at the first."""
    net = Twice().double().to("fake:0")
    step = without_gpu(TrainStep(net, mse, adamw(net.parameters()), TWO, capture=True, bucket_nbytes=64))
    step._captured.recorder.event = lambda: RecordedOnce([])
    for i in range(WARM_UP + 3):
        step(numbers(i, 8, 4), numbers(-i, 8, 2))
    assert step.graphs.replays == 2, step.graphs.reason


class RecordedOnce(Event):
    def record(self, stream):
        assert self._event is None
        super().record(stream)


def test_a_trace_of_a_replay_has_its_sums():
    step, plain = pair("mlp", TWO, adamw, bucket_nbytes=300)
    for i in range(WARM_UP + 2):
        step(*batch_of("mlp", i, 8))
        plain(*batch_of("mlp", i, 8))
    contents = []
    for each in (step, plain):
        with tracer.tracing() as recording:
            each(*batch_of("mlp", 9, 8))
        contents.append([(event.step, event.bucket) for event in recording.events if isinstance(event, Contents)])
    assert step.graphs.replays == 2, step.graphs.reason
    assert sorted(contents[0]) == sorted(contents[1]) != []
