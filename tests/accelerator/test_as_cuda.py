"""What is said to ``torch.cuda`` about events and graphs, with the fakes as its GPUs."""

import time

import pytest
import torch
from fakes.accelerator import as_cuda

from mgpu_core._core import Stream
from mgpu_core.comm.algorithms import AllReduce
from mgpu_core.device import streams
from mgpu_core.device.clock import RankClock
from mgpu_core.errors import BackendUnavailable
from mgpu_core.explanation.clock import EventClock
from mgpu_core.train.graph_cache import CudaRecorder

GPU = torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    as_cuda.answer_as_cuda(monkeypatch.setattr)


def current(device="fake:1"):
    return torch.accelerator.current_stream(device)


def test_marks_of_a_gpu_are_on_the_hosts_axis():
    begin = time.perf_counter_ns()
    clock = EventClock()
    marks = [clock.mark(GPU) for _ in range(3)]
    times = list(map(clock.ns, marks))
    assert times == sorted(times)
    rounding = 1000  # ns: events count milliseconds as float32
    assert begin - rounding < times[0] <= times[-1] < time.perf_counter_ns() + rounding
    assert clock.mark(torch.device("cpu")) is None


def test_a_mark_without_an_index_is_of_the_current_gpu():
    with torch.accelerator.device_index(2):
        gpu, _ = EventClock().mark(torch.device("cuda"))
    assert gpu == 2


def test_a_rank_is_timed_by_events_of_its_gpu():
    clock = RankClock(GPU)
    with torch.accelerator.device_index(1):
        clock.start()
        assert clock.seconds() is None
        clock.stop()
    assert 0 < clock.seconds() < 10


@pytest.mark.parametrize("captured", [0, 1])
def test_a_capture_is_seen_on_its_own_gpu_alone(captured):
    """Whichever GPU is the current one."""
    stream = torch.Stream(torch.device("fake", captured))
    clock = EventClock()
    with torch.cuda.graph(torch.cuda.CUDAGraph(), pool=None, stream=stream, capture_error_mode="thread_local"):
        for here in (0, 1):
            with torch.accelerator.device_index(here):
                assert [streams.is_capturing(gpu) for gpu in (0, 1)] == [gpu == captured for gpu in (0, 1)]
                assert [clock.mark(torch.device("cuda", gpu)) is None for gpu in (0, 1)] == [
                    captured == 0,
                    captured == 1,
                ]
                both = [Stream("cuda", gpu, 0) for gpu in (0, 1)]
                with pytest.raises(BackendUnavailable, match="cannot be captured"):
                    AllReduce([1, 1], both, 1, "float32", 4, "sum", True).run("nccl")


def test_work_is_recorded_on_a_stream_of_its_own():
    recorder, before, seen = CudaRecorder(), current(), []

    def work():
        assert torch.accelerator.current_device_index() == 1
        assert streams.is_capturing(1)
        seen.append(current())
        return [torch.ones(2, device="fake:1")]

    first, (result,) = recorder.record(GPU, work)
    second, _ = recorder.record(GPU, work)
    assert result.tolist() == [1, 1]
    assert seen[0] == seen[1] != before
    assert first.pool is second.pool
    assert current() == before
    assert not as_cuda.capturing
    recorder.forget()
    third, _ = recorder.record(GPU, work)
    assert third.pool is not first.pool


def test_a_recording_that_fails_leaves_the_callers_stream():
    own = torch.Stream("fake:1")

    def work():
        raise ValueError("of the user's")

    with own:
        with pytest.raises(ValueError, match="of the user's"):
            CudaRecorder().record(GPU, work)
        assert current() == own
    assert not as_cuda.capturing


def test_the_capture_has_no_stream_of_the_users():
    seen = []
    CudaRecorder().record(GPU, lambda: seen.append(current()) or [])
    assert seen[0] not in {torch.Stream("fake:1") for _ in range(64)}
