"""The real plug-in for TPUs, installed beside torch: what runs of it, and of us with it, where there is no TPU.

It is 230 MB to download from the package index, so the variable MGPU_TEST_TORCH_TPU asks for it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
NEEDED = ("torch_tpu==0.2.0", "libtpu==0.0.52", "absl-py>=2", "frozendict>=2", "immutabledict>=4", "portpicker>=1.6")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not "2.11" <= torch.__version__ < "2.16", reason="torch_tpu 0.2.0 is for torch 2.11 to 2.15"),
    pytest.mark.skipif(not os.environ.get("MGPU_TEST_TORCH_TPU"), reason="MGPU_TEST_TORCH_TPU=1 asks for the plug-in"),
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Variables of a process that finds the plug-in, and from which torch loads it, in a folder of its own."""
    folder = tmp_path_factory.mktemp("plug_in")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, *NEEDED]
    done = subprocess.run(install, capture_output=True, text=True, check=False, timeout=100)
    if done.returncode:
        pytest.skip(f"the package index has no {NEEDED[0]} for this Python: {done.stderr.splitlines()[-1:]}")
    # Without TPU_SKIP_MDS_QUERY even torch's own backward would wait for a server of the cloud, where there is no TPU.
    variables = {"PYTHONWARNINGS": "ignore", "MGPU_CORE_CPU_RANKS": "0", "TPU_SKIP_MDS_QUERY": "1"}
    return {**os.environ, **variables, "PYTHONPATH": os.pathsep.join([str(folder), str(TESTS)])}


def said(environment, *arguments):
    done = subprocess.run(
        [sys.executable, "-P", *arguments], capture_output=True, text=True, check=False, timeout=100, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


def answer(environment, script):
    """What a script prints last, as JSON."""
    return json.loads(said(environment, "-c", script).splitlines()[-1])


PASSED_THROUGH = """
import json, sys
import torch
import mgpu_core
from fakes.nets import whole
from fakes.tensors import numbers

assert "torch_tpu" in sys.modules
net = whole(torch.nn.Linear(3, 2))
x = numbers(5, 3)
model = mgpu_core.DataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
step = mgpu_core.TrainStep(net, lambda out, y: (out - y).square().sum(), optimizer, ["cpu"] * 2, reduction="sum")
is_same = model(x).tolist() == net(x).tolist()
print(json.dumps([model.device_ids, is_same, float(step(x, net(x).detach() + 1))]))
"""


def test_everything_goes_on_without_a_tpu(environment):
    assert answer(environment, PASSED_THROUGH) == [[], True, 2.0 * 5]


def test_doctor_sees_no_accelerator(environment):
    lines = [line.split() for line in said(environment, "-m", "mgpu_core", "doctor").splitlines()]
    assert ["accelerator", "none"] in [line[:2] for line in lines]


INTERFACE = """
import inspect, json, sys
import torch
from torch_tpu import _loader

_loader._init_device("tpu")  # which torch_tpu does at its import where there is a TPU
from fakes.accelerator import tpu_module
from mgpu_core.devices.devices import as_device, default_devices, has_accelerator

try:
    refusal = as_device("tpu:0")
except ValueError as error:
    refusal = str(error)
ours = [name for name, value in vars(tpu_module).items() if hasattr(value, "__wrapped__")]
texts = {}
for name in ours:
    for kind, module in (("real", torch.tpu), ("fake", tpu_module)):
        try:
            getattr(module, name)(*([0] if "device" == name or "set" in name else []))
        except RuntimeError as error:
            texts.setdefault(name, {})[kind] = str(error).split(". ")[1]
print(json.dumps({
    "accelerator": str(torch.accelerator.current_accelerator()),
    "devices": [has_accelerator(), len(default_devices())],
    "refusal": refusal,
    "texts": texts,
    "real": dir(torch.tpu),
    "fake": [name for name in vars(tpu_module) if not name.startswith("_")],
    "arguments": [list(inspect.signature(f).parameters) for f in (torch.tpu.get_rng_state, torch.tpu.set_rng_state)],
}))
"""


def test_the_fake_with_its_rules_refuses_and_lacks_the_same(environment):
    seen = answer(environment, INTERFACE)
    assert (seen["accelerator"], seen["devices"]) == ("tpu", [False, 0])
    assert seen["refusal"].startswith("device tpu:0 does not exist: torch sees 0 tpu devices here")
    assert len(seen["texts"]) == 7
    assert {name: texts["real"] for name, texts in seen["texts"].items()} == {
        name: texts["fake"] for name, texts in seen["texts"].items()
    }
    assert [each[-1] for each in seen["arguments"]] == ["device", "device"]
    assert [len(each) for each in seen["arguments"]] == [1, 2]
    offered = {"get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all", "get_amp_supported_dtype"}
    assert offered <= set(seen["real"]) & set(seen["fake"])
    lacking = {"memory_stats", "mem_get_info", "empty_cache", "memory_allocated", "reset_peak_memory_stats"}
    assert not lacking & (set(seen["real"]) | set(seen["fake"]))
