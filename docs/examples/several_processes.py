"""Several processes, on one machine or many, train one net.

Two processes on this machine:

    torchrun --nproc-per-node 2 several_processes.py

Two machines, with ``--node-rank 0`` on the first and ``--node-rank 1`` on the other:

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 1 \\
        --master-addr 10.0.0.1 several_processes.py

Each process has its own ranks: one GPU here, or two CPU ranks where there is none.
Without ``torchrun`` the same file runs as one process, and gets the same losses.
"""

import argparse
import os
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, nn

import mgpu_core

ROWS, BATCH = 480, 48


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument(
        "--save",
        type=Path,
        help="go on from this file, if it is there, and write it after each epoch",
    )
    parser.add_argument(
        "--timeout", type=float, default=60, help="seconds to wait for other processes"
    )
    arguments = parser.parse_args()

    torch.manual_seed(0)
    x = torch.randn(ROWS, 20)
    y = (x[:, :10].sum(1) > x[:, 10:].sum(1)).long()
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)

    # After the optimizer: modules that torch loads for the first one would keep a group
    # that is there already, and its threads, which may abort the process at its end.
    group = None
    if "WORLD_SIZE" in os.environ:  # torchrun has started us
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        distributed.init_process_group(
            backend, timeout=timedelta(seconds=arguments.timeout)
        )
        group = distributed.group.WORLD
    process, processes = (
        (distributed.get_rank(), distributed.get_world_size()) if group else (0, 1)
    )
    device_ids = (
        [int(os.environ.get("LOCAL_RANK", 0))]
        if torch.cuda.is_available()
        else ["cpu"] * 2
    )
    step = mgpu_core.TrainStep(
        net, nn.functional.cross_entropy, optimizer, device_ids, process_group=group
    )
    if arguments.save is not None and arguments.save.exists():  # all processes load it
        step.load_state_dict(torch.load(arguments.save, weights_only=True))

    for epoch in range(step.steps * BATCH // ROWS, arguments.epochs):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch))
        losses = []
        for rows in order.split(BATCH):
            mine = rows.tensor_split(processes)[process]  # this process's rows
            losses.append(step(x[mine], y[mine]) * len(mine) / len(rows))
        total = torch.stack(losses).sum().cpu() / len(losses)
        if group is not None:
            total = total.to(step.team.devices[0])
            distributed.all_reduce(total)
        if process == 0:
            print(f"epoch {epoch + 1}: loss {float(total):.5f}", flush=True)
            if arguments.save is not None:
                whole = arguments.save.with_suffix(
                    ".part"
                )  # a process that dies here leaves the file of before
                torch.save(step.state_dict(), whole)
                whole.replace(arguments.save)
    step.check_replicas()
    step.close()
    if group is not None:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
