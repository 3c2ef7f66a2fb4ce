"""The whole stack on one GPU, with several ranks on it; the cases that need no GPU run on the CPU where there is none.

``benchmarks/gpu_check/cases.py`` runs each case in a process of its own, so that a hang or a crash costs that case
alone.  A case keeps figures in ``here.figures``: they are printed, and fail nothing.
"""

import pytest
import torch
from fakes.here import Here, device_of_the_cases


@pytest.fixture
def here(capsys):
    """The place of the cases; afterwards its work has ended, and the current device and stream are as before."""
    place = Here(device_of_the_cases())
    yield place
    if place.is_gpu:
        torch.cuda.synchronize()
        assert torch.cuda.current_device() == 0, "another device was left current"
        assert torch.cuda.current_stream().cuda_stream == 0, "another stream was left current"
    with capsys.disabled():
        for name, value in place.figures.items():
            print(f"\nfigure: {name}: {value}")


@pytest.fixture
def gpu_only(here):
    """Skip a case that needs a GPU."""
    if not here.is_gpu:
        pytest.skip("needs an NVIDIA GPU that torch can use")
