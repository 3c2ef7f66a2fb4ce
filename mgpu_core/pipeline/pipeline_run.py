r"""One call of a pipeline: a lane per micro-batch runs the module's own code, and takes turns at the stages.

A *lane* is a thread with a view of the module: the same parameters, buffers and layers, and attributes of its own.
When it comes to the first layer of the next stage, it ends its turn, and waits for its turn there by the plan::

    lane 0   F0 at stage 0 ─ F0 at stage 1, loss, B0 at stage 1 ─ B0 at stage 0        F: forward, B: backward
    lane 1            └ F1 at stage 0 ──────────┴ F1 at stage 1, ...
                                                └ (one lane at a time is at a stage)

In a training step each stage of a micro-batch has a graph of its own.  A tensor of an earlier stage is replaced by a
leaf wherever it is used, and the leaf's gradient goes to the backward of the stage that made the tensor.  Autograd
numbers the nodes of a thread in their order, so the stage of a tensor is found by its number.  On GPUs the host waits
for turns alone: streams wait for the data.

Another way was tried: tags on the results of layers, and of the code between them, with the stage that made them, not
numbers.  Of 48,000 tensors that the tests of pipelines ask about, 8 % had no tag, because nobody returns them
(kept by a layer in an attribute or a list, written into a container or a buffer, made by another thread), and 16 had a
wrong one.  The numbers would have to stay for these, so tags would come on top.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch._C._autograd import _get_sequence_nr
from torch.nn import Module

from mgpu_core.devices.streams import caller_streams, on, on_all
from mgpu_core.devices.time_limits import time_limit
from mgpu_core.devices.transfer import hand_over
from mgpu_core.pipeline.before import Before
from mgpu_core.pipeline.borders import Crossing
from mgpu_core.pipeline.placement import Called, Placement, tell_parts
from mgpu_core.pipeline.schedules import BACKWARD, FORWARD, Action
from mgpu_core.pipeline.visits import Border, Visit, tensors_among
from mgpu_core.ranks.context import CallerContext, checkpoint_frame
from mgpu_core.ranks.draws import Draws
from mgpu_core.ranks.run import Run, current_lane
from mgpu_core.ranks.team import Team
from mgpu_core.support.null_context import NULL_CONTEXT
from mgpu_core.trace.events import Schedule
from mgpu_core.trace.tracer import emit, is_tracing, span, when_tracing
from mgpu_core.trees.filled import FilledContents, Undo, exchanged_back, map_in_place
from mgpu_core.trees.nested import map_leaves
from mgpu_core.trees.views import ModuleView

__all__ = ["LastStage", "PipelineRun", "workers_of"]

_MOST_TRIES = 5  # for each thing that a first micro-batch can show
_OF_LEAVES = 2**64 - 1  # autograd's number of the nodes that add to a leaf's gradient
_LEAF = -2
_REENTRANT = "CheckpointFunctionBackward"

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def workers_of(devices: Sequence[torch.device]) -> list[int]:
    """Return the worker of each stage: one per stage on the CPU, one per accelerator, which keeps its random order."""
    names: list[Any] = [stage if device.type == "cpu" else device for stage, device in enumerate(devices)]
    return [names.index(name) for name in names]


class LastStage(Protocol):
    """The end of the pipeline in a training step: the loss of a micro-batch, and its backward."""

    def forward(self, micro_batch: int, output: Any) -> None:
        """Compute the loss."""

    def node(self, micro_batch: int) -> Any:
        """Return its node in autograd's graph."""

    def backward(self, micro_batch: int) -> None:
        """Differentiate it."""

    def drop(self) -> None:
        """Let go of the losses so far."""


class _Turn(NamedTuple):
    """A turn in the plan of a worker."""

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"the {self.kind} of stage {self.stage} on micro-batch {self.micro_batch}"


class _Again(Exception):
    """The call must begin again: the first micro-batch has shown something to know before."""


