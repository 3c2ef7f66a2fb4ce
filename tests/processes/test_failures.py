"""A process that fails, dies, is interrupted or differs: the others are told, nobody hangs, nothing is half done."""

import contextlib
import os
import signal
import threading
import time

import pytest
import torch
from fakes.nets import whole
from processes.world import Ended, run
from torch import nn
from torch.distributed import group
from torch.optim import SGD, Adam
from train.nets import Linear

import mgpu_core
from mgpu_core import TrainStep
from mgpu_core.processes.group import Processes


def total(output, target):
    return (output * target).sum()


def values_of(net):
    return [each.detach().clone() for each in net.parameters()]


class _Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, act):
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.act()
        return grad, None


class Fragile(nn.Module):
    """Calls `acts[phase]` in that phase of a rank, for rows that begin with a 9."""

    def __init__(self, acts):
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)
        self.acts = acts
        whole(self)

    def __deepcopy__(self, memo):
        twin = Fragile(self.acts)
        with torch.no_grad():
            for own, theirs in zip(self.parameters(), twin.parameters(), strict=True):
                memo[id(own)] = memo.get(id(own), theirs)
        twin.first.weight, twin.first.bias = memo[id(self.first.weight)], memo[id(self.first.bias)]
        twin.last.weight, twin.last.bias = memo[id(self.last.weight)], memo[id(self.last.bias)]
        return twin

    def forward(self, x):
        armed = bool((x == 9).any())
        if armed:
            self.acts.get("forward", int)()
        hidden = self.first(x)
        return self.last(_Explode.apply(hidden, self.acts.get("backward", int) if armed else int))


def boom():
    raise RuntimeError("boom at a rank")


def step_of(net, loss_fn=total, optimizer=None, ranks=2, **settings):
    optimizer = optimizer or SGD(net.parameters(), lr=1.0, momentum=0.5)
    return TrainStep(net, loss_fn, optimizer, ["cpu"] * ranks, process_group=group.WORLD, reduction="sum", **settings)


ONES = torch.ones(4, 2)


def batch(rank=None):
    """Four rows of ones; rank `rank` of two has a 9 in its rows."""
    x = ONES.clone()
    if rank is not None:
        x[2 * rank] = 9.0
    return x


def fail_once(process, guilty, phase, rank, at):
    """Three good updates around one that process `guilty` fails in; what each has seen and has."""
    acts = {}

    def loss_fn(output, target):
        if acts.get("loss") and bool((target == 9).any()):
            acts["loss"]()
        return total(output, target)

    net = Fragile(acts)
    step = step_of(net, loss_fn, bucket_nbytes=1)
    seen = []
    for i in range(3):
        if i == at:
            if process == guilty:
                acts[phase] = boom
            before = values_of(net)
            rows = batch(rank if process == guilty else None)
            target = rows if phase == "loss" and process == guilty else ONES
            try:
                step(rows, target)
            except Exception as error:
                seen.append(f"{type(error).__name__}: {error}".splitlines()[0])
            assert all(map(torch.equal, values_of(net), before))
            assert step.steps == i
            acts.clear()
        step(batch(), ONES)
    step.check_replicas()
    return seen, values_of(net), step.steps


def undisturbed(process):
    net = Fragile({})
    step = step_of(net, bucket_nbytes=1)
    for _ in range(3):
        step(batch(), ONES)
    return values_of(net)


@pytest.fixture(scope="module")
def wanted():
    return run(undisturbed)[0]


@pytest.mark.parametrize("at", [0, 1], ids=["in the first step", "later"])
@pytest.mark.parametrize("phase", ["forward", "loss", "backward"])
@pytest.mark.parametrize("guilty", [0, 1])
def test_a_process_that_fails_stops_the_update_of_all(guilty, phase, at, wanted):
    found = run(fail_once, guilty, phase, at % 2, at)
    own, others = found[guilty][0], found[1 - guilty][0]
    assert len(own) == len(others) == 1
    assert own[0].startswith("RuntimeError: Caught RuntimeError in replica")
    assert others[0].startswith(f"Error: process {guilty} gave this step up, and so did all: RuntimeError: Caught")
    for _, values, steps in found:
        assert steps == 3
        assert all(map(torch.equal, values, wanted))


