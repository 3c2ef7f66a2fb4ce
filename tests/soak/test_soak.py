"""20,000 forwards and backwards: what the process holds afterwards is what it held before, to the byte.

The training is long_training.py; it runs in a process of its own, with the garbage collector off.
"""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

STEPS = 20_000
CHECKPOINTS = 10
MIB = 2**20

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]  # a minute on a quiet machine


@pytest.fixture(scope="module")
def told():
    """One dict per checkpoint, and the last line."""
    script = Path(__file__).parent / "long_training.py"
    command = [sys.executable, "-P", str(script), "3", str(STEPS), str(CHECKPOINTS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def column(told, name):
    return [checkpoint[name] for checkpoint in told[:-1]]


def grown(told, name):
    """How far a column ever rose above its first value."""
    values = column(told, name)
    if None in values:
        pytest.skip(f"this machine does not say its {name}")
    return max(values) - values[0]


def test_everything_happened(told):
    assert column(told, "steps") == list(range(0, STEPS + 1, STEPS // CHECKPOINTS))
    assert told[-2]["failures"] > 1_000
    assert told[-2]["refusals"] > 500


@pytest.mark.parametrize("name", ["tensors", "tensor bytes", "threads"])
def test_is_exactly_flat(told, name):
    values = column(told, name)
    assert len(set(values)) == 1, values
    assert values[0] > 0


def test_objects_stay(told):
    """Frames, exceptions, replicas: whatever may be in a cycle.  A checkpoint makes a few of its own."""
    assert grown(told, "objects") <= 20, column(told, "objects")


def test_no_garbage_is_left_for_the_collector(told):
    assert told[-1] == {"garbage": 0}


def test_resident_memory_stays_within_8_mib(told):
    assert grown(told, "rss") <= 8 * MIB, column(told, "rss")


def test_allocated_memory_stays(told):
    """A graph that nobody frees is memory of C++, which Python's objects do not show.  At most 6 bytes a step.

    The checkpoint that adds most is left out: a library may need a buffer late, once.
    """
    assert grown(told, "malloc") <= MIB // 4, column(told, "malloc")
    added = sorted(after - before for before, after in pairwise(column(told, "malloc")))
    assert sum(added[:-1]) <= 6 * (STEPS - STEPS // CHECKPOINTS), column(told, "malloc")


def test_pythons_blocks_stay(told):
    """Also those that the collector does not know, such as numbers and texts.  Half a block a step."""
    assert grown(told, "blocks") <= STEPS // 2, column(told, "blocks")
