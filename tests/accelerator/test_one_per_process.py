"""TPUs: a process has one of them, its ranks share it, and the plug-in refuses whoever does not ask by torch."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fakes import accelerator
from fakes.accelerator import fakes
from fakes.nets import whole
from fakes.tensors import numbers
from torch import nn

import mgpu_core
from mgpu_core.devices.devices import as_device, default_devices, local_devices
from mgpu_core.devices.plug_ins import numbers_of, total_nbytes

pytestmark = pytest.mark.skipif(not accelerator.has_tpu_rules(), reason="is about the fake with the rules of a TPU")

TPU = torch.device(fakes(1)[0])


def mean_square(out, target):
    return (out - target).square().mean()


@pytest.mark.parametrize(
    ("refused", "instead"),
    [
        (lambda: torch.tpu.device_count(), "device_count"),
        (lambda: torch.tpu.current_device(), "current_device_index"),
        (lambda: torch.tpu.set_device(0), "set_device_index"),
        (lambda: torch.tpu.is_available(), "is_available"),
        (lambda: torch.tpu.synchronize(), "synchronize"),
        (lambda: torch.tpu.get_rng_state("tpu"), "random.get_rng_state"),
    ],
)
def test_the_fake_refuses_whoever_is_not_torch(refused, instead):
    with pytest.raises(RuntimeError, match=rf"by the PyTorch framework .* Use torch\.accelerator\.{instead} instead"):
        refused()


def test_the_fake_has_one_device_and_tells_no_memory():
    assert torch.accelerator.device_count() == 4
    assert torch.accelerator.current_device_index() == 0
    with pytest.raises(RuntimeError, match="tpu:1 is not tpu:0, which this process is bound to"):
        torch.ones(2, device="tpu:1")
    with pytest.raises(RuntimeError, match="which this process is bound to"):
        torch.accelerator.set_device_index(1)
    with pytest.raises(RuntimeError, match="tpu:4 does not exist"):
        torch.ones(2, device="tpu:4")
    assert not {"memory_stats", "mem_get_info", "empty_cache", "memory_allocated"} & set(dir(torch.tpu))


def test_the_device_of_the_process_is_the_default():
    assert default_devices() == [TPU]
    assert [as_device(device) for device in (0, "tpu", "tpu:0", torch.device("tpu"))] == [TPU] * 4
    model = mgpu_core.DataParallel(whole(nn.Linear(3, 2)))
    assert model.device_ids == [0]
    assert model(numbers(4, 3)).tolist() == model.module(numbers(4, 3)).tolist()


@pytest.mark.parametrize("other", [1, "tpu:3", 4])
def test_the_device_of_another_process_is_refused(other):
    with pytest.raises(ValueError, match=r"is not this process's: .* here tpu:0\. .* share it: \[\"tpu\"\] \* 2"):
        mgpu_core.DataParallel(nn.Linear(3, 2), [0, other])


def test_each_process_of_a_launcher_has_its_own(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert local_devices() == [TPU]


def test_memory_is_unknown():
    assert total_nbytes(TPU) is None


def test_a_checkpoint_has_the_random_numbers_of_the_device():
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    step = mgpu_core.TrainStep(net, mean_square, torch.optim.SGD(net.parameters(), lr=0.5), fakes(2))
    state = copy.deepcopy(step.state_dict())
    assert len(state["random"]["accelerators"]) == 1
    drawn = [torch.rand(3).tolist(), float(step(numbers(6, 4), numbers(6, 4)))]
    step.load_state_dict(state)
    assert [torch.rand(3).tolist(), float(step(numbers(6, 4), numbers(6, 4)))] == drawn


class Turned(nn.Module):
    """Calls its layers in another order than it lists them: a pipeline's first call begins again when that shows."""

    def __init__(self):
        super().__init__()
        self.last, self.first = whole(nn.Linear(4, 4)), whole(nn.Linear(4, 4))

    def forward(self, x):
        return self.last(nn.functional.dropout(self.first(nn.functional.dropout(x))))


def test_a_pipeline_whose_first_call_begins_again_draws_as_one_device_does():
    net = Turned()
    pipe = mgpu_core.Pipeline(copy.deepcopy(net), fakes(2), chunks=1)
    torch.manual_seed(5)
    wanted = net(numbers(3, 4)), torch.rand(2)
    torch.manual_seed(5)
    drawn = pipe(numbers(3, 4)), torch.rand(2)
    assert [each.tolist() for each in drawn] == [each.tolist() for each in wanted]


def test_a_plug_in_without_random_states_is_named(monkeypatch):
    monkeypatch.delattr(torch.tpu, "set_rng_state")
    with pytest.warns(RuntimeWarning, match=r"the plug-in for tpu has no torch\.tpu\.set_rng_state"):
        assert numbers_of([TPU]) == {}


SCRIPT = """
import json, sys
from pathlib import Path
from fakes import accelerator

accelerator.register()
import torch
from fakes.accelerator import tpu_dist
from fakes.nets import whole
from fakes.tensors import numbers
from torch import distributed, nn
import mgpu_core

tpu_dist.register()
distributed.init_process_group("tpu_dist")
process = distributed.get_rank()
x, y = numbers(8, 2, device="cpu"), numbers(8, 1, device="cpu")
trained = []
for devices in (None, [f"tpu:{process}"] * 2):
    net = whole(nn.Linear(2, 1)).to("tpu")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.25)
    step = mgpu_core.TrainStep(
        net, lambda out, y: (out - y).square().mean(), optimizer, devices, process_group=distributed.group.WORLD
    )
    for _ in range(2):
        step(x.tensor_split(2)[process], y.tensor_split(2)[process])
    trained.append(([str(device) for device in step.team.devices], [p.tolist() for p in net.parameters()]))
    step.close()
Path(sys.argv[1], str(process)).write_text(json.dumps(trained))
distributed.destroy_process_group()
"""


def test_two_processes_train_as_one_device(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(accelerator.__file__).parents[2]))
    launch = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*launch, script, tmp_path], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    net = whole(nn.Linear(2, 1, device="cpu"))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.25)
    for _ in range(2):
        optimizer.zero_grad()
        mean_square(net(numbers(8, 2, device="cpu")), numbers(8, 1, device="cpu")).backward()
        optimizer.step()
    for process in range(2):
        wanted = [[[f"tpu:{process}"] * ranks, [p.tolist() for p in net.parameters()]] for ranks in (1, 2)]
        assert json.loads((tmp_path / str(process)).read_text()) == wanted
