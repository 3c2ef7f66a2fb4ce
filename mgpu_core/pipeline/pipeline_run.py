r"""One call of a pipeline: each device's worker runs its actions in the order of the plan.

A worker waits before an action until the actions that it depends on are done; the stage before has begun to send the
values by then.  On a GPU the host waits for the launch alone, and streams wait for the data::

    worker 0   F0 ─ F1 ─────────── B0 ─ F2 ─ B1 ...        F: forward, B: backward, of a micro-batch
                 \    \            /  (a copy of the value, or of the gradient, on a side stream)
    worker 1      F0 ─ B0 ─ F1 ─ B1 ...

No worker waits inside a forward or a backward.  When a stage fails, the run is marked as stopped, and each other worker
ends before its next action.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.checkpoint import checkpoint

from mgpu_core.devices.streams import caller_streams, on
from mgpu_core.devices.time_limits import time_limit
from mgpu_core.devices.transfer import hand_over
from mgpu_core.pipeline.borders import Crossing, send, send_value
from mgpu_core.pipeline.graph import Program
from mgpu_core.pipeline.schedules import FORWARD, Action
from mgpu_core.ranks.context import CallerContext
from mgpu_core.ranks.run import Run, current_lane
from mgpu_core.ranks.team import Team
from mgpu_core.support.null_context import NULL_CONTEXT
from mgpu_core.trace.events import Schedule
from mgpu_core.trace.tracer import emit, is_tracing, span, when_tracing
from mgpu_core.trees.nested import tensors_in

__all__ = ["LastStage", "PipelineRun", "workers_of"]


def workers_of(devices: Sequence[torch.device]) -> list[int]:
    """Return the worker of each stage: one per stage on the CPU, one per accelerator, which keeps its random order."""
    names: list[Any] = [stage if device.type == "cpu" else device for stage, device in enumerate(devices)]
    return [names.index(name) for name in names]


class LastStage(Protocol):
    """The end of the pipeline in a training step: the loss of a micro-batch, and its backward."""

    def forward(self, micro_batch: int, output: Any) -> None:
        """Compute the loss."""

    def backward(self, micro_batch: int) -> None:
        """Differentiate it."""


class _Done(NamedTuple):
    """An action, as workers tell each other that it is done."""

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"the {self.kind} of stage {self.stage} on micro-batch {self.micro_batch}"


class PipelineRun:
    """The values of one call, and who computes them.

    Args:
        program: the module's code in stages.
        devices: one per stage.
        find: per stage, a function from a name to its module or tensor.
        actions: a plan, or the forwards of one.
        inputs: per micro-batch the tensors of its arguments, in the program's order, on the first device.
        last: the loss of a training step, whose stages have graphs of their own; ``None``: the stages have one
            graph, and no backward is run.
        shared: the copies of parameters that several stages use.
        recomputes: whether a stage keeps only the inputs of a micro-batch, and runs its forward again in backward.
        recomputing: returns the context of a second forward of a stage.
        autocast: returns the context of forwards on a device.
        first_rank: of stage 0 in a recording.

    Attributes:
        shared: the same.
        outputs: the module's output of each micro-batch, on the last device; with ``last`` it is not kept.
    """

    def __init__(
        self,
        program: Program,
        devices: Sequence[torch.device],
        find: Sequence[Callable[[str], Any]],
        actions: Sequence[Action],
        inputs: Sequence[Sequence[torch.Tensor]],
        *,
        last: LastStage | None = None,
        shared: Sequence[Crossing] = (),
        recomputes: Callable[[int], bool] = lambda _: False,
        recomputing: Callable[[int], AbstractContextManager[object]] = lambda _: NULL_CONTEXT,
        autocast: Callable[[torch.device], AbstractContextManager[object]] = lambda _: NULL_CONTEXT,
        first_rank: int = 0,
    ) -> None:
        self._first_rank = first_rank
        self._crossed: dict[tuple[int, int], int] = {}  # bytes by stage and reader, while a trace is recorded
        self._program, self._devices, self._find, self._actions = program, devices, find, actions
        self._last, self._recomputes, self._recomputing, self._autocast = last, recomputes, recomputing, autocast
        self._workers = workers_of(devices)
        self._names = [f"stage {stage} on device {device}" for stage, device in enumerate(devices)]
        self._run: Run | None = None  # whose lanes are the workers
        self.shared = shared
        self._values: dict[tuple[int, int], dict[str, Any]] = {}  # that wait for a stage and micro-batch
        self._read: dict[tuple[int, int], list[Crossing]] = {}  # leaves of a stage's graph of a micro-batch
        self._given: dict[tuple[int, int], list[Crossing]] = {}  # what others read of it
        self.outputs: list[Any] = [None] * len(inputs)
        for micro_batch, tensors in enumerate(inputs):
            for name, tensor in zip(program.inputs, tensors, strict=True):
                for stage in program.consumers.get(name, ()):
                    source = tensor if last is None else tensor.detach()
                    self._waiting(stage, micro_batch)[name] = send(source, devices[stage])

    def run(self, *, draws: bool, in_caller: bool = False) -> None:
        """Run all actions.

        Args:
            draws: the stages draw random numbers, so each CPU stage gets its own random stream.
            in_caller: one after the other in the calling thread, in the order of the plan.

        Raises:
            Exception: a stage raised it, of the same type, naming stage, micro-batch and device.
        """
        workers = list(dict.fromkeys(self._workers))
        team = Team.of([self._devices[worker] for worker in workers])
        names = [self._names[worker] for worker in workers]  # for messages; kept up to date by the workers
        if in_caller or len(workers) == 1 or CallerContext(team.devices).serialize:
            team, queues = team.first(1), [list(self._actions)]
        else:
            queues = [[each for each in self._actions if self._workers[each.stage] == worker] for worker in workers]
        streams = dict(zip(self._devices, caller_streams(self._devices), strict=True))
        calls = [
            lambda rank=rank, actions=actions: self._work(rank, actions, names, streams, alone=len(queues) == 1)
            for rank, actions in enumerate(queues)
        ]
        run = self._run = Run(team, names=names)
        try:
            run.run(calls, draws=draws, workers="threads")
        except BaseException:  # after Ctrl-C workers are still in their action
            run.stop(time_limit())
            raise
        self._trace()

    @when_tracing
    def _trace(self) -> None:
        """Tell a recording of the plan, and of the bytes that crossed each border."""
        actions, workers = tuple(self._actions), tuple(self._workers)
        borders = tuple((*border, nbytes) for border, nbytes in sorted(self._crossed.items()))
        emit(lambda host_ns, thread: Schedule(actions, workers, self._first_rank, borders, host_ns, thread))

    def stop(self, seconds: float) -> bool:
        """Let no action begin any more; return whether all workers have ended in that time."""
        return self._run is None or self._run.stop(seconds)

    def _work(self, rank: int, actions: Sequence[Action], names: list[str], streams: Any, *, alone: bool) -> None:
        lane = None if alone else current_lane()  # alone: all actions are this thread's, in the order of the plan
        for _, stage, kind, micro_batch in actions:
            device = self._devices[stage]
            names[rank] = f"stage {stage}, micro-batch {micro_batch}, on device {device}"
            if lane is not None:
                lane.wait_for([_Done(kind, before, micro_batch) for before in self._before(kind, stage)])
            with on(device, streams[device]), span(kind, self._first_rank + stage, device, micro_batch):
                (self._forward if kind == FORWARD else self._backward)(stage, micro_batch)
            if lane is not None:
                lane.done(_Done(kind, stage, micro_batch))

    def _before(self, kind: str, stage: int) -> Iterable[int]:
        """Return the stages whose same action comes first."""
        return self._program.producers[stage] if kind == FORWARD else self._program.readers[stage]

    def _waiting(self, stage: int, micro_batch: int) -> dict[str, Any]:
        return self._values.setdefault((stage, micro_batch), {})

    def _forward(self, stage: int, micro_batch: int) -> None:
        values = self._values.pop((stage, micro_batch), {})
        tensors = tensors_in(values)
        hand_over(tensors)
        before = _versions(tensors)
        with self._autocast(self._devices[stage]):
            try:
                result = self._called(stage, micro_batch, values)
            except RuntimeError as error:
                if "a leaf Variable that requires grad" in str(error):
                    raise RuntimeError(_IN_PLACE.format(stage)) from error
                raise
            if before != _versions(tensors):
                raise RuntimeError(_IN_PLACE.format(stage))
            if stage == len(self._devices) - 1:
                output = result.pop("output")
                if self._last is None:
                    self.outputs[micro_batch] = output
                else:
                    self._last.forward(micro_batch, output)
        self._send(stage, micro_batch, result)

    def _called(self, stage: int, micro_batch: int, values: dict[str, Any]) -> dict[str, Any]:
        part, find = self._program.stages[stage], self._find[stage]
        if not self._recomputes(micro_batch) or not torch.is_grad_enabled():
            return part.run(values, find)
        result: dict[str, Any] = checkpoint(
            part.run, values, find, use_reentrant=False,
            context_fn=lambda: (NULL_CONTEXT, self._recomputing(stage)),
        )  # fmt: skip
        return result

    def _send(self, stage: int, micro_batch: int, values: dict[str, Any]) -> None:
        """Begin to send what other stages read."""
        given: list[Crossing] = []
        source = self._devices[stage]
        for name in self._program.stages[stage].gives:
            for reader in self._program.consumers[name]:
                if is_tracing():
                    crossed = sum(each.nbytes for each in tensors_in(values[name]))
                    self._crossed[stage, reader] = self._crossed.get((stage, reader), 0) + crossed
                crossings: list[Crossing] | None = None if self._last is None else []
                value = send_value(values[name], source, self._devices[reader], crossings)
                given += crossings or ()
                self._read.setdefault((reader, micro_batch), []).extend(crossings or ())
                self._waiting(reader, micro_batch)[name] = value
        self._given[stage, micro_batch] = given

    def _backward(self, stage: int, micro_batch: int) -> None:
        given = [each for each in self._given.pop((stage, micro_batch)) if each.grad is not None]
        hand_over([each.grad for each in given if each.grad is not None])
        if stage == len(self._devices) - 1 and self._last is not None:
            self._last.backward(micro_batch)
        elif given:
            torch.autograd.backward([each.source for each in given], [each.grad for each in given])
        for each in self._read.pop((stage, micro_batch), ()):
            each.send_back()


_IN_PLACE = (
    "stage {} writes into its input in place, which the stage before may still use: cut the module elsewhere, or make "
    "the operation not in place (inplace=False)"
)


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [] if torch.is_inference_mode_enabled() else [tensor._version for tensor in tensors]
