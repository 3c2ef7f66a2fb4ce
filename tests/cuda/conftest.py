"""What runs on a GPU: with one, `[0]`, `[0, 0]` and `[0, 0, 0, 0]` are teams of one, two and four ranks."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.version.cuda and torch.cuda.is_available():
        return
    for item in items:
        if "cuda" in item.path.parts and "one_gpu" not in item.path.parts:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU that torch can use"))


@pytest.fixture(params=[1, 2, 4], ids=lambda ranks: f"ranks{ranks}")
def ranks(request):
    """How many ranks share the first GPU."""
    return request.param


@pytest.fixture
def gpu():
    """The first GPU; afterwards its work has ended without an error that the next test would report."""
    yield torch.device("cuda", 0)
    torch.cuda.synchronize()
