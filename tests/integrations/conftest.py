import pytest
import torch


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
