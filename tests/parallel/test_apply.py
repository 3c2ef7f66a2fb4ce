"""Parallel apply: threads, settings of the caller, failures."""

import contextlib
import contextvars
import gc
import re
import threading
import time
import traceback
import weakref
from contextvars import ContextVar
from functools import partial
from pathlib import Path

import pytest
import torch
from fakes.collector import no_collector, wake_workers
from fakes.nets import cpu
from torch import nn

from mgpu_core import parallel_apply
from mgpu_core.ranks.draws import Draws
from mgpu_core.ranks.run import Run
from mgpu_core.ranks.team import Team


class Call(nn.Module):
    """Calls a function: what a rank does is told by the test."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


def run(function, ranks, **options):
    """The function on every rank, with the rank as its argument."""
    return parallel_apply([Call(function)] * ranks, [(rank,) for rank in range(ranks)], None, cpu(ranks), **options)


class Awkward(Exception):
    """Cannot be made from a text."""

    def __init__(self, one, two):
        super().__init__(one, two)


class Talking(Exception):
    """Has a message of its own, as torch and others look for."""

    def __init__(self, message):
        super().__init__(message)
        self.message = message


def test_outputs_in_rank_order(ranks):
    assert run(lambda rank: rank * rank, ranks) == [rank * rank for rank in range(ranks)]


@pytest.mark.several_ranks
def test_ranks_run_at_once_in_threads_of_their_own(ranks):
    barrier = threading.Barrier(ranks, timeout=20)  # breaks unless all are in forward together

    def meet(rank):
        barrier.wait()
        return threading.get_ident()

    threads = run(meet, ranks)
    assert len({*threads, threading.get_ident()}) == ranks + 1


def test_one_rank_runs_in_the_calling_thread():
    assert run(lambda rank: threading.get_ident(), 1) == [threading.get_ident()]


def test_arguments():
    def take(*args, **kwargs):
        return args, kwargs

    modules = [Call(take)] * 4
    x = torch.ones(2)
    found = parallel_apply(modules, [x, (x, 1), [x], 5], [{}, {"a": 1}, {"b": 2}, {}], cpu(4))
    assert found[0][0][0] is x
    assert found[1] == ((x, 1), {"a": 1})
    assert found[2] == ((x,), {"b": 2})
    assert found[3] == ((5,), {})


def test_a_tensor_is_one_argument_and_not_its_rows():
    assert parallel_apply([Call(lambda *args: len(args))] * 2, [torch.ones(3), torch.ones(4)]) == [1, 1]


def test_devices_of_the_inputs():
    x = torch.ones(1)
    modules = [Call(lambda *args, **kwargs: "ran")] * 2
    assert parallel_apply(modules, [({"a": [None, x]},), x]) == ["ran"] * 2
    assert parallel_apply(modules, [(1,), (2,)], devices=["cpu", torch.device("cpu")]) == ["ran"] * 2
    assert parallel_apply(modules, [x, (2,)], devices=[None, "cpu"]) == ["ran"] * 2
    with pytest.raises(RuntimeError, match="in replica 1, no device was provided and no tensor input was found"):
        parallel_apply(modules, [x, (2,)])


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("inputs", ([1],)), ("kwargs_tup", ([1, 2], [{}])), ("devices", ([1, 2], None, ["cpu"]))],
)
def test_lists_of_different_lengths(name, arguments):
    text = f"The number of modules 2 is not equal to the number of {name} 1"
    with pytest.raises(AssertionError, match=text):
        parallel_apply([Call(int)] * 2, *arguments)


def raise_it(error):
    raise error


ERRORS = {
    "KeyError": lambda: KeyError("a key"),
    "ValueError": lambda: ValueError("a\nlong\ntext"),
    "AssertionError": lambda: AssertionError(),
    "StopIteration": lambda: StopIteration(3),
    "Talking": lambda: Talking("hello"),
    "OutOfMemoryError": lambda: torch.OutOfMemoryError("no memory"),
    "NotImplementedError": lambda: NotImplementedError("later"),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_failure_has_type_text_and_cause(kind, ranks):
    last = ranks - 1
    original = ERRORS[kind]()
    with pytest.raises(type(original)) as caught:
        run(lambda rank: raise_it(original) if rank == last else rank, ranks)
    assert type(caught.value) is type(original)
    start = f"Caught {kind} in replica {last} on device cpu.\nOriginal Traceback (most recent call last):\n"
    text = str(caught.value)
    assert text.startswith(start) or kind == "KeyError"
    assert start in (text if kind != "KeyError" else str(caught.value.args[0]))
    assert "in raise_it" in text
    assert caught.value.__cause__ is original
    assert not hasattr(caught.value, "__notes__")


def test_text_of_a_key_error_has_lines_and_not_backslashes():
    with pytest.raises(KeyError) as caught:
        run(lambda rank: {}["x"], 2)
    assert str(caught.value).startswith("Caught KeyError in replica 0 on device cpu.\nOriginal Traceback ")


def test_exception_that_cannot_be_made_from_a_text_is_a_runtime_error_as_in_torch():
    with pytest.raises(RuntimeError, match="Caught Awkward in replica 1 on device cpu") as caught:
        run(lambda rank: raise_it(Awkward(1, 2)) if rank else 0, 2)
    assert type(caught.value.__cause__) is Awkward


class Messenger(Exception):
    """Torch passes a message to whatever has an attribute of that name."""

    message = "as a rule"

    def __init__(self, what):
        super().__init__(what)


def test_a_constructor_that_takes_no_message_hides_nothing():
    def fails(x):
        raise Messenger("the reason")

    with pytest.raises(RuntimeError, match=r"Caught Messenger in replica 0[\s\S]+the reason") as caught:
        parallel_apply([fails, fails], [torch.ones(1)] * 2)
    assert isinstance(caught.value.__cause__, Messenger)


def test_the_first_rank_is_raised_and_the_others_are_notes():
    def fail(rank):
        if rank == 1:
            raise KeyError("one")
        if rank in (3, 4):
            raise ValueError(f"rank {rank}")

    with pytest.raises(KeyError) as caught:
        run(fail, 5)
    assert caught.value.__notes__ == [
        "also in replica 3 on device cpu: ValueError('rank 3')",
        "also in replica 4 on device cpu: ValueError('rank 4')",
    ]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_interrupts_pass_through_unchanged_and_win(kind, ranks):
    original = kind(7)

    def fail(rank):
        raise original if rank == ranks - 1 else ValueError("less")

    with pytest.raises(kind) as caught:
        run(fail, ranks)
    assert caught.value is original
    assert run(lambda rank: rank, ranks) == list(range(ranks))


def test_all_ranks_end_before_the_failure_is_raised(ranks):
    ended = []
    failed = threading.Event()

    def work(rank):
        if rank == 0:
            failed.set()
            raise ValueError("at once")
        assert failed.wait(20)
        time.sleep(0.01)  # wider, not decisive: without the join the list would be short now and then
        ended.append(rank)

    with pytest.raises(ValueError, match="at once"):
        run(work, ranks)
    assert sorted(ended) == list(range(1, ranks))


def test_failure_leaves_the_threads_usable(ranks):
    for _ in range(3):
        with pytest.raises(ValueError, match="Caught"):
            run(lambda rank: raise_it(ValueError("x")), ranks)
        assert run(lambda rank: rank, ranks) == list(range(ranks))


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_failure_keeps_nothing_alive_once_it_was_handled(kind, ranks):
    # Who catches an out-of-memory error and tries a smaller batch needs the memory back at once, not at the next gc.
    kept = []

    def fail(rank):
        activation = torch.ones(3)
        kept.append(weakref.ref(activation))
        raise kind("x")

    while gc.collect():  # what ends of other tests' garbage, may leave more of it
        pass
    with no_collector():
        with contextlib.suppress(kind):
            run(fail, ranks)
        wake_workers()
        assert len(kept) == ranks
        assert [ref() for ref in kept] == [None] * ranks
        assert gc.collect() == 0


@pytest.mark.parametrize("enabled", [True, False])
def test_grad_mode(ranks, enabled):
    with torch.set_grad_enabled(enabled):
        assert run(lambda rank: torch.is_grad_enabled(), ranks) == [enabled] * ranks


def test_inference_mode(ranks):
    with torch.inference_mode():
        assert (
            run(lambda rank: (torch.is_inference_mode_enabled(), torch.is_grad_enabled()), ranks)
            == [(True, False)] * ranks
        )
        with torch.enable_grad():
            assert run(lambda rank: torch.is_grad_enabled(), ranks) == [True] * ranks
    assert run(lambda rank: torch.is_inference_mode_enabled(), ranks) == [False] * ranks


def autocast_now(rank):
    enabled = torch.is_autocast_enabled("cpu")
    return enabled, enabled and torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache", [True, False])
def test_autocast(ranks, dtype, cache):
    with torch.autocast("cpu", dtype=dtype, cache_enabled=cache):
        assert run(autocast_now, ranks) == [(True, dtype, cache)] * ranks
        with torch.autocast("cpu", enabled=False):
            assert run(autocast_now, ranks)[-1][0] is False
    assert run(autocast_now, ranks) == [(False, False, True)] * ranks


variable = contextvars.ContextVar("variable", default=0)


@pytest.mark.several_ranks
def test_contextvars_come_in_and_changes_stay_inside(ranks):
    def work(rank):
        found = variable.get()
        variable.set(found + rank + 1)
        return found, variable.get()

    token = variable.set(10)
    try:
        assert run(work, ranks) == [(10, 11 + rank) for rank in range(ranks)]
        assert variable.get() == 10
    finally:
        variable.reset(token)


@pytest.mark.several_ranks
def test_a_rank_that_leaves_its_settings_changed_changes_nothing_for_the_next_call(ranks):
    def spoil(rank):
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)

    run(spoil, ranks)
    assert (
        run(lambda rank: (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")), ranks) == [(True, False)] * ranks
    )


def test_a_call_from_within_a_rank():
    def outer(rank):
        return run(lambda inner: (rank, inner), 2)

    assert run(outer, 2) == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]


def test_from_eight_threads_at_once():
    barrier = threading.Barrier(24, timeout=20)  # all ranks of all callers are in forward together
    found = {}

    def meet(rank, caller):
        barrier.wait()
        return caller, rank

    def call(caller):
        args = [(rank, caller) for rank in range(3)]
        found[caller] = parallel_apply([Call(meet)] * 3, args, None, cpu(3))

    callers = [threading.Thread(target=call, args=(caller,)) for caller in range(8)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(40)
    assert found == {caller: [(caller, rank) for rank in range(3)] for caller in range(8)}


def test_a_rank_that_does_not_end_is_an_error_and_not_a_hang(monkeypatch):
    from mgpu_core import Error

    monkeypatch.setenv("MGPU_CORE_TIMEOUT", "0.2")
    go_on = threading.Event()
    with pytest.raises(Error, match=re.escape("rank 0 did not end within 0.2 s (2 of 2 ranks")):
        run(lambda rank: go_on.wait(20), 2)
    go_on.set()
    monkeypatch.delenv("MGPU_CORE_TIMEOUT")
    assert run(lambda rank: rank, 2) == [0, 1]


@pytest.mark.several_ranks
def test_ranks_draw_the_same_numbers_in_threads_and_in_the_callers(ranks):
    drawn = []
    for workers in ("threads", "caller"):
        torch.manual_seed(3)
        drawn.append(
            Run(Team.of(cpu(ranks))).run([lambda: torch.rand(4)] * ranks, draws=Draws("auto", ""), workers=workers)
        )
    assert all(map(torch.equal, *drawn))
    assert len({tuple(each.tolist()) for each in drawn[0]}) == ranks


@pytest.mark.several_ranks
def test_in_the_callers_thread_ranks_have_contexts_of_their_own(ranks):
    """And what the caller has set; what a rank sets, nobody else sees."""
    setting = ContextVar("setting", default="none")
    setting.set("the caller's")
    seen = []

    def work(rank, x):
        seen.append((rank, setting.get(), threading.get_ident(), torch.is_grad_enabled()))
        setting.set(f"rank {rank}'s")
        return x + rank

    with torch.no_grad():
        outputs = parallel_apply(
            [Call(partial(work, rank)) for rank in range(ranks)], [torch.ones(1)] * ranks, workers="caller"
        )
    assert [each.item() for each in outputs] == [1 + rank for rank in range(ranks)]
    assert seen == [(rank, "the caller's", threading.get_ident(), False) for rank in range(ranks)]
    assert setting.get() == "the caller's"


def test_other_workers_are_refused():
    for workers in ("auto", "processes"):
        with pytest.raises(ValueError, match="workers must be 'threads' or 'caller'"):
            parallel_apply([torch.nn.Identity()], [torch.ones(1)], workers=workers)


class Mute(Exception):
    def __repr__(self):
        raise ArithmeticError("no repr")


def test_a_failure_that_cannot_be_shown_hides_no_other():
    def fails(rank):
        raise KeyError("the first") if rank == 0 else Mute

    with pytest.raises(KeyError, match="the first") as caught:
        parallel_apply([Call(fails)] * 2, [(0,), (1,)], devices=cpu(2))
    assert caught.value.__notes__ == ["also in replica 1 on device cpu: Mute, which has no repr()"]


class Wrong(torch.nn.Module):
    def forward(self, x):
        return {}["the users own line"]


@pytest.mark.parametrize("nested", [False, True])
def test_the_users_line_is_printed_once(ranks, nested):
    """And nothing of what is between the wrapper and it."""
    net = torch.nn.Sequential(Wrong()) if nested else Wrong()
    with pytest.raises(KeyError) as caught:
        parallel_apply([net] * ranks, [(torch.ones(1),)] * ranks, devices=["cpu"] * ranks)
    printed = "".join(traceback.format_exception(caught.value))
    assert printed.count('return {}["the users own line"]') == 1
    assert "direct cause" in printed
    original = str(caught.value).split("Original Traceback (most recent call last):\n")[1]
    files = re.findall(r'File "(.*?)"', original)
    assert files[-1] == __file__
    assert [each for each in files if "mgpu_core" in Path(each).parts[-3:]] == []
    assert caught.value.__cause__.args == ("the users own line",)


def test_a_mistake_in_torchs_own_code_keeps_its_frames():
    with pytest.raises(RuntimeError, match="Caught RuntimeError in replica 0") as caught:
        parallel_apply([torch.nn.Linear(2, 1)] * 2, [(torch.ones(3),)] * 2, devices=["cpu"] * 2)
    assert "linear.py" in str(caught.value)
