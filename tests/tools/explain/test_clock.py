"""The clock of GPUs, on a torch.cuda that takes notes: which GPUs it touches, and how events become times."""

import time
from contextlib import nullcontext

import pytest
import torch

from mgpu_core.tools.explain.clock import EventClock


class Event:
    """One of a GPU whose every event comes 2 ms after the one before."""

    made = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        stream.touched.append(stream.gpu)
        Event.made += 1
        self.milliseconds = 2.0 * Event.made

    def query(self):
        return True

    def elapsed_time(self, later):
        return later.milliseconds - self.milliseconds


class Stream:
    def __init__(self, gpu, touched):
        self.gpu, self.touched = gpu, touched

    def synchronize(self):
        self.touched.append(self.gpu)


@pytest.fixture
def touched(monkeypatch):
    """Four visible GPUs that are in use; the list of those that were touched."""
    touched = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.accelerator, "device_index", lambda gpu: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda gpu: Stream(gpu, touched))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return touched


def test_only_gpus_with_a_mark_are_touched(touched):
    clock = EventClock()
    assert touched == []
    for gpu in (2, 3, 2):
        clock.mark(torch.device("cuda", gpu))
    assert set(touched) == {2, 3}


def test_marks_are_on_the_hosts_axis(touched):
    clock = EventClock()
    before = time.perf_counter_ns()
    first, second = (clock.ns(clock.mark(torch.device("cuda", 1))) for _ in range(2))
    assert second - first == 2_000_000
    assert before + 2_000_000 <= first <= time.perf_counter_ns() + 2_000_000


def test_the_host_and_captures_have_no_marks(touched, monkeypatch):
    clock = EventClock()
    assert clock.mark(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert clock.mark(torch.device("cuda", 1)) is None
    assert touched == []
