"""Where the tests run: as a rule on the CPU, in the processes that ``fakes/on_the_fake.py`` starts on a fake.

There the tests that say nothing of a device run as they are: what they make is on ``fake:0``, the ranks
that they ask for are fake devices, and what they compare may be on two of them.
"""

import os
import signal
import threading
from pathlib import Path

# Where several processes run tests side by side, they share the cores: torch's threads spin while they wait for each
# other, and with twice as many as there are cores most of the time goes there.  Before torch reads the variable.
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))

import pytest
import torch
from fakes import accelerator, cuda

if accelerator.by_the_cuda_backend():
    cuda.replace_core()  # before anything imports mgpu_core

from fakes import nets

_OWN = "accelerator"  # the folder of the tests that are only for the fake

collect_ignore_glob = [] if accelerator.is_wanted() else [f"{_OWN}/*"]

# A run in the background of a shell ignores Ctrl-C, which some tests send; children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

_equal = torch.equal

if accelerator.is_wanted():
    accelerator.register()
    if accelerator.by_the_cuda_backend():
        cuda.serve("fake")
    torch.set_default_device(accelerator.fakes(1)[0])
    nets.cpu = accelerator.fakes
    torch.equal = lambda one, other: _equal(one.cpu(), other.cpu())


# How many ranks a test has that asks for `ranks` and says no numbers of its own.
_RANKS = (1, 3)
_ALL_RANKS = (1, 2, 3, 8)


def pytest_addoption(parser):
    help_text = f"how many ranks tests run with: some ({_RANKS}; tests/conformance has all), or all ({_ALL_RANKS})"
    parser.addoption("--ranks", choices=("some", "all"), default="some", help=help_text)


def pytest_configure(config):
    config.addinivalue_line("markers", "several_ranks: never with one rank")


def pytest_generate_tests(metafunc):
    own = {name for each in metafunc.definition.iter_markers("parametrize") for name in _names_of(*each.args)}
    is_fixture = "ranks" in metafunc._arg2fixturedefs  # of the tests next to it
    if "ranks" not in metafunc.fixturenames or "ranks" in own or is_fixture:
        return
    is_all = metafunc.config.getoption("ranks") == "all" or "conformance" in metafunc.definition.path.parts
    least = 2 if metafunc.definition.get_closest_marker("several_ranks") else 1
    metafunc.parametrize("ranks", [each for each in (_ALL_RANKS if is_all else _RANKS) if each >= least])


def _names_of(names, *_):
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else names


@pytest.fixture(autouse=accelerator.by_the_cuda_backend())
def _kernels_have_no_faults():
    """Where kernels run on the PTX machine, faults that stop nothing, such as races, fail the test that made them."""
    yield
    assert cuda.faults() == []


@pytest.fixture
def really_equal():
    """``torch.equal`` as it is in torch."""
    return _equal


def _time_limit(item):
    marker = item.get_closest_marker("timeout")
    return marker.args[0] if marker else 0


# Files that ci/proved_tests.py has found to need no run.
_PROVED = Path(os.environ["MGPU_PROVED_TESTS"]).read_text().split() if "MGPU_PROVED_TESTS" in os.environ else ()


def pytest_sessionfinish(session, exitstatus):
    if _PROVED and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and not session.config.option.keyword:
        session.exitstatus = pytest.ExitCode.OK


@pytest.hookimpl(tryfirst=True)  # before the run chooses by markers
def pytest_collection_modifyitems(items):
    os.environ.pop("MGPU_PROVED_TESTS", None)  # of this run, not of those that tests start
    proved = {Path(__file__).parent / name for name in _PROVED}
    items[:] = [item for item in items if item.path not in proved]
    items.sort(key=_time_limit, reverse=True)  # so that the last ones are short, where several processes share them
    if not accelerator.is_wanted():
        return
    for item in items:
        if marker := item.get_closest_marker("cpu_only"):
            item.add_marker(pytest.mark.skip(reason=marker.args[0]))
