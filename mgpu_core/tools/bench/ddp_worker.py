"""The ddp peer: a process of `mgpu_core.tools.bench.gloo` as a rank of `DistributedDataParallel`.

It has a replica of the network and its share of the rows; gradients are averaged over gloo while backward goes on.
"""

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from mgpu_core.tools.bench.gloo_worker import TrainingRank, WorkerConfig
from mgpu_core.tools.bench.training import Step, Trainee, TrainRow, torch_step


class DdpRank(TrainingRank):
    """The orders, as methods."""

    def __init__(self, config: WorkerConfig) -> None:
        self._seat = config

    def prepare(self, training: TrainRow) -> None:
        """Make the network of a row; all ranks together."""
        share = training.batch // self._seat.ranks
        begin = self._seat.rank * share
        self._trainee = Trainee(training, _ddp_step, slice(begin, begin + share))

    def step(self) -> None:
        self._trainee.train()

    def wrong(self, salt: int) -> int:
        """Wrong values in this rank; each compares with the bare module on the whole batch."""
        return self._trainee.wrong(salt)


def _ddp_step(network: nn.Module, optimizer: SGD) -> Step:
    # Without the view every gradient would be copied to its bucket and back.
    return torch_step(DistributedDataParallel(network, gradient_as_bucket_view=True), optimizer)
