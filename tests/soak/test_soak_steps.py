"""Steps of a TrainStep leave nothing behind: no tensor, no thread, no object, no page.

Five hundred of them here, because every allocation is traced; `python long_steps.py 8 2000 5` shows more.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

STEPS, CHECKPOINTS = 500, 5

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", params=[2, 8])
def told(request):
    """One dict per checkpoint, and the last line."""
    script = Path(__file__).parent / "long_steps.py"
    command = [sys.executable, str(script), str(request.param), str(STEPS), str(CHECKPOINTS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def column(told, name):
    return [checkpoint[name] for checkpoint in told[:-1]]


@pytest.mark.parametrize("name", ["tensors", "tensor bytes", "threads"])
def test_is_exactly_flat(told, name):
    values = column(told, name)
    assert len(values) == CHECKPOINTS + 1
    assert len(set(values)) == 1, values
    assert values[0] > 0


def test_python_holds_no_more(told):
    values = column(told, "traced")
    assert max(values) - values[0] <= 100_000, values


def test_resident_memory_stays_within_8_mib(told):
    values = column(told, "rss")
    if None in values:
        pytest.skip("this machine does not say its rss")
    assert max(values) - values[0] <= 8 * 2**20, values


def test_no_garbage_is_left_for_the_collector(told):
    assert told[-1] == {"garbage": 0}