def fail_while_accumulating(process):
    acts = {}
    net = Fragile(acts)
    step = step_of(net, accumulate=2)
    step(batch(), ONES)
    step(batch(), ONES)
    before, seen = values_of(net), []
    for i in range(2):
        if process == 1:
            acts["forward"] = boom
        try:
            step(batch(0 if process == 1 and i == 0 else None), ONES)
        except Exception as error:
            seen.append((i, type(error).__name__))
            break
    acts.clear()
    assert all(map(torch.equal, values_of(net), before))
    step(batch(), ONES)
    step(batch(), ONES)
    step.check_replicas()
    return seen, step.steps


def test_a_failure_inside_a_window_drops_the_window_of_all():
    found = run(fail_while_accumulating)
    assert found == [([(1, "Error")], 2), ([(0, "RuntimeError")], 2)]


def not_finite(process):
    net = whole(nn.Linear(2, 2))
    step = step_of(net, ranks=1)
    before = values_of(net)
    try:
        step(torch.full((2, 2), float("nan") if process == 1 else 1.0), ONES[:2])
    except FloatingPointError as error:
        seen = str(error)
    kept = all(map(torch.equal, values_of(net), before))
    step(ONES, ONES)
    return seen, kept, step.steps


def test_a_gradient_that_is_not_finite_stops_all():
    (seen, kept, steps), (own, *same) = run(not_finite)
    assert "finite in this process, but their sum over 2 processes is not" in seen
    assert "the gradient of weight is not finite on rank 0" in own
    assert [kept, steps] == same == [True, 1]


def die(process, guilty):
    net = Fragile({"backward": lambda: os._exit(7)} if process == guilty else {})
    step = step_of(net)
    step(batch(), ONES)
    before = values_of(net)
    begin = time.monotonic()
    texts = []
    for _ in range(2):
        try:
            step(batch(1 if process == guilty else None), ONES)
        except mgpu_core.Error as error:
            texts.append(str(error))
    return texts, all(map(torch.equal, values_of(net), before)), time.monotonic() - begin < 20


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_process_that_dies_is_named(guilty):
    found = run(die, guilty, may_end=True)
    assert isinstance(found[guilty], Ended)
    assert found[guilty].status == 7
    texts, kept, soon = found[1 - guilty]
    assert kept
    assert soon
    assert len(texts) == 2
    assert texts[0] == texts[1]
    assert texts[0].startswith(f"process {1 - guilty} of 2 was left alone: process {guilty} (pid ")
    assert "parameters are those of the last update: start all processes again from the last checkpoint" in texts[0]


