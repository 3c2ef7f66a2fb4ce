"""NCCL for real, on one GPU: a team of one rank, and a team of two ranks on the one GPU.

Two ranks of one process share a GPU from NCCL 2.30 on (NCCL_MULTI_RANK_GPU_ENABLE=1).  Before, each rank is a process
that says it is a machine of its own (NCCL_HOSTID), and they meet by the loopback network: slow, but it is NCCL.
"""

import os
import subprocess
import sys

import pytest
import torch
from fakes.children import finish

from mgpu_core import _core, comm
from mgpu_core.devices import nccl_teams
from mgpu_core.devices.nccl_library import wheel_libraries

OPS = {"sum": 3.0, "avg": 1.5, "prod": 2.0, "min": 1.0, "max": 2.0}


@pytest.fixture(autouse=True)
def nccl(gpu):
    if not nccl_teams.nccl_is_there():
        pytest.skip("there is no NCCL here that can be used")
    return gpu


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("op", OPS)
def test_ranks_that_share_a_gpu_are_merged(gpu, ranks, op):
    for dtype in (torch.float32, torch.float16, torch.int32, torch.uint8):
        parts = [torch.full((1001,), rank % 2 + 1, dtype=dtype, device=gpu) for rank in range(ranks)]
        host = [part.cpu() for part in parts]
        comm.all_reduce(host, op)
        _core.reset_counters()
        comm.all_reduce(parts, op, algorithm="nccl")
        assert all(torch.equal(part.cpu(), host[0]) for part in parts)
        assert set(_core.counters()) == {("all_reduce", "nccl", rank) for rank in range(ranks)}


def test_work_before_and_after_is_in_order(gpu):
    parts = [torch.zeros(1 << 20, device=gpu) for _ in range(2)]
    for _ in range(10):
        torch.cuda._sleep(1_000_000)
        for part in parts:
            part.fill_(1)
        comm.all_reduce(parts, algorithm="nccl")
        for part in parts:
            part.div_(2)
    assert all(part.eq(1).all() for part in parts)


def test_every_collective_of_one_rank(gpu):
    team = _core.nccl_init(_core.nccl_unique_id(), 1, [0], [0], 60.0)
    stream = _core.Stream("cuda", 0, torch.cuda.current_stream().cuda_stream)
    source = torch.arange(7.0, device=gpu)
    outs = [torch.full((7,), -1.0, device=gpu) for _ in range(5)]
    pointers = [out.data_ptr() for out in outs]
    team.all_reduce([source.data_ptr()], pointers[:1], 7, "float32", "sum", [stream], True)
    team.broadcast([source.data_ptr()], [pointers[1:2]], [28], stream, [stream])
    team.reduce([[source.data_ptr()]], pointers[2:3], [7], "float32", "max", [stream], stream)
    team.all_gather([source.data_ptr()], [28], pointers[3:4], [stream])
    team.reduce_scatter([source.data_ptr()], pointers[4:5], 7, "float32", "avg", [stream])
    team.wait([stream])
    assert all(torch.equal(out, source) for out in outs)
    team.close()
    with pytest.raises(ValueError, match="closed"):
        team.all_reduce(pointers[:1], pointers[:1], 7, "float32", "sum", [stream], True)


def test_an_aborted_team_says_so_and_the_next_is_new(gpu):
    parts = [torch.ones(5, device=gpu)]
    comm.all_reduce(parts, algorithm="nccl")
    nccl_teams._teams[0,].abort("the test wants it")
    with pytest.raises(_core.NcclError, match="the test wants it"):
        comm.all_reduce(parts, algorithm="nccl")
    comm.all_reduce(parts, algorithm="nccl")
    torch.cuda.synchronize()


TWO_RANKS = """
import os, sys, torch
from mgpu_core import _core
from mgpu_core.devices.nccl_library import wheel_libraries
_core.nccl_open(wheel_libraries())
unique_id = bytes.fromhex(os.environ["UNIQUE_ID"]) if os.environ["UNIQUE_ID"] else _core.nccl_unique_id()
ranks = [int(rank) for rank in sys.argv[1:]]
team = _core.nccl_init(unique_id, 2, ranks, [0] * len(ranks), 60.0)
streams = [torch.cuda.Stream() for _ in ranks]
tensors = [torch.full((70_001,), rank + 1.0, device="cuda") for rank in ranks]
torch.cuda.synchronize()
pointers = [tensor.data_ptr() for tensor in tensors]
handles = [_core.Stream("cuda", 0, stream.cuda_stream) for stream in streams]
for _ in range(3):
    team.all_reduce(pointers, pointers, 70_001, "float32", "sum", handles, False)
team.wait(handles)
assert all(tensor.eq(12).all() for tensor in tensors), [tensor[:3].tolist() for tensor in tensors]
team.close()
print("right")
"""


def start(ranks, unique_id=b"", **environment):
    command = [sys.executable, "-P", "-c", TWO_RANKS, *map(str, ranks)]
    variables = {**os.environ, "UNIQUE_ID": unique_id.hex(), **environment}
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_two_ranks_on_one_gpu_in_one_process():
    if _core.nccl_version() < 23000:
        pytest.skip("NCCL before 2.30 has one rank of a process on a GPU")
    finish(start([0, 1], NCCL_MULTI_RANK_GPU_ENABLE="1"))


def test_two_ranks_on_one_gpu_in_two_processes():
    _core.nccl_open(wheel_libraries())
    # The id holds an address of its maker, so the maker must have chosen the same network.
    network = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0"}
    maker = "from mgpu_core import _core; import sys\n_core.nccl_open(sys.argv[1:])\n"
    maker += "print(_core.nccl_unique_id().hex(), flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-P", "-c", maker, *wheel_libraries()],
        env={**os.environ, **network},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as root:
        unique_id = bytes.fromhex(root.stdout.readline().strip())
        children = [start([rank], unique_id, NCCL_HOSTID=f"machine-{rank}", **network) for rank in (0, 1)]
        try:
            for child in children:
                finish(child)
        finally:
            for child in children:
                child.kill()
            root.stdin.close()
