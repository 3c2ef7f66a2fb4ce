"""The example under `torchrun`, and two processes with a real network between them, each in a namespace of its own."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "several_processes.py"
TORCHRUN = [sys.executable, "-P", "-m", "torch.distributed.run"]
SECONDS = 120


def environment(**variables):
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables}


def told(*command):
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, check=False, env=environment(), timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return re.findall(r"^epoch .*$", done.stdout, re.MULTILINE)


@pytest.fixture(scope="module")
def alone():
    """What the example says as one process."""
    found = told(sys.executable, "-P", EXAMPLE, "--epochs", 3)
    assert found[0].startswith("epoch 1: loss ")
    return found


def test_the_example_goes_on_in_another_number_of_processes(tmp_path, alone):
    file = tmp_path / "state.pt"
    one = told(sys.executable, "-P", EXAMPLE, "--epochs", 1, "--save", file)
    two = told(*TORCHRUN, "--standalone", "--nproc-per-node=2", EXAMPLE, "--epochs", 3, "--save", file)
    assert one + two == alone
    assert [path.name for path in tmp_path.iterdir()] == ["state.pt"]


LEAVING = """
import runpy, sys
from pathlib import Path

sys.argv = [sys.argv[1], "--epochs", "1"]
runpy.run_path(sys.argv[0], run_name="__main__")
names = [each.read_text() for each in Path("/proc/self/task").glob("*/comm")]
sys.stdout.write(f"epoch of {sum('gloo' in name for name in names)} threads of gloo\\n")
"""


def test_the_example_leaves_no_thread_of_the_group_behind(tmp_path):
    """One that is there when Python ends, aborts the process now and then: it wants a lock that is gone."""
    script = tmp_path / "leaving.py"
    script.write_text(LEAVING)
    found = told(*TORCHRUN, "--standalone", "--nproc-per-node=2", script, EXAMPLE)
    assert found.count("epoch of 0 threads of gloo") == 2


DYING = """
import os, sys, torch
from torch import distributed
import mgpu_core

distributed.init_process_group("gloo")
net = torch.nn.Linear(2, 2)
step = mgpu_core.TrainStep(net, torch.nn.functional.mse_loss, torch.optim.SGD(net.parameters(), lr=0.1), ["cpu"] * 2,
                           process_group=distributed.group.WORLD)
for i in range(1000):
    if i == 3 and distributed.get_rank() == 1:
        os._exit(9)
    step(torch.ones(4, 2), torch.ones(4, 2))
"""


def test_a_process_that_dies_under_torchrun_ends_all(tmp_path):
    script = tmp_path / "dying.py"
    script.write_text(DYING)
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment(), timeout=SECONDS)
    assert done.returncode != 0
    assert re.search(r"exitcode\s*: 9", done.stderr)


ADDRESSES = ("10.213.77.1", "10.213.77.2")


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=SECONDS)


@pytest.fixture
def machines():
    """Two network namespaces with a cable between them: their names."""
    names = [f"mgpu{os.getpid()}{end}" for end in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", names[0], "type", "veth", "peer", "name", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("link", "set", name, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
            ip("-n", name, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        remove(names)
        pytest.skip(f"no network namespaces may be made here: {error}")
    yield names
    remove(names)


def remove(names):
    for name in names:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=SECONDS)


def on_machine(names, node, *arguments):
    command = ["ip", "netns", "exec", names[node], sys.executable, "-P", EXAMPLE, *arguments]
    index = {"WORLD_SIZE": "2", "RANK": node, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 29507}
    variables = {name: str(value) for name, value in index.items()}
    variables |= {"MASTER_ADDR": ADDRESSES[0], "GLOO_SOCKET_IFNAME": names[node]}
    return subprocess.Popen(
        [*map(str, command)], env=environment(**variables), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_two_machines(machines, alone):
    processes = [on_machine(machines, node, "--epochs", 2) for node in range(2)]
    answers = [each.communicate(timeout=SECONDS) for each in processes]
    assert [each.returncode for each in processes] == [0, 0], answers
    assert re.findall(r"^epoch .*$", answers[0][0], re.MULTILINE) == alone[:2]
    assert answers[1][0] == ""


def test_a_cable_that_is_pulled_ends_both_in_time(machines):
    processes = [on_machine(machines, node, "--epochs", 100000, "--timeout", 4) for node in range(2)]
    try:
        assert processes[0].stdout.readline().startswith("epoch 1")
        ip("-n", machines[0], "link", "set", machines[0], "down")
        begin = time.monotonic()
        answers = [each.communicate(timeout=SECONDS) for each in processes]
        assert time.monotonic() - begin < SECONDS / 2
        assert all(each.returncode != 0 for each in processes)
        assert any("Timed out waiting 4000ms" in text for _, text in answers)  # in torch's words
    finally:
        for each in processes:
            each.kill()
