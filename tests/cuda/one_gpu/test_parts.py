"""The parts of the stack: backends, kernels, collectives, the wrapper, synchronised layers."""

import copy

import pytest
import torch
from fakes.here import alike, optimizer_of
from torch.nn import functional

import mgpu_core
from mgpu_core import _core, comm, kernels
from mgpu_core.devices import streams
from mgpu_core.devices.nccl_library import wheel_libraries
from mgpu_core.kernels import reference


@pytest.mark.usefixtures("gpu_only")
def test_the_core_serves_this_gpu(here):
    backends = {name: (built, detail) for name, built, detail in _core.backends()}
    facts = torch.cuda.get_device_properties(0)
    here.figures["GPU"] = f"{facts.name}, {facts.multi_processor_count} SMs, L2 {facts.L2_cache_size >> 20} MiB"
    here.figures["driver, NCCL"] = f"{_core.driver_version('cuda')}, {_core.nccl_open(wheel_libraries())}"
    assert backends["cuda"][0]
    assert _core.device_count("cuda") == torch.cuda.device_count()
    assert streams.core_serves([here.device])


@pytest.mark.parametrize("count", [1, 1000, 70_001, "more than 2^31 bytes"])
def test_kernels(here, count):
    """Each next to plain torch, on misaligned tensors."""
    if isinstance(count, str):
        count = (1 << 29) + 5 if here.is_gpu else 1 << 16
    x = (torch.arange(count + 1, device=here.device) % 13).float()[1:]
    made = kernels.scale_cast(x, -0.5, torch.bfloat16)
    assert torch.equal(made, reference.scale_cast(x, -0.5, torch.bfloat16))
    del made
    assert torch.equal(kernels.sum_ranks([x, x, x], "sum"), x * 3)
    half = x[: count // 2 + 1]
    flat = kernels.pack([x, half])
    assert torch.equal(flat[:count], x)
    assert torch.equal(flat[count:], half)
    del flat
    assert float(kernels.l2_norm([x])) == pytest.approx(float(x.double().square().sum().sqrt()), rel=1e-6)


def test_rows_are_gathered(here):
    rows = torch.randint(0, 256, (1000, 28 * 28), dtype=torch.uint8, device=here.device)
    index = torch.randint(0, 1000, (5000,), device=here.device)
    made = kernels.gather_rows(rows, index, scale=0.31, shift=-1.5)
    assert torch.equal(made, reference.gather_rows(rows, index, scale=0.31, shift=-1.5, dtype=made.dtype))


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("algorithm", ["auto", "naive", "direct", "ring", "tree"])
def test_all_reduce(here, algorithm, merge):
    parts = [torch.arange(4097.0, device=here.device) + rank for rank in range(4)]
    comm.all_reduce(parts, algorithm=algorithm, merge_shared_devices=merge)
    wanted = 4 * torch.arange(4097.0, device=here.device) + 6
    assert all(torch.equal(part, wanted) for part in parts)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("pinned", [False, True])
def test_scatter_and_gather(here, pinned, dim):
    whole = torch.randn(64, 128, 33)
    whole = whole.pin_memory() if pinned and here.is_gpu else whole
    assert torch.equal(comm.gather(comm.scatter(whole, here.team(4), dim=dim), dim, "cpu"), whole)


@pytest.mark.parametrize("workers", ["threads", "caller", "auto"])
@pytest.mark.parametrize("team", [1, 2, 4, "beside the CPU"])
def test_the_wrapper_trains_as_the_bare_net(here, team, workers):
    team = [here.name, "cpu"] if isinstance(team, str) else here.team(team)
    net = here.net()
    alone = copy.deepcopy(net)
    wrapped = mgpu_core.DataParallel(net, team, workers=workers)
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.05) for each in (net, alone))
    for x, y in here.batches(10, where="cpu"):
        for model, optimizer, given in ((wrapped, ours, x), (alone, theirs, x.to(here.device))):
            optimizer.zero_grad()
            functional.cross_entropy(model(given), y.to(here.device)).backward()
            optimizer.step()
    alike(net, alone)


def test_synchronised_batch_norm(here):
    """Of two ranks: outputs, gradients and running statistics are those of one device's layer."""
    net = here.net(norm=True)
    alone = copy.deepcopy(net)
    net = mgpu_core.convert_sync_batchnorm(net)
    step = mgpu_core.TrainStep(net, functional.cross_entropy, optimizer_of("sgd", net.parameters()), here.team(2))
    here.compare(step, alone, "sgd", steps=10)