def interrupt(process, when):
    """Ctrl-C in process 0, while it computes or while it waits for process 1."""
    acts = {}
    net = Fragile(acts)
    step = step_of(net)
    step(batch(), ONES)
    before = values_of(net)
    seen = []
    if process == 0:
        acts["forward"] = lambda: time.sleep(1.0)
        threading.Timer(0.3 if when == "computing" else 1.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        acts["forward"] = lambda: time.sleep(0.0 if when == "computing" else 4.0)
    try:
        step(batch(0 if process == 1 or when == "computing" else None), ONES)
    except BaseException as error:
        seen.append(type(error).__name__)
    kept = all(map(torch.equal, values_of(net), before))
    acts.clear()
    try:
        step(batch(), ONES)
    except mgpu_core.Error as error:
        seen.append(str(error))
    return seen, kept, step.steps


def test_ctrl_c_before_the_ballot_stops_all():
    found = run(interrupt, "computing")
    assert found == [(["KeyboardInterrupt"], True, 2), (["Error"], True, 2)]


def test_ctrl_c_behind_the_ballot_leaves_a_step_that_says_so():
    (seen, kept, steps), (told, others_kept, others_steps) = run(interrupt, "waiting")
    assert seen[0] == "KeyboardInterrupt"
    assert "interrupted while they agreed on an update, and some may have made it" in seen[1]
    assert kept
    assert steps == 1
    assert told[0] == "Error"
    assert "process 1 of 2 was left alone: process 0 (pid " in told[1]
    assert others_kept
    assert others_steps == 1


def rebuild_after_an_unknown_end(process):
    """Process 0 was interrupted while the others updated: it is found to be one update behind."""
    acts = {}
    net = Fragile(acts)
    step = step_of(net)
    step(batch(), ONES)
    if process == 0:
        threading.Timer(1.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        acts["forward"] = lambda: time.sleep(3.0)
    with contextlib.suppress(KeyboardInterrupt):
        step(batch(0 if process == 1 else None), ONES)
    try:
        step.rebuild()
    except ValueError as error:
        return str(error)
    return None


def test_processes_at_another_update_are_found_by_rebuild():
    texts = run(rebuild_after_an_unknown_end)
    assert texts[0] == texts[1]
    assert "processes differ in their settings: updates=1 in process 0, updates=2 in process 1" in texts[0]


def make_differently(process, what):
    net = whole(nn.Linear(3 if what == "net" and process == 1 else 2, 2))
    lr = 0.5 if what == "lr" and process == 1 else 1.0
    optimizer = SGD(net.parameters(), lr=lr)
    if what == "optimizer" and process == 1:
        optimizer = Adam(net.parameters())
    if what == "state":
        (net(ONES).sum() * (process + 1)).backward()
        optimizer = SGD(net.parameters(), lr=lr, momentum=0.5)
        optimizer.step()
    settings = {"accumulate": process + 1} if what == "settings" else {}
    try:
        step_of(net, optimizer=optimizer, **settings)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("net", "differ in their parameters: weight (2, 2) torch.float32 in process 0, weight (2, 3) torch.float32 in"),
        ("lr", "differ in their optimizer: lr=1.0"),
        ("optimizer", "differ in their optimizer: SGD in process 0, Adam in process 1"),
        ("state", "differ in their optimizer state: weight momentum_buffer"),
        ("settings", "differ in their settings: accumulate=1 in process 0, accumulate=2 in process 1"),
    ],
)
def test_processes_that_differ_are_refused_by_all(what, text):
    texts = run(make_differently, what)
    assert texts[0] == texts[1]
    assert text in texts[0]


def make_alike(process):
    torch.manual_seed(process)
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with torch.no_grad():
        net[1].running_mean.fill_(process + 1.0)
        net[0].weight.data = net[0].weight.data.t()  # not contiguous
    step = step_of(net)
    step.check_replicas()
    first = values_of(net), net[1].running_mean.tolist()
    if process == 1:
        with torch.no_grad():
            net[0].bias.data.add_(1)
    try:
        step.check_replicas()
        text = None
    except mgpu_core.Error as error:
        text = str(error)
    step.sync_parameters()
    step.check_replicas()
    return *first, text, values_of(net)


def test_values_are_those_of_process_0():
    found = run(make_alike)
    for values, mean, text, later in found:
        assert all(map(torch.equal, values, found[0][0]))
        assert all(map(torch.equal, later, found[0][0]))
        assert mean == [1.0, 1.0]
        assert text.startswith("parameter 0.bias of process 1 differs from process 0's: step.sync_parameters()")


def load_differently(process):
    net = whole(nn.Linear(2, 2))
    step = step_of(net)
    state = step.state_dict()
    state["steps"] = process
    try:
        step.load_state_dict(state)
    except ValueError as error:
        return str(error)
    return None