class PipelineRun:
    """The values of one call.

    In the first call of a form the first micro-batch goes ahead alone, and shows in which order layers are called and
    where tensors around them are used.  If that is not as it was supposed, the module is placed anew and the call
    begins again, with the buffers, attributes, containers, hooks and random numbers of before.

    Args:
        placement: of the module.
        root: the module.
        arguments: per micro-batch, with their tensors on the first device.
        actions: a plan, or the forwards of one.
        last: the loss of a training step; ``None``: the stages have one graph, and no backward is run.
        recomputes: of each micro-batch, whether its layers keep only their inputs, and run again in backward.
        autocast: returns the context of forwards on a device.
        restart: called before the call begins again.

    Attributes:
        outputs: the module's output of each micro-batch; with ``last`` it is not kept.
        numbers: of each stage the next number of autograd's nodes, in one graph over all micro-batches.
        replicas: of layers that run in other stages than their own, by name and stage.
        shared: copies of parameters that several stages use, by the id of the parameter and the stage.
    """

    def __init__(
        self,
        placement: Placement,
        root: Module,
        arguments: Sequence[Arguments],
        actions: Sequence[Action],
        *,
        last: LastStage | None = None,
        recomputes: Sequence[bool],
        autocast: Callable[[torch.device], AbstractContextManager[object]] = lambda _: NULL_CONTEXT,
        restart: Callable[[], None],
    ) -> None:
        self.placement, self.last, self.recomputes, self.autocast = placement, last, recomputes, autocast
        self.workers = workers_of(placement.devices)
        self.turns = self.workers  # whose turns a stage takes
        self.streams = caller_streams(placement.devices)
        self.crossed: dict[tuple[int, int], list[int]] = {}  # bytes there and back, by stage and reader, when recorded
        self.names = [f"micro-batch {index}" for index in range(len(arguments))]  # for messages; lanes keep them
        self.outputs: list[Any] = [None] * len(arguments)
        self.draws_numbers = False  # an earlier call of this form has shown it
        self.numbers = [0] * len(placement.devices)
        self.shared: dict[tuple[int, int], Crossing] = {}
        self._root, self._arguments, self._actions, self._restart = root, arguments, actions, restart
        self._run: Run | None = None
        self._views: dict[int, ModuleView] = {}  # of the micro-batches
        self._before: Before

    def run(self, *, draws: Draws, in_caller: bool = False) -> None:
        """Run all micro-batches.

        Args:
            draws: finds out whether the module draws random numbers; then each lane gets its own stream of the CPU's.
            in_caller: one action at a time, in the order of the plan.

        Raises:
            Exception: a stage raised it, of the same type, naming stage, micro-batch and device.
        """
        form = self._form()
        self._draws, self.draws_numbers = draws, draws.are_expected(form)
        if form in self.placement.known:
            self._run_lanes(in_caller=in_caller)
            self.placement.keep_attributes(self._root, self._views)
            return
        self._before = Before(self._root, self.placement.devices)
        self.placement.learn_kept(self._root, self._before)  # layers whose hooks keep something
        try:
            for _ in range(_MOST_TRIES):
                try:
                    self._run_lanes(in_caller=in_caller, learns=True)
                    break
                except _Again:
                    self._run = None
                for table in (self.shared, self.crossed, self._views):
                    table.clear()
                self.outputs = [None] * len(self.outputs)
                if self.last is not None:
                    self.last.drop()
                self._before.put_back()
                self._restart()
                self.placement.apply(self._root)  # after the graphs have gone
            else:
                self._run_lanes(in_caller=in_caller)
        except BaseException:
            self._before.put_attributes_back()
            raise
        self.placement.keep_attributes(self._root, self._views, self._before)
        self.placement.known.add(form)

    def _form(self) -> Hashable:
        """Return the form of the call: the mode of the module, the kind of call, its arguments and switches in them."""
        args, kwargs = self._arguments[0] if self._arguments else ((), {})
        switches = (each if isinstance(each, bool | None) else ... for each in (*args, *kwargs.values()))
        return self._root.training, self.last is None, torch.is_grad_enabled(), len(args), *kwargs, *switches

    def _run_lanes(self, *, in_caller: bool, learns: bool = False) -> None:
        lanes, devices = len(self._arguments), self.placement.devices
        team = Team.of_lanes(lanes)
        if in_caller:
            self.turns = [0] * len(devices)
        is_plain = min(lanes, len(devices)) == 1 or CallerContext(team.devices).serialize
        plans: dict[Hashable, list[Hashable]] = {}
        actions = [] if is_plain else list(self._actions)
        if learns:  # the others wait for the first forward
            actions.sort(key=lambda action: action.kind != FORWARD or action.micro_batch != 0)
        for _, stage, kind, micro_batch in actions:
            plans.setdefault(self.turns[stage], []).append(_Turn(kind, stage, micro_batch))
        calls = [partial(self._lane, index, learns) for index in range(lanes)]
        at_once = len({turn for turn, device in zip(self.turns, devices, strict=True) if device.type == "cpu"})
        run = self._run = Run(team, names=self.names, plans=plans, at_once=at_once)
        try:
            run.run(calls, draws=self._draws, form=self._form(), workers="caller" if is_plain else "threads")
        except BaseException:  # after Ctrl-C lanes are still in their turn
            run.stop(time_limit())
            raise
        self._trace()

    def _lane(self, index: int, learns: bool) -> None:
        lane = current_lane()
        if learns and index and lane is not None:
            lane.wait_for(["the forward of micro-batch 0"])
        micro_batch = MicroBatch(self, index)
        view = self._views[index] = self.placement.view(self._root)
        args, kwargs = view.copies.copied(self._arguments[index])
        if learns and index == 0:
            micro_batch.is_first = True
            micro_batch.watch(self.placement.around(self._root))
            try:
                micro_batch.run(view.root, args, kwargs, self._learn)
            except RuntimeError as error:
                if self.placement.is_deep or "on the same device" not in str(error):
                    raise
                self.placement.look_closer()
                raise _Again from error
            return
        micro_batch.run(view.root, args, kwargs)
        if not learns and index < len(self._arguments) - 1:
            view.end()
        if micro_batch.late:
            self.placement.warn_late(self._root, micro_batch.late)

    def note_outside(self, layer: Module) -> None:
        """Note which attributes of a layer the code around it has set, in the first micro-batch."""
        self._before.note_outside(layer)

    def _learn(self, first: MicroBatch) -> None:
        """Learn from the first micro-batch, at the end of its forward.

        Raises:
            _Again: this call was not run as it would be now.
            RuntimeError: a checkpoint runs layers of several stages in one backward.
        """
        placement = self.placement
        if placement.learn(self._root, Called(first.called, first.used_in)):
            raise _Again
        if not placement.searches:
            mistaken, names = first.looked_through()
            if first.without_grad and _REENTRANT in names:
                raise RuntimeError(
                    "a checkpoint around layers with use_reentrant=True would run several stages backward in one turn: "
                    "use use_reentrant=False"
                )
            if mistaken:
                placement.look_closer()
                raise _Again
        if placement.learn_kept(self._root, self._before):
            raise _Again
        if added := self._views[0].added():
            raise RuntimeError(
                f"the forward of {type(self._root).__name__} adds or replaces modules around layers: "
                f"{', '.join(added)}. Make them before, or call the module once before it is cut"
            )
        self._views[0].keep_notes()
        if self._run is not None and self._run.numbers is not None and self._run.numbers.were_used():
            first.refuse_numbers()
        if (lane := current_lane()) is not None:
            lane.done("the forward of micro-batch 0")

    @when_tracing
    def _trace(self) -> None:
        """Tell a recording of the plan, of the bytes that crossed each border, and where the layers are."""
        actions, workers = tuple(self._actions), tuple(self.workers)
        borders = tuple((*border, there, back) for border, (there, back) in sorted(self.crossed.items()))
        emit(lambda host_ns, thread: Schedule(actions, workers, borders, host_ns, thread))
        tell_parts(self.placement, self._root)

    def stop(self, seconds: float) -> bool:
        """Let no turn begin any more; return whether all lanes have ended in that time."""
        return self._run is None or self._run.stop(seconds)


