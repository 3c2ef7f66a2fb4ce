"""What each rank of a step has: its parameters, its module, its loss function, their buffers; and how ranks run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch.nn import Module

from mgpu_core.devices.graphs import GRAPH_DEVICE
from mgpu_core.parallel.first_calls import Call, FirstCalls
from mgpu_core.parallel.first_calls.lost import LostAttributes, text_of_lost
from mgpu_core.parallel.first_calls.originals import Originals
from mgpu_core.parallel.first_calls.shared import SharedObjects
from mgpu_core.pipeline.pipeline_run import PipelineRun
from mgpu_core.ranks.draws import Draws
from mgpu_core.ranks.rank_clock import RankClock
from mgpu_core.ranks.run import Run, shares_generator
from mgpu_core.ranks.worker_choice import IN_TURNS, MEETING, Workers, workers_for
from mgpu_core.step.cut_replicas import CutReplicas
from mgpu_core.step.losses import RankPart
from mgpu_core.step.options import Options
from mgpu_core.step.rank_modules import RankModules, replicas_of_loss
from mgpu_core.step.replicas import Replicas
from mgpu_core.step.rollback import BufferSnapshot
from mgpu_core.step.shards import Shards
from mgpu_core.support.null_context import NULL_CONTEXT
from mgpu_core.tensor_parallel.module import TensorParallel
from mgpu_core.trace import tracer
from mgpu_core.trace.tracer import span
from mgpu_core.trees.module_tree import ModuleTree
from mgpu_core.trees.views import REWIRED, loosen

__all__ = ["Ranks", "why_not_cut"]

_WATCHED = 2  # first calls


class Ranks:
    """The ranks of a step.

    Args:
        options: of the step.

    Attributes:
        team: the devices of the ranks.
        shards: parameters in shards; ``None``: each device has all of them.
        replicas: their parameters.
        net: their modules.
        loss: their loss functions: modules with tensors, or one function for all; ``None``: the module returns it.
        loss_fn: that of one rank alone.
        modules: all modules that have a replica per rank.
        buffers: of these, to be put back.
        usual_workers: how ranks run that need not wait for each other.
        is_bare: nothing is to be set up for the only rank.
        at_work: the call that runs, or that failed.

    Raises:
        ValueError: a module whose ranks cannot run as it is asked.
    """

    def __init__(self, options: Options) -> None:
        team, module = options.team, options.module
        static = options.static_graph or options.capture
        self.team, self.shards = team, None
        if options.shard == "parameters":
            self.shards = Shards(ModuleTree(module), team, options.bucket_nbytes)
            self.replicas: Replicas = CutReplicas(module, team, self.shards)
        else:
            self.replicas = Replicas(module, team)
        self.net = RankModules(module, team, self.replicas.parameters, static=static)
        self.loss = replicas_of_loss(options.loss_fn, team, static=static)
        self.loss_fn = self.loss.module if isinstance(self.loss, RankModules) else self.loss
        self.modules = [self.net, *([self.loss] if isinstance(self.loss, RankModules) else [])]
        self.buffers = BufferSnapshot(self.modules)
        meet = self.net.tree.ranks_meet
        if options.workers == "caller" and meet and len(team) > 1:
            raise ValueError(
                'workers="caller" runs the ranks one after the other, and those of this module meet in synchronised '
                'layers: use workers="threads" or "auto"'
            )
        # Ranks that share a GPU take turns where a graph is recorded on their stream; those that meet have no graphs.
        rng = "turns" if options.capture and not meet else options.rng
        self._draws = Draws(rng, type(module).__name__)
        self.usual_workers = workers_for(options.workers, team.devices)
        self._shares_generator, self._count = shares_generator(team), len(team)
        self.is_bare = team.on_host and len(team) == 1 and self.shards is None
        observers = LostAttributes(rank=1, rank_0_keeps=True), SharedObjects(used_by=self.loss_fn), Originals()
        self._first_calls = FirstCalls(*(() if static else ((observer, _WATCHED) for observer in observers)))
        self.at_work: Run | PipelineRun | None = None

    @property
    def workers(self) -> Workers:
        """How the ranks of the next call run."""
        tree = self.net.tree
        turns = tree.takes_turns and self._shares_generator
        return MEETING if tree.ranks_meet else IN_TURNS if turns else self.usual_workers

    @property
    def in_turns(self) -> bool:
        """The ranks share one device, and run one after the other, also their backwards."""
        return len(self.replicas.devices) == 1 and self.workers.way == "caller"

    def follow(self) -> bool:
        """Read the modules as they are now; return whether they have the parameters that they had."""
        for modules in self.modules:
            if modules.is_static or not modules.tree.is_current():
                modules.read()
        return self.replicas.are_those_of(self.net.tree)

    def run(
        self,
        work: Callable[..., Any],
        parts: Sequence[RankPart | None],
        clocks: Sequence[RankClock],
        *,
        with_loss: bool,
    ) -> list[Any]:
        """Run the work of each rank that has a part, and return the results.

        Args:
            work: of a rank: a function of its module, its loss function, its number and its part.
            parts: one per rank; not more than there are ranks.  ``None``: it does nothing.
            clocks: one per rank; empty: no times are taken.
            with_loss: the work gets the rank's loss function, too; otherwise ``None``.

        Raises:
            Exception: the first failing rank's, as :func:`mgpu_core.parallel_apply` words it.
            RuntimeError: the forward writes parameters that several ranks share.
        """
        count = len(parts)
        tree = self.net.tree
        if self.shards is None:
            modules = self.net.of_ranks(count)
        else:
            nodes = self.net.nodes_of_ranks(count)
            modules = [of_rank[0] for of_rank in nodes]
            threads = self.workers is self.usual_workers and self.workers.way == "threads"
            are_apart = self.team.on_host or len(self.replicas.devices) == len(self.team)  # autograd has one per device
            self.shards.begin(tree, nodes, is_training=torch.is_grad_enabled(), go_together=threads and are_apart)
            work = partial(_with_blocks, self.shards, work)
        loss = self.loss if with_loss else None
        loss_fns = loss.of_ranks(count) if isinstance(loss, RankModules) else [loss] * count
        watched = Call(self.net.module, modules, tree, modules) if self._first_calls.go_on and count > 1 else None
        called = modules if watched is None else self._first_calls.begin(watched).called
        calls: list[Callable[[], Any]] = []
        for rank, part in enumerate(parts):
            calls += (partial(work, called[rank], loss_fns[rank], rank, part) if part else _nothing,)
        run = self.at_work = Run(self.team if count == self._count else self.team.first(count), clocks=clocks)
        if count == 1:  # failures are the module's own
            return [run.alone(calls[0])]
        versions = self.replicas.versions
        self._draws.ranks_meet = tree.ranks_meet
        first, *_ = filter(None, parts)
        form = tree.modes, *map(type, first.inputs), *first.kwargs
        workers = self.workers.way
        try:
            with NULL_CONTEXT if tracer.sink is None else span("apply"):
                results = run.run(calls, draws=self._draws, workers=workers, form=form)
            self.replicas.check_unwritten(versions)
            if watched is not None:
                self._first_calls.end(watched)
            return list(compress(results, parts))
        except RuntimeError as error:
            names = [] if watched is None else self._first_calls.changed(watched)
            if "through the graph a second time" in str(error) and (names or workers == "threads"):
                raise RuntimeError(f"a loss reads a tensor of another rank's forward: {text_of_lost(names)}") from error
            raise
        finally:
            if REWIRED in vars(modules[-1]) and not self.net.is_static:
                loosen(modules)

    def end_blocks(self) -> None:
        """Free what blocks have whole, when no rank is at work any more."""
        if self.shards is not None:
            self.shards.end()

    def explain(self, error: BaseException) -> None:
        """Add a note to torch's own error of a parameter in shards that had no memory."""
        if self.shards is not None and "for storage of size 0" in str(error):
            error.add_note("a parameter was used outside of the call of its block: call the block, block(x)")

    def stop(self, seconds: float) -> bool:
        """Let no rank begin any more; return whether all have ended in that time."""
        return self.at_work is None or self.at_work.stop(seconds)

    def why_not_recorded(self) -> str | None:
        """Return why a graph cannot hold the work of these ranks; ``None``: it can."""
        devices = self.replicas.devices
        if other := next((device for device in devices if device.type != GRAPH_DEVICE), None):
            return f"there are no CUDA graphs on {other}"
        if self.net.tree.ranks_meet:
            return "ranks meet in synchronised layers"
        return None


def _nothing() -> None:
    """Stand in for the work of a rank that has none."""


def _with_blocks(
    shards: Shards, work: Callable[..., Any], module: Module, loss_fn: Any, rank: int, part: RankPart
) -> Any:
    """Run the work of a rank, which lets go of its blocks in the end."""
    shards.at_work(rank)
    try:
        return work(module, loss_fn, rank, part)
    finally:
        shards.rest(rank)


def why_not_cut(options: Options) -> str | None:
    """Return which argument a step over a TensorParallel does not take; ``None``: it takes all, or is over none."""
    return options.why_not_over(TensorParallel, "process_group", "shard", "capture")
