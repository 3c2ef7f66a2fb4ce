"""The recorder of CUDA graphs beside a torch.cuda that only takes notes."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from mgpu_core.train.graph_cache import CudaRecorder

GPU = torch.device("cuda", 0)


@pytest.fixture
def calls(monkeypatch):
    """What was asked of torch, in order; a capture whose work fails, fails again at its end, as torch's does."""
    calls = []

    @contextmanager
    def graph(of, *, pool, stream, capture_error_mode):
        calls.append(f"begin {pool}")
        try:
            yield
        except RuntimeError as error:
            calls.append(f"failed end {pool}")
            raise RuntimeError("capture was invalidated") from error
        calls.append(f"end {pool}")

    pools = iter("abc")
    fakes = {
        "device": lambda device: nullcontext(),
        "stream": lambda stream: nullcontext(),
        "current_stream": lambda device: None,
        "graph_pool_handle": lambda: next(pools),
        "Stream": lambda device, priority: None,
        "CUDAGraph": SimpleNamespace,
        "graph": graph,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(
        torch._C,
        "_cuda_endAllocateToPool",
        lambda device, pool: calls.append(f"give back {device} {pool}"),
        raising=False,
    )
    monkeypatch.setattr(torch, "zeros", lambda shape, device: calls.append(f"zeros on {device}"))
    return calls


def test_recordings_of_a_device_share_a_pool(calls):
    recorder = CudaRecorder()
    for index in range(2):
        _, results = recorder.record(GPU, lambda index=index: [index])
        assert results == [index]
    assert calls == ["begin a", "end a"] * 2


def test_torch_is_whole_after_a_capture_that_failed(calls):
    def work():
        raise RuntimeError("this synchronises")

    recorder = CudaRecorder()
    with pytest.raises(RuntimeError, match="capture was invalidated") as told:
        recorder.record(GPU, work)
    assert str(told.value.__cause__) == "this synchronises"
    assert calls == ["begin a", "failed end a", "give back 0 a", "begin b", "zeros on cuda:0", "end b"]