class MicroBatch(Visit):
    """The way of one micro-batch through the stages, in its lane."""

    def __init__(self, run: PipelineRun, index: int) -> None:
        super().__init__(run.placement)
        self.stage, self.recomputes, self.is_first = -1, run.recomputes[index], False
        self._run, self._index, self._lane = run, index, current_lane()
        self._turn = ExitStack()  # the device, the stream and the span of the present one
        self.crossed_in_checkpoint: int | None = None  # the stage that began in one
        self._crossing_frame: Any = None  # of the checkpoint in which a stage has ended
        self._begins: list[int] = []  # of each stage, the number of the first node that autograd made in it
        self._cuts: dict[tuple[int, int, torch.device], torch.Tensor] = {}  # in place of tensors, by id and stage
        self._cut_nodes: dict[Any, int] = {}  # of those, with their stages
        self._latest: dict[int, tuple[torch.Tensor, int]] = {}  # by id the last of those, and its count of writes
        self._read: dict[int, list[tuple[Crossing, int]]] = {}  # by stage, with the stage that made the tensor
        self._given: dict[int, list[Crossing]] = {}  # by the stage that made the tensor; its gradient is on the way

    def run(
        self,
        module: Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        learn: Callable[[MicroBatch], None] | None = None,
    ) -> None:
        """Run the forward, and in a training step the loss and the backward; ``learn`` is called between them."""
        run, last = self._run, len(self.places.devices) - 1
        with on_all(self.places.devices, run.streams), self._turn, self:
            with ExitStack() as stack:
                for kind in dict.fromkeys(device.type for device in self.places.devices):
                    _enter(stack, run.autocast(torch.device(kind)))
                self.go_to(0)
                self.begin_glue()
                output = module(*args, **kwargs)
                self.go_to(last)
                if run.last is None:
                    run.outputs[self._index] = output
                    self._note_number()
                else:
                    run.last.forward(self._index, output)
                del output
                self.end_glue()
            if learn is not None:
                learn(self)
            self._copies.clear()
            self._latest.clear()
            if run.last is not None:
                self._backward(run.last, last)

    def go_to(self, stage: int) -> None:
        """Take the turns up to a stage.  There is no way back: an earlier layer runs in the present turn."""
        while self.stage < stage:
            self._note_number()
            self._take(FORWARD, self.stage + 1)
            super().go_to(self.stage + 1)
            if self._run.last is None and torch.is_grad_enabled():
                _count_to(self._run.numbers[self.stage])
            self._begins.append(_get_sequence_nr())

    def begin_layer(self, border: Border, layer: Module) -> None:
        """Refuse a checkpoint whose layers run on two devices, if they draw random numbers."""
        if self._run.placement.is_known and self.places.devices[border.stage].type != "cpu":
            frame = checkpoint_frame()
            if frame is not None and (border.stage > self.stage or frame is self._crossing_frame):
                self.crossed_in_checkpoint = border.stage
                if self._run.draws_numbers:
                    self.refuse_numbers()
        if self.is_first and border.name not in self.called:
            self._run.note_outside(layer)
        super().begin_layer(border, layer)

    def refuse_numbers(self) -> None:
        """Raise RuntimeError if a checkpoint has crossed a border: random numbers were drawn in this forward."""
        if self.crossed_in_checkpoint is not None:
            raise RuntimeError(
                f"a checkpoint is around the border before stage {self.crossed_in_checkpoint}, and its random numbers "
                "would be others in the backward: put the border outside of the checkpoint, or set dropout to 0"
            )

    def passed_on(self, border: Border, output: Any, given: Any) -> Any:
        """Go on in the next stage after the last layer of one; return its output there.

        So a checkpoint around the next layer finds its input on the device where it draws random numbers.  Containers
        that the layer was given keep their entries.  The copy starts in this turn: in the next one it would wait for
        what other micro-batches have launched here meanwhile.
        """
        if self.stage != border.stage or border.next_stage is None:
            return output
        self.start(border.next_stage, output)
        self.go_to(border.next_stage)
        self._crossing_frame = checkpoint_frame()
        undo: Undo = []
        output = map_in_place(output, self._brought, undo)
        self.started.clear()
        are_given = FilledContents(given).ids if undo else set()
        exchanged_back([each for each in undo if id(each[0]) in are_given])
        return output

    def begun(self, tensor: torch.Tensor, device: torch.device) -> Any:
        if self._run.last is None or not (tensor.requires_grad and torch.is_grad_enabled()):
            return super().begun(tensor, device)
        return None if tensor.grad_fn is None else Crossing(tensor, device)

    def _note_number(self) -> None:
        """Let the next micro-batch in this stage go on with the numbers of autograd's nodes."""
        if self.stage >= 0:
            self._run.numbers[self.stage] = _get_sequence_nr()

    def _take(self, kind: str, stage: int) -> None:
        run, device = self._run, self.places.devices[stage]
        self._turn.close()
        if self._lane is not None:
            self._lane.turn(run.turns[stage], _Turn(kind, stage, self._index))
        run.names[self._index] = f"stage {stage}, micro-batch {self._index}, on device {device}"
        _enter(self._turn, on(device, run.streams[stage]))
        _enter(self._turn, span(kind, stage, device, self._index))

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor for the present stage: on its device, and of its own graph in a training step."""
        if self._run.last is None or not (tensor.requires_grad and torch.is_grad_enabled()):
            return super().bring(tensor)
        if tensor.grad_fn is None:
            is_here = self.places.stage_of(tensor, self.stage) == self.stage and tensor.device == self.device
            return tensor if is_here else self.bring_parameter(tensor)
        made_in = self._stage_of(tensor)
        return super().bring(tensor) if made_in == self.stage else self._cut(tensor, made_in)

    def bring_parameter(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a parameter that is at home in another stage: all micro-batches share a copy of each stage."""
        if self._run.last is None or not (parameter.requires_grad and torch.is_grad_enabled()):
            return super().bring_parameter(parameter)
        self.places.copies.drop(parameter)
        key = id(parameter), self.stage
        crossing = self._run.shared.get(key)  # this stage is this lane's now
        if crossing is None:
            crossing = self._run.shared[key] = Crossing(parameter, self.device)
            hand_over([crossing.leaf])
        return crossing.leaf

    def _cut(self, tensor: torch.Tensor, made_in: int) -> torch.Tensor:
        key = id(tensor), self.stage, self.device
        given = self._cuts.get(key)
        if given is None:
            before, version = self._latest.get(id(tensor), (tensor, tensor._version))
            if before._version != version and before is not tensor:  # written in place in a stage between
                return self.bring(before)
            crossing, copied = self.started.pop(id(tensor), None) or (Crossing(tensor, self.device), None)
            given = self._cuts[key] = crossing.handed(copied)
            self._latest[id(tensor)] = given, given._version
            self._cut_nodes[given.grad_fn] = self.stage
            self._read.setdefault(self.stage, []).append((crossing, made_in))
            if is_tracing():
                self._run.crossed.setdefault((made_in, self.stage), [0, 0])[0] += tensor.nbytes
        return given

    def bring_together(self, function: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Cut tensors of earlier stages off, and bring the others together."""
        if self.stage and self._run.last is not None and torch.is_grad_enabled():
            with_grad = [each for each in tensors_among((args, kwargs)) if each.requires_grad]
            early = [each for each in with_grad if self.bring(each) is not each]
            if early:
                args, kwargs = map_leaves((args, kwargs), self._cut_off)
        return super().bring_together(function, args, kwargs)

    def _cut_off(self, leaf: Any) -> Any:
        return self.bring(leaf) if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf

    def _stage_of(self, tensor: torch.Tensor) -> int:
        """Return the stage that made a tensor.

        Its node has a number between those of a stage, and so have the nodes before it, unless they are leaves.  Not so
        where another thread has numbered it, or where it is a view whose base was written since: then it is of the
        latest stage that it depends on.
        """
        node = tensor.grad_fn
        assert node is not None
        if (kept := self._run.placement.of_last_call.get(id(tensor))) is not None and kept[0]() is tensor:
            raise RuntimeError(
                f"a step reads {kept[1]} of a module itself, which is of the call before: each micro-batch has its "
                "own. Read it in the forward, and return it with the output"
            )
        stage = self._numbered(node)
        if self._run.placement.searches or any(
            before is not None and self._numbered(before) not in (stage, _LEAF) for before, _ in node.next_functions
        ):
            return self._searched(node)
        return stage

    def _numbered(self, node: Any) -> int:
        """Return the stage of a node by its number; negative: before all stages; ``_LEAF``: of a leaf."""
        number = node._sequence_nr()
        return _LEAF if number == _OF_LEAVES else bisect_right(self._begins, number) - 1

    def _searched(self, node: Any) -> int:
        stage, waiting, seen = self._cut_nodes.get(node, 0), [node], {node}
        while waiting:
            for before, _ in waiting.pop().next_functions:
                if before in self._cut_nodes:
                    stage = max(stage, self._cut_nodes[before])
                elif before is not None and before not in seen:
                    seen.add(before)
                    waiting.append(before)
        return stage

    def looked_through(self) -> tuple[bool, set[str]]:
        """Return whether some node is not of the stage whose backward would run it; and the names of all nodes."""
        roots: dict[int, list[Any]] = {}
        for crossing, made_in in chain.from_iterable(self._read.values()):
            roots.setdefault(made_in, []).append(crossing.source.grad_fn)
        if self._run.last is not None:
            roots.setdefault(self.stage, []).append(self._run.last.node(self._index))
        is_mistaken, names = False, set[str]()
        for stage, waiting in roots.items():
            seen = {None, *waiting}
            while waiting:
                node = waiting.pop()
                names.add("" if node is None else node.name())
                for before, _ in () if node is None else node.next_functions:
                    if before not in seen:
                        seen.add(before)
                        is_cut = before in self._cut_nodes
                        made_in = self._cut_nodes[before] if is_cut else self._numbered(before)
                        is_mistaken |= made_in not in (stage, _LEAF)
                        waiting += [] if is_cut else [before]
        return is_mistaken, names

    def _backward(self, end: LastStage, last: int) -> None:
        """Run the backward of each stage, the last one first."""
        for stage in range(last, -1, -1):
            self._take(BACKWARD, stage)
            self.stage, self.device = stage, self.places.devices[stage]
            given = self._given.pop(stage, [])
            hand_over([each.grad for each in given if each.grad is not None])
            with self.in_backward():
                if stage == last:
                    end.backward(self._index)
                if given:
                    torch.autograd.backward([each.source for each in given], [each.grad for each in given])
            del given
            self._send_back(stage)
        if self._given:
            raise RuntimeError("a gradient belongs to no stage: a tensor was made in a stage that has no forward")

    def _send_back(self, stage: int) -> None:
        """Start to send the gradients of the tensors that a stage has read, and let go of these."""
        for key in [key for key in self._cuts if key[1] == stage]:
            del self._cuts[key]
        self._cut_nodes = {node: made for node, made in self._cut_nodes.items() if made != stage}
        for crossing, made_in in self._read.pop(stage, ()):
            crossing.send_back()
            if crossing.grad is not None:
                self._given.setdefault(made_in, []).append(crossing)
                if is_tracing():
                    self._run.crossed.setdefault((made_in, stage), [0, 0])[1] += crossing.grad.nbytes


def _count_to(number: int) -> None:
    """Let the next node of this thread have this number at least.

    Autograd runs the nodes of a device by their numbers, and each thread counts its own.  So the backwards of
    micro-batches run in one order in every call, and so do the sums of their gradients.
    """
    missing = number - _get_sequence_nr()
    if missing > 0:
        leaf = torch.zeros((), device="cpu", requires_grad=True)
        for _ in range(missing):
            leaf.view(())


def _enter(stack: ExitStack, context: AbstractContextManager[object]) -> None:
    if context is not NULL_CONTEXT:
        stack.enter_context(context)