def test_processes_that_load_other_states_are_refused():
    texts = run(load_differently)
    assert texts[0] == texts[1]
    assert "updates=0 in process 0, updates=1 in process 1" in texts[0]


def one_more_update(process):
    """Process 1 flushes a window that process 0 has not begun."""
    net = whole(nn.Linear(2, 2))
    step = step_of(net, accumulate=2)
    step._loop.transaction.steps = process
    try:
        step(ONES, ONES)
        step(ONES, ONES)
    except mgpu_core.Error as error:
        return str(error)
    return None


def test_processes_at_another_update_are_told_so():
    texts = run(one_more_update)
    assert texts[0] == texts[1]
    assert "have not made the same updates (process 0 0, process 1 1)" in texts[0]


def sparse(process):
    net = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
    step = step_of(net)
    try:
        step(torch.tensor([0, 1]), torch.ones(2, 1))
    except TypeError as error:
        return str(error)
    return None


def test_sparse_gradients_are_refused():
    assert all("sparse" in text for text in run(sparse))


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)
        whole(self)

    def forward(self, x):
        hidden = self.first(x)
        return self.last(hidden) + torch.utils.checkpoint.checkpoint(self.last, hidden, use_reentrant=True)


def too_early(process):
    step = step_of(Twice(), bucket_nbytes=1, ranks=1)
    seen = []
    for _ in range(2):
        try:
            step(ONES, ONES)
        except Exception as error:
            seen.append(f"{type(error).__name__}: {error}")
    return seen


def test_a_gradient_that_comes_twice_is_found():
    for seen in run(too_early):
        assert len(seen) == 1
        assert "use_reentrant=False" in seen[0]


def refuse(process):
    seen = []
    net = Linear()
    for wrong in (object(), torch.distributed.GroupMember.NON_GROUP_MEMBER):
        try:
            TrainStep(net, total, SGD(net.parameters(), lr=1.0), ["cpu"], process_group=wrong)
        except (TypeError, ValueError) as error:
            seen.append(str(error))
    try:
        step_of(net, comm_dtype=torch.float8_e4m3fn)
    except TypeError as error:
        seen.append(str(error))
    return seen


def test_groups_that_are_none():
    for seen in run(refuse):
        assert "must be a group of torch.distributed, such as torch.distributed.group.WORLD, not object" in seen[0]
        assert seen[1] == "this process does not belong to process_group"
        assert "16 bits or more" in seen[2]


def test_without_an_initialised_group():
    net = Linear()
    with pytest.raises(ValueError, match="init_process_group"):
        TrainStep(net, total, SGD(net.parameters(), lr=1.0), ["cpu"], process_group=object())


def exchange(process):
    processes = Processes(group.WORLD, torch.device("cpu"))
    return (
        processes.exchange("a test", {"x" * (1000 * process): [process, None, "ü"]}),
        processes.index,
        processes.count,
    )


def test_exchange_of_texts_of_every_length():
    found = run(exchange, processes=3)
    words = [{"x" * (1000 * process): [process, None, "ü"]} for process in range(3)]
    assert found == [(words, process, 3) for process in range(3)]


