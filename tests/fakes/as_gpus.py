"""Fakes as the devices that the package treats as GPUs: who waits for whom on their streams."""

from collections import defaultdict

import pytest
import torch
from fakes.accelerator import device_module

from mgpu_core.devices import streams


@pytest.fixture
def gpus(monkeypatch):
    """The fakes are GPUs, but no backend of the core serves them, unless it does anyway."""
    if streams.GPU_TYPE != "fake":
        monkeypatch.setattr(streams, "GPU_TYPE", "fake")
        monkeypatch.setattr(streams, "_cuda_backend_works", lambda: False)
        monkeypatch.setattr(streams, "_own_streams", {})
        monkeypatch.setattr(streams, "_captures", defaultdict(list))
        monkeypatch.setattr(streams, "_free_captures", defaultdict(list))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    device_module.built.take_waits()


def waits():
    """Pairs of streams, each as (device, id): the first has waited for the second since the last call."""
    return [((a, b), (c, d)) for a, b, c, d, _ in device_module.built.take_waits()]


def id_of(stream):
    return stream.device_index, stream.stream_id
