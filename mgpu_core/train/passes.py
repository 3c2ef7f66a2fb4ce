"""One call over the ranks, from a batch to losses and outputs; how it is run follows from the module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.utils import parametrize

from mgpu_core.device.clock import RankClock
from mgpu_core.look import Look
from mgpu_core.module_tree import draws_random_numbers
from mgpu_core.nothing import NOTHING
from mgpu_core.parallel import gather
from mgpu_core.parallel.scatter import scatter_objects
from mgpu_core.sync_batchnorm import SyncBatchNorm
from mgpu_core.train.loss import RankLoss
from mgpu_core.train.rank_losses import RankLosses
from mgpu_core.train.ranks import Pass, RankPart, has_graph, run_pass
from mgpu_core.train.replicas import Replicas
from mgpu_core.train.rollback import Gate

__all__ = ["Passes"]


class Passes:
    """The calls of one step.

    Args:
        replicas: the ranks' modules.
        losses: of the ranks.
        reduction: what a loss function returns.
        amp_dtype: what autocast computes in; ``None``: the caller's own setting.
        rng: as in :func:`mgpu_core.parallel_apply`.
        capture: whether graphs are recorded of them, where that is possible.
        dim: the dimension of the rows.

    Attributes:
        joint: the ranks meet in synchronised layers, and share one backward.
    """

    def __init__(
        self,
        replicas: Replicas,
        losses: RankLosses,
        reduction: str,
        amp_dtype: torch.dtype | None,
        rng: str,
        capture: bool,
        dim: int,
    ) -> None:
        self._replicas, self._loss_fns, self._reduction = replicas, losses.functions, reduction
        self._modules = [replicas, *losses.replicas]
        self._amp_dtype, self._dim = amp_dtype, dim
        modules = replicas.net.modules()
        self.joint = len(replicas.team) > 1 and any(isinstance(each, SyncBatchNorm) for each in modules)
        # Ranks that share a GPU take turns where a graph is recorded on their stream; those that meet have no graphs.
        self._rng = "per_rank" if capture and not self.joint else rng
        self._gate = Gate()
        self.look_for_draws()

    def look_for_draws(self) -> None:
        """Finds out whether the module, as it is now, draws random numbers."""
        self._draws = draws_random_numbers(self._replicas.net)

    @property
    def buffers(self) -> list[torch.Tensor | None]:
        """Of the module and the loss function, of all ranks."""
        return [buffer for replicas in self._modules for buffer in replicas.buffers.tensors]

    def buffer_looks(self) -> list[Look]:
        """At all of these."""
        return [replicas.buffers.look() for replicas in self._modules]

    @property
    def flags(self) -> tuple[object, ...]:
        """What a graph has fixed of the modules, see :attr:`Replicas.flags`."""
        return tuple(replicas.flags for replicas in self._modules)

    @contextmanager
    def buffers_kept(self) -> Iterator[None]:
        """Around a recording, see :meth:`RankBuffers.kept`."""
        with ExitStack() as stack:
            for replicas in self._modules:
                stack.enter_context(replicas.buffers.kept())
            yield

    def split(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any], shares: Sequence[float] | None
    ) -> tuple[list[RankPart], list[int]]:
        """What each rank works on, and its rows."""
        with_target = self._loss_fns[0] is not None
        if with_target and not inputs:
            raise TypeError("a step needs a target as its last positional argument: loss_fn(output, target)")
        objects: dict[str, Any] = {"inputs": inputs[:-1] if with_target else inputs, "kwargs": kwargs}
        if with_target:
            objects["target"] = inputs[-1]
        cut, rows = scatter_objects(objects, self._replicas.team, self._dim, shares=shares)
        return [RankPart(tuple(args), names, tuple(target), 1.0) for args, names, *target in cut], rows

    def run(
        self,
        parts: Sequence[RankPart | None],
        clocks: Sequence[RankClock],
        *,
        backward: bool,
        keep_outputs: bool,
    ) -> tuple[list[RankLoss], Any]:
        """Forward and loss of each part, and backward: each rank's loss, and all outputs joined if they are kept.

        Args:
            parts: one per rank; ``None``: that rank rests, and has no loss.
            clocks: per rank of the team what its time is taken by; none: it is not.
            backward: whether there is one.
            keep_outputs: whether outputs are returned.

        Raises:
            RuntimeError: a forward has written parameters that several ranks share.
        """
        team = self._replicas.team
        self._gate = Gate()
        gate = self._gate if len(team) > 1 else NOTHING  # who is alone has ended when the call has
        rng = "per_rank" if self._draws else self._rng
        # A graph that the caller has before the inputs is one for all ranks, and goes with one backward; so is that of
        # weights which torch keeps for the time of `parametrize.cached()`.
        shared = parametrize._cache_enabled > 0 or any(has_graph(part) for part in parts if part is not None)
        joint = self.joint or (len(parts) > 1 and shared)
        job = Pass(
            self._replicas.modules, self._loss_fns, self._reduction, backward, joint, keep_outputs, rng,
            self._amp_dtype, gate, clocks,
        )  # fmt: skip
        writes = self._replicas.writes()
        for replicas in self._modules:
            replicas.attributes.let_go()
        results = run_pass(job, team, parts)
        self._replicas.check_unwritten(writes)
        self._replicas.retake()
        outputs = gather([output for _, output in results], team.devices[0], self._dim) if keep_outputs else None
        return [loss for loss, _ in results], outputs

    @property
    def attribute_changes(self) -> int:
        """How often the user has changed attributes."""
        return sum(replicas.attributes.changes for replicas in self._modules)

    def counted(self) -> str | None:
        """See :meth:`AttributeWatch.counted`."""
        return next(filter(None, (replicas.attributes.counted() for replicas in self._modules)), None)

    def leave_attributes(self) -> None:
        """After all that a step does: what attributes are found changed from now on, the user has changed."""
        for replicas in self._modules:
            replicas.attributes.leave()

    def stop(self, seconds: float) -> bool:
        """Lets no rank begin any more; says whether all have ended in that time."""
        return self._gate.shut(seconds)
