"""The recorder of CUDA graphs next to a torch.cuda that only takes notes."""

from types import SimpleNamespace

import pytest
import torch

from mgpu_core.devices import graphs
from mgpu_core.devices.graphs import CudaRecorder

GPU = torch.device("cuda", 0)


class Graphs(list):
    """What was asked of torch, in order; captures end as ``is_invalid`` says."""

    is_invalid = False
    torch_ends_it = False

    def make(self):
        return Graph(self)


class Graph:
    def __init__(self, calls):
        self.calls = calls

    def capture_begin(self, pool, capture_error_mode):
        self.pool = pool
        self.calls.append(f"begin {pool}")

    def capture_end(self):
        if self.calls.is_invalid:
            self.calls.is_invalid = False
            self.calls.append(f"failed end {self.pool}")
            raise RuntimeError("capture was invalidated")
        self.calls.append(f"end {self.pool}")


@pytest.fixture
def calls(monkeypatch):
    calls, pools = Graphs(), iter("abc")

    def end_allocation(device, pool):
        if calls.torch_ends_it:
            raise RuntimeError("not recording to this pool")
        calls.append(f"end allocation {device} {pool}")

    monkeypatch.setattr(graphs, "CaptureStream", lambda gpu: SimpleNamespace(stream=None))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", calls.make)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty the cache"))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end_allocation, raising=False)
    monkeypatch.setattr(
        torch._C, "_cuda_releasePool", lambda device, pool: calls.append(f"release {device} {pool}"), raising=False
    )
    monkeypatch.setattr(torch, "zeros", lambda shape, device: calls.append(f"zeros on {device}"))
    return calls


REPAIRED = ["begin b", "zeros on cuda:0", "end b"]


def test_recordings_of_a_device_share_a_pool(calls):
    recorder = CudaRecorder()
    for index in range(2):
        _, results = recorder.record(GPU, lambda index=index: [index])
        assert results == [index]
    assert calls == ["begin a", "end a"] * 2


def test_torch_is_whole_after_work_that_invalidated_its_capture(calls):
    """The allocator serves the pool no more and frees it, and the random generator is the process's again."""

    def work():
        calls.is_invalid = True
        raise RuntimeError("this synchronises")

    with pytest.raises(RuntimeError, match="this synchronises"):
        CudaRecorder().record(GPU, work)
    assert calls == ["begin a", "failed end a", "end allocation 0 a", "release 0 a", *REPAIRED]


def test_a_capture_that_another_thread_invalidated_says_so(calls):
    def work():
        calls.is_invalid = True
        return []

    with pytest.raises(RuntimeError, match="capture was invalidated"):
        CudaRecorder().record(GPU, work)
    assert calls == ["begin a", "failed end a", "end allocation 0 a", "release 0 a", *REPAIRED]


def test_a_pool_that_torch_has_ended_itself_is_not_released_twice(calls):
    calls.torch_ends_it = True

    def work():
        calls.is_invalid = True
        return []

    with pytest.raises(RuntimeError, match="capture was invalidated"):
        CudaRecorder().record(GPU, work)
    assert calls == ["begin a", "failed end a", *REPAIRED]


def test_work_that_fails_in_a_valid_capture_ends_it(calls):
    def work():
        raise ValueError("of the user's")

    with pytest.raises(ValueError, match="of the user's"):
        CudaRecorder().record(GPU, work)
    assert calls == ["begin a", "end a"]


def test_memory_that_is_short_is_given_back_before_the_next_attempt(calls):
    """While a capture is under way, torch's allocator cannot give back what it keeps."""

    def work():
        raise torch.OutOfMemoryError("CUDA out of memory")

    recorder = CudaRecorder()
    with pytest.raises(torch.OutOfMemoryError):
        recorder.record(GPU, work)
    assert calls == ["begin a", "end a", "empty the cache"]
    assert recorder.record(GPU, list)[1] == []
