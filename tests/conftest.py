"""Where the tests run: as a rule on the CPU, in the processes that ``test_fake_accelerator.py`` starts on the fake.

There the tests that say nothing of a device run as they are: what they make is on ``fake:0``, the ranks
that they ask for are fake devices, and what they compare may be on two of them.
"""

import pytest
import torch
from fakes import accelerator, cuda

if accelerator.by_the_cuda_backend():
    cuda.take_the_cores_place()  # before anything imports mgpu_core

from fakes import nets
from fakes.accelerator.cpu_only import CPU_ONLY

_OWN = "accelerator"  # the folder of the tests that are only for the fake

collect_ignore_glob = [] if accelerator.is_wanted() else [f"{_OWN}/*"]

_equal = torch.equal

if accelerator.is_wanted():
    accelerator.register()
    if accelerator.by_the_cuda_backend():
        cuda.serve("fake")
    torch.set_default_device("fake:0")
    nets.cpu = accelerator.fakes
    torch.equal = lambda one, other: _equal(one.cpu(), other.cpu())


@pytest.fixture(autouse=accelerator.by_the_cuda_backend())
def _kernels_have_no_faults():
    """Where kernels run on the PTX machine, faults that stop nothing, such as races, fail the test that made them."""
    yield
    assert cuda.faults() == []


@pytest.fixture
def really_equal():
    """``torch.equal`` as it is in torch."""
    return _equal


def pytest_collection_modifyitems(items):
    if not accelerator.is_wanted():
        return
    for item in items:
        if item.path.parent.name != _OWN and item.originalname in CPU_ONLY:
            item.add_marker(pytest.mark.skip(reason=CPU_ONLY[item.originalname]))
