"""The ddp peer: a process of `mgpu_core.tools.bench.gloo` as a rank of `DistributedDataParallel`.

It has a replica of the network and its share of the rows; gradients are averaged over gloo while backward goes on.
"""

import time

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from mgpu_core.tools.bench.gloo_worker import WorkerConfig
from mgpu_core.tools.bench.training import Step, Trainee, TrainRow, torch_step


class DdpRank:
    """The orders, as methods."""

    def __init__(self, config: WorkerConfig) -> None:
        self._seat = config

    def prepare(self, training: TrainRow) -> None:
        """Make the network of a row; all ranks together."""
        share = training.batch // self._seat.ranks
        begin = self._seat.rank * share
        self._trainee = Trainee(training, _ddp_step, slice(begin, begin + share))

    def run(self) -> float:
        """Return the seconds of one turn, from the barrier to this rank's end."""
        distributed.barrier()
        begin = time.perf_counter()
        self._trainee.train()
        return time.perf_counter() - begin

    def wrong(self, salt: int) -> int:
        """Wrong values in this rank; each compares with the bare module on the whole batch."""
        return self._trainee.wrong(salt)


def _ddp_step(network: nn.Module, optimizer: SGD) -> Step:
    # Without the view every gradient would be copied to its bucket and back.
    return torch_step(DistributedDataParallel(network, gradient_as_bucket_view=True), optimizer)
