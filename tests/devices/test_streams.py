"""Which streams the core is told, and when it has no backend for a device."""

import threading
import warnings

import pytest
import torch

from mgpu_core.devices import streams

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def forget():
    for known in (streams._cuda_backend_works, streams._has_code_for):
        known.cache_clear()
    yield
    for known in (streams._cuda_backend_works, streams._has_code_for):
        known.cache_clear()


def with_torch(monkeypatch, *, torch_sees, core_sees, built=True, cuda="13.0", hip=None, without_code=()):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: torch_sees > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: torch_sees)
    monkeypatch.setattr(streams._core, "device_count", lambda backend: core_sees)
    monkeypatch.setattr(streams._core, "backends", lambda: [("cuda", built, "")])
    monkeypatch.setattr(streams._core, "has_code_for", lambda backend, gpu: gpu not in without_code)
    monkeypatch.setattr(streams, "settle_peers", lambda devices: None)


class Stream:
    cuda_stream = 77


def stream_of(gpu):
    return streams._core.Stream("cuda", gpu, 77)


def test_the_host():
    host = torch.device("cpu")
    assert streams.core_stream(host) == streams.HOST
    assert streams.core_streams([host, host]) == [streams.HOST, streams.HOST]


def test_gpus(monkeypatch):
    asked = []
    with_torch(monkeypatch, torch_sees=2, core_sees=2)
    monkeypatch.setattr(streams, "settle_peers", lambda devices: asked.append(sorted(devices)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    assert streams.core_stream(GPU) == stream_of(0)
    assert streams.core_streams([GPU, torch.device("cuda", 1), GPU]) == [stream_of(0), stream_of(1), stream_of(0)]
    assert asked == [[0, 1]]


def test_mixed_teams_and_other_devices_have_no_backend(monkeypatch):
    with_torch(monkeypatch, torch_sees=2, core_sees=2)
    assert streams.core_streams([GPU, torch.device("cpu")]) is None
    assert streams.core_streams([torch.device("meta")]) is None
    assert streams.core_stream(torch.device("meta")) is None


def test_a_driver_too_old_for_this_build_is_said_once(monkeypatch):
    with_torch(monkeypatch, torch_sees=2, core_sees=0)
    with pytest.warns(RuntimeWarning, match=r"torch sees 2 GPUs and mgpu_core's CUDA runtime 0.*MGPU_CUDA=system"):
        assert streams.core_streams([GPU]) is None
    with warnings.catch_warnings(action="error"):
        assert streams.core_stream(GPU) is None


@pytest.mark.parametrize("machine", [{"built": False}, {"cuda": None}, {"torch_sees": 0}])
def test_no_missing_backend_is_silent(monkeypatch, machine):
    with_torch(monkeypatch, **{"torch_sees": 2, "core_sees": 2, **machine})
    with warnings.catch_warnings(action="error"):
        assert streams.core_stream(GPU) is None
        assert streams.core_streams([GPU]) is None


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_the_core_is_never_asked_about_gpus_of_amd(monkeypatch, cuda):
    """Torch calls them cuda too: they are served by plain torch, even where the core sees GPUs of its own."""
    with_torch(monkeypatch, torch_sees=2, core_sees=2, cuda=cuda, hip="6.4")
    for name in ("device_count", "has_code_for", "nccl_open"):
        monkeypatch.setattr(streams._core, name, lambda *gpu: pytest.fail("the core was asked"))
    assert streams.core_stream(GPU) is None
    assert streams.core_streams([GPU, torch.device("cuda", 1)]) is None
    assert not streams.core_serves([GPU])


def test_a_gpu_that_this_build_has_no_code_for(monkeypatch):
    with_torch(monkeypatch, torch_sees=2, core_sees=2, without_code=[1])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    assert streams.core_stream(GPU) == stream_of(0)
    with pytest.warns(RuntimeWarning, match="no code for cuda:1.*MGPU_CUDA_ARCHS"):
        assert streams.core_streams([GPU, torch.device("cuda", 1)]) is None
    with warnings.catch_warnings(action="error"):
        assert streams.core_stream(torch.device("cuda", 1)) is None


def test_torch_copies_directly_where_access_is_proved_or_nobody_could_prove_it(monkeypatch):
    asked = []
    with_torch(monkeypatch, torch_sees=2, core_sees=2)
    monkeypatch.setattr(streams, "have_proved_access", lambda *pair: asked.append(pair))
    one, other, host = GPU, torch.device("cuda", 1), torch.device("cpu")
    assert not streams.reach_each_other(one, other)
    assert asked == [(0, 1)]
    assert all(streams.reach_each_other(*pair) for pair in ((one, host), (host, other), (one, one)))
    with_torch(monkeypatch, torch_sees=2, core_sees=2, hip="6.4")
    streams._cuda_backend_works.cache_clear()
    assert streams.reach_each_other(one, other)
    assert asked == [(0, 1)]


def test_threads_that_ask_together_get_one_stream(monkeypatch):
    """Copies on one, and a wait for the other, would be no wait."""
    together = threading.Barrier(4)

    def make(device, priority):
        together.wait(20)
        return object()

    monkeypatch.setattr(torch, "Stream", make)
    monkeypatch.setattr(streams, "_own_streams", {})
    found = []
    threads = [threading.Thread(target=lambda: found.append(streams.own_stream("copies", 0))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == 4
    assert len(set(map(id, found))) == 1
