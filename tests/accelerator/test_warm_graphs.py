"""Nothing is launched for the first time while a graph is recorded: CUDA loads a kernel at its first launch.

Loading may allocate memory or wait for the GPU, which a capture forbids.
"""

import pytest
import torch
from fakes.graphs import OPTIMIZERS, OneWeight, give_graphs, recorder_of, total, without_gpu
from step.nets import mse
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mgpu_core import TrainStep
from mgpu_core.step.graph_cache import WARM_UP


class Launches(TorchDispatchMode):
    """Notes each operation with the dtypes and the device of its tensors."""

    mgpu_core_thread_safe = True

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **kwargs or {})
        tensors = [each for each in tree_leaves((args, kwargs, found)) if isinstance(each, torch.Tensor)]
        if not func.is_view and "empty" not in func.name():  # neither launches anything
            self.seen.add((func, *((each.device, each.dtype) for each in tensors[:3])))
        return found


SETTINGS = {
    "plain": {},
    "clipped": {"clip_norm": 0.5},
    "scaled": {"amp_dtype": torch.float16, "reduction": "sum"},
    "scaled and clipped": {"amp_dtype": torch.float16, "reduction": "sum", "clip_norm": 0.5},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_what_is_recorded_has_been_launched_before(monkeypatch, settings):
    give_graphs(monkeypatch, "fake")
    net = OneWeight().to("fake:0")
    loss_fn = total if settings.get("amp_dtype") else mse
    step = TrainStep(
        net,
        loss_fn,
        OPTIMIZERS["momentum"](net.parameters()),
        ["fake:0"] * 2,
        capture=True,
        error_if_nonfinite=False,
        **settings,
    )
    recorder, new = recorder_of(without_gpu(step)), set()
    record = recorder.record

    def noted(device, work):
        def trace_collective():
            before = set(launches.seen)
            try:
                return work()
            finally:
                new.update(launches.seen - before)

        return record(device, trace_collective)

    monkeypatch.setattr(recorder, "record", noted)
    x, y = torch.ones(4, 1), torch.full((4, 1), 0.125)
    with Launches() as launches:
        for _ in range(WARM_UP + 2):  # no graph is thought of in the first one
            step(x, y)
    assert step.graphs.replays == 1, step.graphs.reason
    assert new == set()