def seen_of(call):
    """What it raises, in a line."""
    try:
        call()
    except (Exception, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "nothing"


def reason(process):
    acts = {}
    step = step_of(Fragile(acts))
    step(batch(), ONES)
    if process == 1:
        acts["forward"] = boom
    return seen_of(lambda: step(batch(0 if process == 1 else None), ONES))


def test_the_reason_is_told_and_not_only_where_it_was():
    told = run(reason)[0]
    assert "RuntimeError: Caught RuntimeError in replica 0 on device cpu. ... RuntimeError: boom at a rank" in told


def change(process, what):
    net = whole(nn.Linear(2, 2))
    optimizer = SGD(net.parameters(), lr=1.0)
    step = step_of(net, optimizer=optimizer, accumulate=1)
    step(ONES, ONES)
    if process == 1:
        if what == "lr":
            optimizer.param_groups[0]["lr"] = 0.5
        elif what == "clip_norm":
            step.clip_norm = 1.0
    before = values_of(net)
    told = seen_of(lambda: step(ONES, ONES))
    return told, all(map(torch.equal, values_of(net), before)), step.steps


@pytest.mark.parametrize("what", ["lr", "clip_norm"])
def test_settings_that_change_in_one_process_alone(what):
    found = run(change, what)
    assert found[0] == found[1]
    told, kept, steps = found[0]
    assert told.startswith("Error: the processes have other settings than each other by now")
    assert kept
    assert steps == 1


def thaw(process, is_known):
    net = whole(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    net[0].requires_grad_(False)
    optimizer = SGD([each for each in net.parameters() if is_known or each.requires_grad], lr=1.0)
    step = step_of(net, optimizer=optimizer)
    step(ONES, ONES)
    before = values_of(net)
    net[0].requires_grad_(True)
    if not is_known:
        optimizer.add_param_group({"params": net[0].parameters()})
    told = seen_of(lambda: step(ONES, ONES))
    kept = all(map(torch.equal, values_of(net), before))
    if not is_known:
        step.rebuild()
        step(ONES, ONES)
    return told, kept, values_of(net), torch.equal(net[0].weight, before[0])


@pytest.mark.parametrize("is_known", [True, False])
def test_what_was_frozen_at_the_start(is_known):
    """Processes lay buffers out once, for the parameters that their optimizers have then, and for no later one."""
    one, other = run(thaw, is_known)
    assert [one[0], one[1], one[3]] == [other[0], other[1], other[3]]
    assert all(map(torch.equal, one[2], other[2]))
    told, kept, _, is_still = one
    assert kept == (not is_known)
    assert not is_still
    if not is_known:
        assert "parameter 0.weight was frozen, and none of the optimizer's" in told
        assert "step.rebuild() in all processes" in told


def no_memory(process):
    net = whole(nn.Linear(2, 2))
    step = step_of(net)
    if process == 1:
        step._loop.reducer.lay_out = lambda *_: boom()
    begin = time.monotonic()
    first, second = (seen_of(lambda: step(ONES, ONES)) for _ in range(2))
    soon = time.monotonic() - begin < 20
    step.rebuild()
    step(ONES, ONES)
    return first, second, soon, values_of(net), step.steps


def test_a_process_that_cannot_lay_its_gradients_out():
    other, guilty = run(no_memory)
    assert guilty[0] == "RuntimeError: boom at a rank"
    assert other[0].startswith("Error: process 1 gave this step up, and so did all: RuntimeError: boom at a rank")
    for _, second, soon, values, steps in (other, guilty):
        assert "could not be laid out in all processes: call step.rebuild()" in second
        assert soon
        assert all(map(torch.equal, values, guilty[3]))
        assert steps == 1


def interrupt_the_first(process):
    """Ctrl-C while process 0 waits in the first step, for a process that computes."""
    acts = {"forward": lambda: time.sleep(3.0)}
    step = step_of(Fragile(acts))
    if process == 0:
        threading.Timer(1.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    first = seen_of(lambda: step(batch(0 if process == 1 else None), ONES))
    return first, seen_of(lambda: step(batch(), ONES))


def test_ctrl_c_while_the_processes_speak():
    (own, after), (told, _) = run(interrupt_the_first)
    assert own == "KeyboardInterrupt: "
    assert "process 0 of 2 was interrupted while the processes spoke about the first backward" in after
    assert "process 1 of 2 was left alone" in told


def odd_buffers(process):
    net = whole(nn.Linear(2, 2))
    net.register_buffer("wide", torch.full((1, 2), float(process + 1)).expand(3, 2))
    net.register_buffer("small", torch.tensor([process + 1], dtype=torch.int16))
    net.register_buffer("none", torch.ones(0, dtype=torch.int16))
    step = step_of(net)
    step(ONES, ONES)
    return net.wide.tolist(), net.small.tolist()


def test_buffers_of_every_kind_come_from_process_0():
    assert run(odd_buffers) == [([[1.0, 1.0]] * 3, [1])] * 2


def hook_fails(process):
    net = whole(nn.Linear(2, 2))
    step = step_of(net)

    def hook(bucket):
        if process == 1 and step.steps == 1:
            boom()
        torch.distributed.all_reduce(bucket.tensors[0], group=bucket.group)

    step.register_comm_hook(hook)
    return [seen_of(lambda: step(ONES, ONES)) for _ in range(3)]


def test_a_hook_that_fails_in_one_process_ends_all():
    other, guilty = run(hook_fails)
    assert guilty[:2] == ["nothing", "RuntimeError: boom at a rank"]
    assert "a communication hook failed in process 1 (RuntimeError)" in guilty[2]
    assert other[0] == "nothing"
    assert other[1] != "nothing"


def regularised(process):
    """A term that is not of the rows counts once, whoever has rows."""
    net = whole(nn.Linear(2, 2)).double()
    step = TrainStep(
        net, lambda output, target: (output - target).square().sum() / max(1, len(output)) + net.weight.square().sum(),
        SGD(net.parameters(), lr=0.01), ["cpu"], process_group=group.WORLD,
    )  # fmt: skip
    x = torch.ones(4, 2).double()
    for _ in range(2):
        step(*((x, x) if process == 0 else (x[:0], x[:0])))
    return values_of(net)


def test_a_process_without_rows_adds_nothing():
    found = run(regularised)
    net = whole(nn.Linear(2, 2)).double()
    optimizer = SGD(net.parameters(), lr=0.01)
    x = torch.ones(4, 2).double()
    for _ in range(2):
        optimizer.zero_grad()
        ((net(x) - x).square().sum() / 4 + net.weight.square().sum()).backward()
        optimizer.step()
    for values in found:
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(values, values_of(net), strict=True))


def update_fails(process):
    net = whole(nn.Linear(2, 2))
    step = step_of(net)
    step(ONES, ONES)
    if process == 1:
        step._loop.optimizer_step.prepare = lambda *_: boom()
    return [seen_of(lambda: step(ONES, ONES)) for _ in range(2)]


def test_an_update_that_fails_behind_the_decision_says_so():
    (first, second), guilty = run(update_fails)
    assert first == "nothing"
    assert second != "nothing"  # the other one is gone
    assert guilty[0] == "RuntimeError: boom at a rank"
    assert "its update failed after all processes had agreed on it (RuntimeError)" in guilty[1]


def load_badly(process):
    net = whole(nn.Linear(2, 2))
    step = step_of(net)
    state = step.state_dict()
    if process == 1:
        state["format"] = "other"
    told = seen_of(lambda: step.load_state_dict(state))
    step(ONES, ONES)
    return told, step.steps


def test_a_state_that_one_process_cannot_load():
    (told, steps), (own, same) = run(load_badly)
    assert own.startswith("ValueError: wanted a state with the mark")
    assert told.startswith("Error: process 1 gave this step up, and so did all: ValueError: wanted a state with")
    assert steps == same == 1


class Keeps(SGD):
    """An optimizer with settings and state of its own kinds."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=1.0)
        self.param_groups[0]["names"] = {"a", "b"}
        self.param_groups[0]["decay"] = lambda step: step
        self.state["count"] = 1


def train_with_keeps(process):
    net = whole(nn.Linear(2, 2))
    step = step_of(net, optimizer=Keeps(net.parameters()))
    if process == 0:
        step(ONES, ONES)
    followed = step.join()
    step.rebuild()
    return followed, values_of(net)


def test_optimizers_that_keep_other_things():
    (none, values), (followed, same) = run(train_with_keeps)
    assert (none, followed) == (0, 1)
    assert all(map(torch.equal, values, same))
