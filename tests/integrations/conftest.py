import os

import pytest
import torch

_BEFORE = set(os.environ)


@pytest.fixture(autouse=True)
def one_thread():
    """The nets are tiny: more threads of torch would only wait for each other, on a machine that has other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_ignore_collect(config):
    """Leave the files out where slow tests are left out: importing all frameworks takes half a minute."""
    return True if config.option.markexpr.startswith("not (slow") else None


def pytest_collection_finish():
    """Forget the variables that frameworks set when they are imported, since other tests start processes.

    Lightning's PYTORCH_NVML_BASED_CUDA_CHECK lets torch leave garbage at each step of an optimizer.
    """
    for name in set(os.environ) - _BEFORE:
        del os.environ[name]
