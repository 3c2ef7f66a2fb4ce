"""Recordings begin, end and fail by themselves, keep nothing alive, and cost nothing when they are off."""

import contextvars
import os
import threading
import weakref

import pytest
import torch
from fakes.collector import no_collector
from fakes.traces import of

import mgpu_core
from mgpu_core import comm
from mgpu_core.trace import tracer
from mgpu_core.trace.events import Collective, Span


def test_off_is_one_shared_object():
    assert not tracer.is_tracing()
    assert tracer.span("a") is tracer.span("b", 3, torch.device("cpu"), 4)
    tracer.mark("nothing")
    tracer.emit(lambda *_: pytest.fail("nobody wants it"))
    assert tracer.mark_devices([torch.device("cpu")]) is None


def test_a_recording_keeps_no_tensors():
    """Neither do the hooks by which it learns of gradients."""
    model = mgpu_core.DataParallel(torch.nn.Linear(3, 2), ["cpu"] * 2)
    model(torch.randn(4, 3))
    freed = []
    with tracer.tracing():
        with no_collector():
            output = model(torch.randn(4, 3))
            weakref.finalize(output.grad_fn, freed.append, True)
            del output
        assert freed == [True]


def test_a_forked_child_records_nothing():
    with tracer.tracing() as trace:
        tracer.mark("before")
        child = os.fork()
        if child == 0:
            trace.finish()
            os._exit(7 if tracer.is_tracing() or trace.events else 0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        tracer.mark("after")
    assert [each.step for each in trace.events] == ["before", "after"]


def test_a_failed_collective_leaves_nothing():
    with tracer.tracing() as trace, pytest.raises(mgpu_core.BackendUnavailable):
        comm.all_reduce([torch.ones(3), torch.ones(3)], algorithm="nccl")
    assert of(trace, Collective) == []
    with tracer.tracing() as trace:
        comm.broadcast(torch.ones(4), ["cpu"] * 2)
    assert len(of(trace, Collective)[0].hops) == 1


def test_what_profilers_get_does_not_stay_with_the_entries():
    """A label is memory of theirs between a step's: kept from every step, it keeps the holes around it, too."""
    gone = []

    class Label:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def __del__(self):
            gone.append(1)

    with tracer.labelled(lambda name: Label()), tracer.tracing() as trace:
        for _ in range(3):
            with tracer.span("forward", 0, torch.device("cpu")):
                pass
        assert gone == [1, 1, 1]
    assert len(trace.events) == 3


def test_a_recording_has_an_end():
    with tracer.tracing() as trace:
        trace.limit = 3
        for number in range(5):
            tracer.mark("again", number)
    assert [each.rank for each in trace.events] == [0, 1, 2]
    assert trace.dropped == 2


def test_a_clock_that_fails_ends_the_recording_and_no_step():
    """The steps go on, those of the same thread too, and nobody counts them to the one in which it failed."""

    class Clock:
        def __init__(self):
            self.asked = 0

        def mark(self, device):
            self.asked += 1
            if self.asked == 3:
                raise RuntimeError("no event")

    def steps():
        with tracer.tracing(Clock()) as trace:
            for _ in range(3):
                with tracer.span("train_step", 0, torch.device("cpu")), tracer.span("forward", 0, torch.device("cpu")):
                    pass
            assert not tracer.is_tracing()
        return trace

    with pytest.warns(RuntimeWarning, match="ended early.*RuntimeError: no event"):
        trace = steps()
    assert tracer.current_step() == 0
    assert [each.step for each in trace.events] == ["forward", "train_step"]


def test_what_is_told_wrongly_ends_the_recording_and_no_step():
    told = []

    @tracer.when_tracing
    def tell(what):
        told.append(1 / what)

    def tell_all():
        with tracer.tracing():
            tell(1)
            tell(0)
            assert not tracer.is_tracing()
            tell(2)

    tell(0)  # nobody listens
    with pytest.warns(RuntimeWarning, match="ZeroDivisionError"):
        tell_all()
    assert told == [1]


def test_a_task_that_outlives_its_step_has_steps_of_its_own():
    """It has a copy of the context of the step in which it was made."""
    with tracer.tracing() as trace:
        with tracer.span("train_step"):
            context = contextvars.copy_context()
        for _ in range(2):
            context.run(tracer.span("train_step").__enter__)
    assert len(trace.whole_steps) == 2


def test_the_last_step_ends_before_the_recording_does():
    """Another thread's step, the first one too many, begins in the middle of it."""
    with tracer.tracing(steps=1) as trace:
        with tracer.span("train_step"):
            thread = threading.Thread(target=lambda: tracer.span("train_step").__enter__())
            thread.start()
            thread.join()
            tracer.mark("still told")
        assert tracer.is_tracing()
        with tracer.span("train_step"):
            assert not tracer.is_tracing()
    assert [each.step for each in trace.events] == ["still told", "train_step"]
    assert len(trace.whole_steps) == 1


def test_a_window_of_steps():
    with tracer.tracing(skip=2, steps=2) as trace:
        for number in range(6):
            assert tracer.is_tracing() == (number < 5)  # the step behind the last one takes the flag down
            with tracer.span("train_step"), tracer.span("forward", number):
                pass
            tracer.mark("behind", number)
    assert [each.rank for each in trace.events if each.step == "forward"] == [2, 3]
    assert [each.rank for each in trace.events if each.step == "behind"] == [2, 3]
    assert not tracer.is_tracing()


def test_a_step_inside_another_is_none_of_its_own():
    """A wrapper inside a wrapper; the inner ones run in the outer one's threads."""
    inner = mgpu_core.DataParallel(torch.nn.Linear(2, 2), ["cpu"] * 2)
    outer = mgpu_core.DataParallel(torch.nn.Sequential(inner), ["cpu"] * 2)
    with tracer.tracing(skip=1, steps=1) as trace:
        for _ in range(3):
            outer(torch.ones(4, 2))
    heads = [
        each
        for each in of(trace, Span, "data_parallel")
        if each.thread == max(of(trace, Span, "gather"), key=lambda e: e.end_ns).thread
    ]
    assert len(heads) == 1
    assert len(of(trace, Span, "data_parallel")) == 3


def test_names_and_recordings_end_each_by_itself():
    """In whatever order: neither brings the other back, or takes it away."""

    class Label:
        def __init__(self, name):
            seen.append(name)

        def __enter__(self):
            pass

        def __exit__(self, *_):
            pass

    seen: list[str] = []
    labels, recorded = tracer.labelled(Label), tracer.tracing()
    recorded.__enter__()
    labels.__enter__()
    recorded.__exit__(None, None, None)
    assert not tracer.is_tracing()
    with tracer.span("still named"):
        pass
    labels.__exit__(None, None, None)
    assert seen == ["mgpu still named"]
    assert tracer.span("nobody") is tracer.span("looks")

    with tracer.labelled(Label), tracer.tracing(steps=1):
        for _ in range(2):
            with tracer.span("train_step"):
                pass
        assert not tracer.is_tracing()
        with tracer.span("named behind the recording"):
            pass
    assert seen[-1] == "mgpu named behind the recording"
    with tracer.tracing(steps=1), tracer.labelled(Label):
        for _ in range(2):
            with tracer.span("train_step"):
                pass
    assert not tracer.is_tracing()


def test_no_hook_stays_on_the_users_leaves():
    leaves = [torch.ones(2, 2, requires_grad=True) for _ in range(2)]
    with tracer.tracing():
        mgpu_core.gather(leaves, "cpu").sum().backward()
    assert all(not leaf._backward_hooks for leaf in leaves)


def test_one_recording_at_a_time():
    with tracer.tracing(), pytest.raises(RuntimeError, match="already on"), tracer.tracing():
        pass
    assert not tracer.is_tracing()


def test_a_recording_ends_with_an_error():
    with pytest.raises(KeyError), tracer.tracing() as trace, tracer.span("step"):
        raise KeyError
    assert [each.step for each in trace.events] == ["step"]
    assert not tracer.is_tracing()


def test_times_of_devices_come_from_their_clock():
    """Asked for at both ends of a span, and read only when the recording is over."""

    class Clock:
        def __init__(self):
            self.marks, self.read = 0, 0

        def mark(self, device):
            self.marks += 1
            return self.marks

        def ns(self, mark):
            assert not tracer.is_tracing()
            self.read += 1
            return mark * 1000

    clock = Clock()
    with tracer.tracing(clock) as trace:
        with tracer.span("on the device", 1, torch.device("cpu")):
            tracer.mark("between", 1, torch.device("cpu"))
        with tracer.span("on the host"):
            pass
        assert clock.read == 0
    mark, on_device, on_host = trace.events
    assert (mark.at_ns, on_device.begin_ns, on_device.end_ns) == (2000, 1000, 3000)
    assert on_device.host_begin_ns < on_device.host_end_ns
    assert (on_host.begin_ns, on_host.end_ns) == (on_host.host_begin_ns, on_host.host_end_ns)


def test_ctrl_c_while_a_recording_begins(monkeypatch):
    """Or it would be on for the rest of the process."""

    def interrupted():
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(tracer, "_show", interrupted)
        with pytest.raises(KeyboardInterrupt), tracer.tracing():
            raise AssertionError
    with tracer.tracing():
        assert tracer.is_tracing()
    assert not tracer.is_tracing()
