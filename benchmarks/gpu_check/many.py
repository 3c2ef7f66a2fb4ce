"""The checks that need two GPUs or more: `python many.py probe|contexts|replicas|streams|abort`.

Exit status: 0 right; 1 an error, which the traceback names. Lines that begin with "figure: " come into the summary.
"""

import argparse
import itertools
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import torch
from torch.nn import functional
from torch.optim import SGD

from mgpu_core import TrainStep, _core, comm
from mgpu_core.devices import streams
from mgpu_core.devices.nccl_library import wheel_libraries
from mgpu_core.devices.peers import PeerVerdict, prove_peers
from mgpu_core.tools.mnist.model import build_model

TEAM_SECONDS = 20.0  # that NCCL may go without progress, in the check of teams that lose a process
END_SECONDS = 30.0  # more, until its process has ended
ROWS = 1 << 20


def probe() -> None:
    """Prints which GPUs reach each other, GB/s of each ordered pair, and how long the test took."""
    begin = time.perf_counter()
    verdicts = prove_peers(range(torch.cuda.device_count()), again=True)
    print(f"figure: the test of {len(verdicts)} pairs took {time.perf_counter() - begin:.0f} s")
    for each in verdicts:
        print(f"figure: {described(each, torch.cuda.can_device_access_peer(each.device, each.peer))}")


def described(verdict: PeerVerdict, capable: bool) -> str:
    """One pair as a line."""
    found = verdict.problem or f"{verdict.gigabytes_per_second:.0f} GB/s"
    return f"cuda:{verdict.device} -> cuda:{verdict.peer}: driver says {'yes' if capable else 'no'}, test: {found}"


def contexts() -> None:
    """Uses cuda:1 alone, from a thread that has no context. Raises if memory of cuda:0 was taken for one."""
    before = used_mib(0)
    thread = threading.Thread(target=_use, args=(torch.device("cuda", 1),))
    thread.start()
    thread.join()
    taken = used_mib(0) - before
    print(f"figure: work on cuda:1 alone took {taken} MiB of cuda:0")
    assert taken < 100, "a context was made on cuda:0"  # a context takes some 300 MiB or more


def _use(device: torch.device) -> None:
    parts = [torch.ones(ROWS, device=device) for _ in range(2)]
    assert comm.gather(parts, destination="cpu").sum() == 2 * ROWS


def used_mib(gpu: int) -> int:
    """MiB of a GPU that are in use, by anybody; asking torch would make a context."""
    uuid = f"GPU-{torch.cuda.get_device_properties(gpu).uuid}"
    command = ["nvidia-smi", "-i", uuid, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def replicas(devices: Sequence[torch.device], algorithm: str, steps: int) -> None:
    """Trains the CNN. Raises if the replicas do not hold the same bits, or the loss is no number."""
    torch.manual_seed(0)
    net = build_model("cnn").to(devices[0])
    optimizer = SGD(net.parameters(), lr=0.01, momentum=0.9)
    step = TrainStep(net, functional.cross_entropy, optimizer, list(devices), algorithm=algorithm)
    begin = time.perf_counter()
    for number in range(steps):
        images = torch.randn(16 * len(devices), 1, 28, 28, device=devices[0])
        loss = step(images, torch.randint(10, (len(images),), device=devices[0]))
        if number % 100 == 99 or number == steps - 1:
            step.check_replicas()
            assert loss.isfinite(), loss
    milliseconds = (time.perf_counter() - begin) / steps * 1e3
    print(f"figure: {algorithm}, {len(devices)} GPUs: {milliseconds:.2f} ms a step over {steps} steps")


def without_peers(devices: Sequence[torch.device], turns: int) -> None:
    """Scatters, gathers and adds on streams of its own, with no pair allowed to the core. Raises at a wrong value."""
    # As where the test of every pair has failed.
    streams.settle_peers = lambda devices: None  # type: ignore[attr-defined]
    streams.have_proved_access = lambda device, peer: False  # type: ignore[attr-defined]
    own = [None if device.type == "cpu" else torch.Stream(device) for device in devices]
    with streams.on_all(devices, own):
        for turn in range(turns):
            whole = torch.zeros(len(devices) * ROWS, device=devices[0])
            _delay(devices)
            whole += turn
            parts = [part * 2 for part in comm.scatter(whole, devices)]
            _delay(devices)
            sums = [part + 1 for part in parts]
            comm.all_reduce(sums)
            joined = comm.gather(parts, destination=devices[0])
            assert joined.eq(2 * turn).all(), turn
            assert all(each.eq((2 * turn + 1) * len(devices)).all() for each in sums), turn


def _delay(devices: Sequence[torch.device]) -> None:
    """Makes each GPU late, so that whoever does not wait for it reads what was there before."""
    for device in devices:
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda._sleep(5_000_000)


def rank_of_two(rank: int, unique_id: bytes) -> None:
    """All-reduces with the other process for ever; says so after the first time."""
    _core.nccl_open(wheel_libraries())
    torch.cuda.set_device(rank)
    team = _core.nccl_init(unique_id, 2, [rank], [rank], TEAM_SECONDS)
    tensor = torch.zeros(ROWS, device="cuda")
    stream = [_core.Stream("cuda", rank, torch.cuda.current_stream().cuda_stream)]
    for turn in itertools.count():
        team.all_reduce([tensor.data_ptr()], [tensor.data_ptr()], ROWS, "float32", "sum", stream, False)
        team.wait(stream)
        if turn == 0:
            print("going", flush=True)


def abort(commands: Sequence[Sequence[str]], sent: signal.Signals, seconds: float) -> None:
    """Stops or kills the second of two processes. Raises unless the first ends in time with an NcclError."""
    children = [subprocess.Popen(each, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for each in commands]
    try:
        for child in children:
            while child.stdout is not None and (line := child.stdout.readline()) != "going\n":
                assert line, "a process ended before its first all-reduce"
        begin = time.perf_counter()
        children[1].send_signal(sent)
        _, said = children[0].communicate(timeout=seconds)
        print(f"figure: after {sent.name}: an error in {time.perf_counter() - begin:.0f} s")
        assert children[0].returncode == 1, children[0].returncode
        assert "NcclError" in said, said[-2000:]
    finally:
        for child in children:
            child.kill()
            child.wait()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("check", choices=("probe", "contexts", "replicas", "streams", "abort", "rank"))
    add("--algorithm", default="direct")
    add("--steps", type=int, default=1000)
    add("--signal", default="STOP", choices=("STOP", "KILL"))
    add("--rank", type=int, default=0)
    add("--unique-id", default="")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and does what it asks."""
    options = _parser().parse_args(arguments)
    devices = [torch.device("cuda", gpu) for gpu in range(torch.cuda.device_count())]
    if options.check == "rank":
        rank_of_two(options.rank, bytes.fromhex(options.unique_id))
    elif options.check == "abort":
        _core.nccl_open(wheel_libraries())
        unique_id = _core.nccl_unique_id().hex()  # this process answers for it, so it lives longer than both
        command = [sys.executable, "-P", __file__, "rank", "--unique-id", unique_id, "--rank"]
        abort(
            [[*command, str(rank)] for rank in (0, 1)],
            signal.Signals[f"SIG{options.signal}"],
            TEAM_SECONDS + END_SECONDS,
        )
    elif options.check == "replicas":
        replicas(devices, options.algorithm, options.steps)
    elif options.check == "streams":
        without_peers(devices, turns=20)
    else:
        {"probe": probe, "contexts": contexts}[options.check]()


if __name__ == "__main__":
    main()
