"""The network of the `pipeline` case, and processes that train it: alone, or a stage of it each."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

from mgpu_core.tools.bench.gloo_worker import TrainingRank, WorkerConfig

SEED, LR = 0, 0.01
WORDS, WIDTH, HEADS, LENGTH = 1000, 256, 4, 128


@dataclass(frozen=True)
class PipelineTask:
    """The network and the batch that all contestants train.

    Attributes:
        layers: transformer blocks.
        batch: rows of 128 tokens per step.
        chunks: micro-batches per step.
        cut: the block at which the second of two stages begins.
    """

    layers: int
    batch: int
    chunks: int
    cut: int

    def network(self) -> nn.Sequential:
        """Return a fresh network, always with the same weights."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(SEED)
            blocks = [
                nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, batch_first=True) for _ in range(self.layers)
            ]
            return nn.Sequential(Embedding(), *blocks, nn.Linear(WIDTH, WORDS))

    def tokens(self, salt: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random tokens and targets, others for each salt."""
        generator = torch.Generator().manual_seed(salt)
        tokens = torch.randint(WORDS, (2, self.batch, LENGTH), generator=generator)
        return tokens[0], tokens[1]


class Embedding(nn.Module):
    """Embeds tokens and their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) / 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """From whole numbers to vectors."""
        embedded: torch.Tensor = self.words(tokens) + self.positions
        return embedded


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of all tokens."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def wrong_values(task: PipelineTask, parameters: dict[str, torch.Tensor], salt: int) -> int:
    """Wrong parameters after one step on the tokens of this salt, from the first weights."""
    truth, (x, target) = task.network(), task.tokens(salt)
    loss_fn(truth(x), target).backward()
    wanted = {name: each.detach() - LR * each.grad for name, each in truth.named_parameters() if each.grad is not None}
    return sum(
        int((~torch.isclose(value, wanted[name], rtol=1e-3, atol=1e-5)).sum()) for name, value in parameters.items()
    )


class OwnNetwork(TrainingRank):
    """A process that trains the whole network with one thread, beside others that do the same."""

    def __init__(self, config: WorkerConfig) -> None:
        torch.set_num_threads(1)

    def prepare(self, task: PipelineTask) -> None:
        """Make the network."""
        self._task = task
        self._begin(0)

    def _begin(self, salt: int) -> None:
        self._network = self._task.network()
        self._optimizer = torch.optim.SGD(self._network.parameters(), lr=LR)
        self._batch = self._task.tokens(salt)

    def step(self) -> None:
        self._optimizer.zero_grad()
        loss_fn(self._network(self._batch[0]), self._batch[1]).backward()
        self._optimizer.step()

    def wrong(self, salt: int) -> int:
        """Wrong parameters after one step."""
        self._begin(salt)
        self.step()
        return wrong_values(self._task, dict(self._network.named_parameters()), salt)


class OwnStage(OwnNetwork):
    """A process that has one of two stages of the network, by torch.distributed.pipelining."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self._rank = config.rank

    def _begin(self, salt: int) -> None:
        task = self._task
        whole = task.network()
        self._network = nn.Sequential(*(whole[: task.cut] if self._rank == 0 else whole[task.cut :]))
        self._names = list(dict(whole.named_parameters()))
        self._optimizer = torch.optim.SGD(self._network.parameters(), lr=LR)
        stage = PipelineStage(self._network, self._rank, 2, torch.device("cpu"))
        self._schedule = Schedule1F1B(stage, task.chunks, loss_fn)
        self._batch = task.tokens(salt)

    def step(self) -> None:
        self._optimizer.zero_grad()
        if self._rank == 0:
            self._schedule.step(self._batch[0])
        else:
            self._schedule.step(target=self._batch[1])
        self._optimizer.step()

    def wrong(self, salt: int) -> int:
        """Wrong parameters of this stage after one step."""
        self._begin(salt)
        self.step()
        parameters = list(self._network.parameters())
        names = self._names[: len(parameters)] if self._rank == 0 else self._names[-len(parameters) :]
        return wrong_values(self._task, dict(zip(names, parameters, strict=True)), salt)
