"""The network of the `shards` case, and its peer FSDP2: processes that keep a part of each block."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD

from mgpu_core.tools.bench.gloo_worker import TrainingRank, WorkerConfig
from mgpu_core.tools.bench.training import torch_step

CLASSES, LR, SEED = 10, 0.1, 0


class ResidualBlock(nn.Module):
    """Adds two layers of its input to it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.layers = nn.Sequential(nn.LayerNorm(width), up, nn.GELU(), down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return as many features as there are."""
        added: torch.Tensor = self.layers(x)
        return x + added


@dataclass(frozen=True)
class ShardsTask:
    """The network and the batch that all contestants train.

    Attributes:
        device: `cpu` or `cuda`.
        ranks: that the rows are cut for.
        layers, width: of the blocks.
        batch: rows of a step over all ranks.
    """

    device: str
    ranks: int
    layers: int
    width: int
    batch: int

    def network(self) -> nn.Sequential:
        """Return a fresh network on the device, always with the same weights."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(SEED)
            blocks = [ResidualBlock(self.width) for _ in range(self.layers)]
            return nn.Sequential(*blocks, nn.Linear(self.width, CLASSES)).to(self.device)

    def rows(self, salt: int) -> list[torch.Tensor]:
        """Random inputs and classes, others for each salt."""
        generator = torch.Generator().manual_seed(salt)
        inputs = torch.randn(self.batch, self.width, generator=generator)
        return [inputs.to(self.device), torch.randint(CLASSES, (self.batch,), generator=generator).to(self.device)]

    def wrong(self, parameters: Iterable[torch.Tensor], salt: int) -> int:
        """Count the wrong values after one step from the first weights on the rows of this salt."""
        truth = self.network()
        torch_step(truth, SGD(truth.parameters(), lr=LR))(*self.rows(salt))
        pairs = zip(parameters, truth.parameters(), strict=True)
        return sum(int((~torch.isclose(*pair, rtol=1e-5, atol=1e-6)).sum()) for pair in pairs)

    def wait(self) -> None:
        """Wait for the GPUs that this process uses."""
        for index in range(torch.cuda.device_count() if self.device == "cuda" else 0):
            torch.cuda.synchronize(index)


class FsdpRank(TrainingRank):
    """A process with its part of each block and its share of the rows, over gloo, or over NCCL on its own GPU."""

    def __init__(self, config: WorkerConfig) -> None:
        self._rank = config.rank

    def prepare(self, task: ShardsTask) -> None:
        """Make the network; all ranks together."""
        self._task = task
        if task.device == "cuda":
            torch.cuda.set_device(self._rank)
        group: Any = distributed.new_group(backend="nccl" if task.device == "cuda" else "gloo")
        self._mesh = DeviceMesh.from_group(group, task.device)
        self._begin(0)

    def _begin(self, salt: int) -> None:
        self._network: Any = self._task.network()
        for module in (*self._network[:-1], self._network):
            fully_shard(module, mesh=self._mesh)
        self._step = torch_step(self._network, SGD(self._network.parameters(), lr=LR))
        self._rows = [tensor.chunk(self._task.ranks)[self._rank] for tensor in self._task.rows(salt)]

    def step(self) -> None:
        self._step(*self._rows)
        self._task.wait()

    def wrong(self, salt: int) -> int:
        """Count the wrong parameters after one step."""
        self._begin(salt)
        self.step()
        return self._task.wrong([parameter.full_tensor() for parameter in self._network.parameters()], salt)
