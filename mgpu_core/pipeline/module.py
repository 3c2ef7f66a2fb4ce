"""``Pipeline``: a module cut over several devices, with micro-batches in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from os import PathLike
from typing import Any

import torch
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm

from mgpu_core.devices.devices import DeviceLike, as_device, as_devices
from mgpu_core.devices.transfer import hand_over
from mgpu_core.parallel.gather_outputs import gather
from mgpu_core.parallel.scatter_inputs import scatter_objects
from mgpu_core.pipeline.deferred import DeferredStatistics
from mgpu_core.pipeline.pipeline_run import LastStage, PipelineRun, workers_of
from mgpu_core.pipeline.place import placed
from mgpu_core.pipeline.placement import PlacedPart
from mgpu_core.pipeline.schedules import FORWARD, check_schedule, plan
from mgpu_core.ranks.compiled import outside_the_compiler
from mgpu_core.ranks.draws import Draws
from mgpu_core.ranks.modes import check_modes
from mgpu_core.ranks.random import check_rng
from mgpu_core.support.null_context import NULL_CONTEXT
from mgpu_core.trace.tracer import span
from mgpu_core.trees.module_tree import ModuleTree, missing_attribute
from mgpu_core.trees.moves import refuse_moves

__all__ = ["Pipeline"]

CHECKPOINTS = ("never", "except_last", "always")
_CHUNKS_PER_STAGE = 4  # of the default: a bubble of at most a fifth


class Pipeline(Module):
    """Cut a module over several devices; micro-batches of the rows run through its stages at the same time.

    The parts are moved to their devices in place: Parameters stay the same objects, so an optimizer that was made
    before goes on, and ``named_parameters``, ``named_buffers`` and ``state_dict`` have the names and the order of the
    module that was cut.  A parameter that several stages use stays one Parameter on the first of their devices; the
    others get differentiable copies in each call.  Values that a later stage needs travel there directly.

    Each micro-batch runs the module's own code in a thread; one at a time is in a stage.  Attributes that the code
    around layers assigns belong to the micro-batch.

    Used as a module in a loop of your own, all forwards run before all backwards.
    :class:`mgpu_core.TrainStep` runs the schedule.

    Args:
        stages: a list with one module per device; or any module.
        device_ids: one device per stage, as for :class:`mgpu_core.DataParallel`.  A GPU that comes more than once runs
            several stages.
        split_points: the names of the modules at which the stages after the first begin, in the order of the calls.
            ``None``: the cut is found, between the layers that :func:`mgpu_core.place` places, so that the bytes of
            the largest part are least, or with ``sample`` its time.
        chunks: micro-batches per call, cut from the rows as by :func:`mgpu_core.scatter`; default: four per stage.
            With fewer rows there are fewer.
        schedule: ``1f1b`` or ``gpipe``, of :class:`mgpu_core.TrainStep`.
        checkpoint: ``never``; ``always``: a layer keeps only its inputs, and runs again in backward; ``except_last``:
            in all but the last micro-batch.
        sample: arguments of one call, for a cut by time: a tuple; a dict by name; or the only argument.
        shares, memory, weights, rename: as for :func:`mgpu_core.place`.
        output_device: where the outputs are joined; default: the last device.
        dim: the dimension of the rows.
        deferred_batch_norm: update running statistics once per call from all its rows, instead of once per
            micro-batch.
        rng: as for :class:`mgpu_core.DataParallel`.

    Raises:
        TypeError, ValueError: arguments that do not fit together, before anything is moved.
    """

    module: Module

    def __init__(
        self,
        stages: Module | Sequence[Module],
        device_ids: Sequence[DeviceLike],
        *,
        split_points: Sequence[str] | None = None,
        chunks: int | None = None,
        schedule: str = "1f1b",
        checkpoint: str = "never",
        sample: Any = None,
        shares: Sequence[float] | None = None,
        memory: Sequence[float] | None = None,
        weights: str | PathLike[str] | None = None,
        rename: Callable[[str], str | None] | None = None,
        output_device: DeviceLike | None = None,
        dim: int = 0,
        deferred_batch_norm: bool = False,
        rng: str = "auto",
    ) -> None:
        super().__init__()
        devices = as_devices(device_ids)
        chunks = _CHUNKS_PER_STAGE * len(devices) if chunks is None else chunks
        _check_options(chunks, schedule, checkpoint, rng)
        net, split = _taken_apart(stages, devices, split_points)
        self.device_ids = list(devices)
        self.chunks, self.schedule, self.checkpoint = chunks, schedule, checkpoint
        self.output_device = devices[-1] if output_device is None else as_device(output_device)
        self.dim, self.rng = dim, rng
        self._draws = Draws(rng, type(net).__name__, self.device_ids)
        self._placement = placed(
            net, devices, split, sample=sample, shares=shares, memory=memory, weights=weights, rename=rename,
            recomputes=checkpoint != "never",
        )  # fmt: skip
        self._tree = ModuleTree(net)
        layers = [each for each in net.modules() if isinstance(each, _BatchNorm)] if deferred_batch_norm else []
        self._deferred = [DeferredStatistics(each) for each in layers]
        self.__dict__["module"] = net  # no child: its children are this module's, under their own names
        for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[table] = getattr(net, table)
        self.training = net.training

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module, way = self.__dict__.get("module"), ".module.{name}"
            raise missing_attribute(self, name, module, f"{way}(...)", way) from None

    @property
    def split_points(self) -> list[str]:
        """The names of the modules at which the stages after the first begin."""
        return self._placement.starts

    @property
    def parts(self) -> list[PlacedPart]:
        """The parts of the module: of each its device, the names of its layers, and its bytes."""
        return list(self._placement.parts)

    to = to_empty = cpu = cuda = ipu = mtia = xpu = refuse_moves

    def train(self, mode: bool = True) -> Pipeline:
        """Set the mode of all stages."""
        super().train(mode)
        self.module.training = mode
        return self

    @outside_the_compiler
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run all micro-batches through all stages.

        Returns:
            The outputs joined along ``dim`` on ``output_device``, with one graph over all devices.

        Raises:
            ValueError: inputs that disagree on their number of rows.
            Exception: a stage raised it; of the same type, naming stage, micro-batch and device.
        """
        check_modes()
        with span("pipeline"):
            parts, _ = self.cut({"inputs": inputs, "kwargs": kwargs})
            run = self.begin([(tuple(args), names) for args, names in parts], None)
            self.finish(run)
            return gather(run.outputs, self.output_device, self.dim)

    def cut(self, objects: dict[str, Any]) -> tuple[list[list[Any]], list[int]]:
        """Return per micro-batch its part of each object, on the first device, and its rows."""
        return scatter_objects(objects, self.device_ids[:1] * self.chunks, self.dim)

    def begin(
        self,
        arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
        last: LastStage | None,
        autocast: Callable[[torch.device], AbstractContextManager[object]] = lambda _: NULL_CONTEXT,
    ) -> PipelineRun:
        """Return a run over these micro-batches: of forwards, or with ``last`` of a training step's schedule.

        Raises:
            RuntimeError: a parameter is not on the device of its stage.
        """
        placement = self._placement
        if placement.follow(self.module):
            self._tree = ModuleTree(self.module)
        placement.check(self.module)
        actions = plan(
            len(self.device_ids),
            len(arguments),
            self.schedule if last is not None else "gpipe",
            workers_of(self.device_ids),
        )
        if last is None:
            actions = [each for each in actions if each.kind == FORWARD]
        kept = len(arguments) - 1 if self.checkpoint == "except_last" else len(arguments)
        return PipelineRun(
            placement, self.module, arguments, actions, last=last, autocast=autocast,
            recomputes=[self.checkpoint != "never" and micro_batch < kept for micro_batch in range(len(arguments))],
            restart=self._drop_statistics,
        )  # fmt: skip

    def _drop_statistics(self) -> None:
        for statistics in self._deferred:
            statistics.drop()

    def finish(self, run: PipelineRun, *, in_caller: bool = False) -> None:
        """Run it, in workers or in the calling thread; commit deferred statistics and gradients of copied parameters.

        Raises:
            Exception: as :meth:`forward`.
        """
        try:
            run.run(draws=self._draws, in_caller=in_caller)
        except BaseException:
            self._drop_statistics()
            raise
        for statistics in self._deferred:
            statistics.commit()
        for _, crossing in sorted(run.shared.items(), key=lambda item: item[0][1]):  # by stages
            crossing.send_back()
            if crossing.grad is not None:
                hand_over([crossing.grad])
                parameter = crossing.source
                with torch.no_grad():
                    parameter.grad = crossing.grad if parameter.grad is None else parameter.grad + crossing.grad

    def extra_repr(self) -> str:
        """Return the cut and the schedule."""
        names = ", ".join(map(str, self.device_ids))
        return f"device_ids=[{names}], split_points={self.split_points}, chunks={self.chunks}, schedule={self.schedule}"

    def __repr__(self) -> str:
        return f"Pipeline({type(self.module).__name__}, {self.extra_repr()})"


