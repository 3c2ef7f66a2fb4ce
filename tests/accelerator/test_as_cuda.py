"""What is said to ``torch.cuda`` about events and graphs, with the fakes as its GPUs."""

import threading
import time

import pytest
import torch
from fakes.accelerator import as_cuda, device_module
from fakes.as_gpus import gpus  # noqa: F401
from torch import nn

from mgpu_core import Error, Predictor
from mgpu_core.devices import streams
from mgpu_core.devices.graphs import CudaRecorder
from mgpu_core.ranks.rank_clock import RankClock
from mgpu_core.tools.explain.clock import EventClock

GPU, FAKE = torch.device("cuda", 1), torch.device("fake", 1)  # as the clocks and the recorder name it


@pytest.fixture(autouse=True)
def cuda(monkeypatch, gpus):  # noqa: F811
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
    with torch.accelerator.device_index(1), clock.running():
        assert clock.seconds() is None
    assert 0 < clock.seconds() < 10


@pytest.mark.parametrize("captured", [0, 1])
def test_a_capture_is_seen_on_its_own_gpu_alone(captured):
    """Whichever GPU is the current one."""
    device, graph = torch.device("fake", captured), torch.cuda.CUDAGraph()
    clock = EventClock()
    with streams.on(device, torch.Stream(device)):
        graph.capture_begin(pool=None, capture_error_mode="thread_local")
        for here in (0, 1):
            with torch.accelerator.device_index(here):
                assert [streams.is_capturing(gpu) for gpu in (0, 1)] == [gpu == captured for gpu in (0, 1)]
                assert [clock.mark(torch.device("cuda", gpu)) is None for gpu in (0, 1)] == [
                    captured == 0,
                    captured == 1,
                ]
        graph.capture_end()


def test_work_is_recorded_on_a_stream_of_its_own():
    recorder, before, seen = CudaRecorder(), current(), []

    def work():
        assert torch.accelerator.current_device_index() == 1
        assert streams.is_capturing(1)
        seen.append(current())
        return [torch.ones(2, device="fake:1")]

    first, (result,) = recorder.record(FAKE, work)
    second, _ = recorder.record(FAKE, work)
    assert result.tolist() == [1, 1]
    assert seen[0] == seen[1] != before
    assert first.graph.pool is second.graph.pool
    assert current() == before
    assert not as_cuda.capturing
    recorder.forget()
    third, _ = recorder.record(FAKE, work)
    assert third.graph.pool is not first.graph.pool
    assert seen[2] != seen[0]


def test_a_recording_that_fails_leaves_the_callers_stream():
    own = torch.Stream("fake:1")

    def work():
        raise ValueError("of the user's")

    with own:
        with pytest.raises(ValueError, match="of the user's"):
            CudaRecorder().record(FAKE, work)
        assert current() == own
    assert not as_cuda.capturing


def stream_of(recorder):
    """A recording, and the stream that it was captured on."""
    seen = []
    recording, _ = recorder.record(FAKE, lambda: seen.append(current()) or [])
    return recording, seen[0]


def test_each_recorder_has_a_stream_that_is_nobody_elses_until_its_last_graph_goes():
    """Two graphs of one stream would compute in one workspace of cuBLAS, which goes with the first of them."""
    recorders = [CudaRecorder() for _ in range(28)]
    made = [stream_of(each) for each in recorders]
    others = [torch.Stream("fake:1") for _ in range(64)] + [streams.own_stream(each, 1) for each in ("copies", "sums")]
    assert len({stream for _, stream in made}) == 28
    assert not {stream for _, stream in made} & set(others)
    with pytest.raises(Error, match=r"28 others have CUDA graphs on GPU 1, .* close\(\)"):
        stream_of(CudaRecorder())
    recording, stream = made.pop()
    recorders.pop()
    with pytest.raises(Error, match="28 others"):
        stream_of(CudaRecorder())
    del recording
    assert stream_of(CudaRecorder())[1] == stream


def test_a_stream_is_given_back_after_its_graph_has_gone(monkeypatch):
    """The end of a graph drops what libraries keep for its stream, which may be another recorder's next."""
    found = []

    class Ending(torch.cuda.CUDAGraph):
        def __del__(self):
            found.append(stream_of(CudaRecorder())[1])

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "CUDAGraph", Ending)
        recording, stream = stream_of(CudaRecorder())
    del recording
    assert len(found) == 1
    assert found[0] != stream
    assert stream_of(CudaRecorder())[1] == stream


def test_recordings_of_two_threads_are_made_one_after_the_other():
    begun, goes_on, graphs = threading.Event(), threading.Event(), []

    def slow():
        begun.set()
        assert goes_on.wait(20)
        return []

    def record(work):
        graphs.append(CudaRecorder().record(FAKE, work)[0])

    first = threading.Thread(target=record, args=(slow,))
    first.start()
    assert begun.wait(20)
    second = threading.Thread(target=record, args=(list,))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    assert not graphs
    goes_on.set()
    for thread in (first, second):
        thread.join(20)
    assert len(graphs) == 2


def test_a_recording_that_does_not_end_is_waited_for_so_long_and_no_longer(monkeypatch):
    monkeypatch.setenv("MGPU_CORE_TIMEOUT", "0.1")
    told = []

    def impatient():
        try:
            CudaRecorder().record(FAKE, list)
        except Error as error:
            told.append(str(error))

    def work():
        thread = threading.Thread(target=impatient)
        thread.start()
        thread.join(20)
        return []

    CudaRecorder().record(FAKE, work)
    assert told == ["another recording of a CUDA graph did not end within 0.1 s; MGPU_CORE_TIMEOUT sets the limit"]


def test_a_recording_sums_on_another_stream_than_steps_of_other_threads():
    """A stream that took part in both would bring the step's work into the recording, or invalidate it."""
    device = torch.device("fake", 1)

    def summing():
        side = streams.SideStreams([device])
        side.starts([device], [current()])
        with side.entered():
            found = current()
        side.joins()
        return found

    seen = []
    CudaRecorder().record(FAKE, lambda: seen.append(summing()) or [])
    assert summing() not in (seen[0], current())
    assert seen[0] != streams.own_stream("capture", 1)


def test_a_predictor_is_made_and_refreshed_without_a_wait_for_a_whole_device():
    device_module.built.take_host_waits()
    with Predictor(nn.Linear(2, 2).to("fake:0"), ["fake:0", "fake:1"]) as predict:
        predict.refresh()
    waits = device_module.built.take_host_waits()
    assert "stream" in waits
    assert "device" not in waits