def _check_options(chunks: Any, schedule: str, checkpoint: str, rng: str) -> None:
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise ValueError(f"chunks must be a whole number of micro-batches, 1 or more, not {chunks!r}")
    check_schedule(schedule)
    if checkpoint not in CHECKPOINTS:
        raise ValueError(f"checkpoint must be one of {', '.join(CHECKPOINTS)}, not {checkpoint!r}")
    check_rng(rng)


def _taken_apart(
    stages: Any, devices: Sequence[torch.device], split_points: Sequence[str] | None
) -> tuple[Module, list[str] | None]:
    """Return the module, and the names of the modules at which its stages after the first begin."""
    if not isinstance(stages, Module):
        parts = list(stages)
        if split_points is not None or len(parts) != len(devices) or not all(isinstance(p, Module) for p in parts):
            raise ValueError(
                f"a list of stages has one module per device and no split_points: {len(parts)} for {len(devices)} "
                "devices"
            )
        return torch.nn.Sequential(*parts), [str(index) for index in range(1, len(parts))]
    if split_points is not None and len(split_points) != len(devices) - 1:
        raise ValueError(
            f"{len(devices)} devices need {len(devices) - 1} split points, one fewer than devices, not "
            f"{len(split_points)}"
        )
    return stages, None if split_points is None else list(split_points)
