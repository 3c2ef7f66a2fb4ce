"""``DataParallel``: ``torch.nn.DataParallel`` with the same contract, on any devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.nn import Module

from mgpu_core.comm.trace_hooks import trace_backward
from mgpu_core.devices.devices import DeviceLike, as_device
from mgpu_core.devices.drop_in import as_id, drop_in_devices, drop_in_output
from mgpu_core.devices.traces import is_symbolic, traced_call
from mgpu_core.devices.transfer import module_to
from mgpu_core.parallel import gather, parallel_apply, replicate, scatter_kwargs
from mgpu_core.parallel.apply import apply_to
from mgpu_core.parallel.first_calls import Call, FirstCalls
from mgpu_core.parallel.first_calls.labels import LABELLED, OF_A_WRAPPER, Labels
from mgpu_core.parallel.first_calls.lost import LostAttributes
from mgpu_core.parallel.first_calls.originals import Originals
from mgpu_core.parallel.first_calls.rows import RowsElsewhere, rows_of_part
from mgpu_core.parallel.first_calls.shared import SharedObjects
from mgpu_core.parallel.gather_outputs import padded
from mgpu_core.parallel.replicate_modules import replicate_tree
from mgpu_core.parallel.scatter_inputs import check_shares
from mgpu_core.ranks.compiled import outside_the_compiler
from mgpu_core.ranks.draws import Draws
from mgpu_core.ranks.modes import check_modes
from mgpu_core.ranks.random import check_rng
from mgpu_core.ranks.run import shares_generator
from mgpu_core.ranks.team import Team
from mgpu_core.ranks.worker_choice import check_workers, workers_for
from mgpu_core.support.null_context import NULL_CONTEXT
from mgpu_core.trace import tracer
from mgpu_core.trace.tracer import span, when_tracing
from mgpu_core.trees.module_tree import ModuleTree, check_initialised, missing_attribute, tensors_of
from mgpu_core.trees.nested import unwrapped
from mgpu_core.trees.views import REWIRED, loosen

__all__ = ["DataParallel", "data_parallel"]

M = TypeVar("M", bound=Module)
_WATCHED = 3  # first calls over several ranks


class DataParallel(torch.nn.DataParallel[M]):
    """Runs a module on several ranks: each gets its share of the rows, outputs come back together.

    A subclass of ``torch.nn.DataParallel``, because libraries unwrap by ``isinstance``; nothing of it is used.

    Args:
        module: the wrapped module, on ``device_ids[0]`` (moved there if there is one device).
        device_ids: one device per rank: ints (accelerator index), strings or ``torch.device``; the CPU too, and a
            device more than once (``["cpu"] * 4`` are four ranks).  ``None``: all accelerators, else as many CPU ranks
            as ``MGPU_CORE_CPU_RANKS`` says, else the plain module; ``[]``: the plain module.  Where there is no
            accelerator at all, ids of accelerators give the plain module, as in torch, and a warning; with
            ``MGPU_CORE_CPU_RANKS`` set, as many CPU ranks as there are ids.
        output_device: where outputs are gathered (default: ``device_ids[0]``).
        dim: the dimension of the rows.
        shares: rows in this proportion, one positive number per rank.
        rng: ``auto``: one seed gives the same bits in every run, whatever draws random numbers in the forward; whether
            something does is found by the first call of each form, and a later one that draws first warns;
            ``per_rank``: without finding out.
        workers: ``threads``: ranks run at once, each in its own thread, as in torch; ``caller``: one after the other in
            the calling thread, which is faster where each launches little work; ``auto``: threads where each rank has
            an accelerator of its own, otherwise the caller.  Ranks that wait for each other in a forward need threads:
            :class:`mgpu_core.SyncBatchNorm` gets them, other modules that do so need ``threads``.

    Raises:
        ValueError, TypeError: devices that do not exist, shares that do not fit, another ``rng`` or ``workers``.
    """

    def __init__(
        self,
        module: M,
        device_ids: Sequence[DeviceLike] | None = None,
        output_device: DeviceLike | None = None,
        dim: int = 0,
        *,
        shares: Sequence[float] | None = None,
        rng: str = "auto",
        workers: str = "threads",
    ) -> None:
        Module.__init__(self)
        check_rng(rng)
        check_workers(workers)
        devices = drop_in_devices(device_ids, output_device)
        self.module = module
        self.dim = dim
        self.shares = shares
        self.rng = rng
        self._workers = self._usual_workers = workers_for(workers, devices).way
        self._draws = Draws(rng, type(module).__name__)
        observers = LostAttributes(), SharedObjects(), Originals(), RowsElsewhere(dim)
        joins = self._is_own("gather")  # otherwise a subclass weighs the ranks' losses itself
        labels = [(Labels(OF_A_WRAPPER, of_outputs=True), LABELLED)] if joins else []
        self._first_calls = FirstCalls(*((each, _WATCHED) for each in observers), *labels)
        self.device_ids: list[Any] = [as_id(device) for device in devices]
        self.output_device: Any = drop_in_output(output_device, self.device_ids)
        self._team: Team | None = Team.of(devices) if devices else None
        self._ids: list[Any] | None = list(self.device_ids)  # whose team it is: device_ids may be changed
        if not self.device_ids:
            return
        check_shares(shares, len(self.device_ids))
        self.src_device_obj = as_device(self.device_ids[0])
        if len(self.device_ids) == 1:
            module_to(self.module, self.src_device_obj)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            method = '.module.{name}(...), or .call("{name}", ...), which cuts its rows over the devices'
            raise missing_attribute(self, name, module, method, ".module.{name}") from None

    @outside_the_compiler
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Scatter, replicate, apply, gather.

        Raises:
            RuntimeError: the module is not on ``device_ids[0]``.
            ValueError: inputs that disagree on their number of rows.
            TypeError: a mode or a transform of ``torch.func`` that would not reach the ranks.
            Exception: a replica raised it, see :func:`mgpu_core.parallel_apply`.
        """
        if not self.device_ids:
            return self._move_output(self.module(*unwrapped(inputs), **unwrapped(kwargs)))
        if is_symbolic(inputs) or (kwargs and is_symbolic(kwargs.values())):
            return traced_call(self, inputs, kwargs)
        with NULL_CONTEXT if tracer.sink is None else span("data_parallel"):
            return self._alone(inputs, kwargs) if len(self.device_ids) == 1 else self._over_ranks(inputs, kwargs)

    @outside_the_compiler
    def call(self, method: str, /, *inputs: Any, pad_value: float | None = None, **kwargs: Any) -> Any:
        """Run a method of the module as :meth:`forward` runs the module: ``model.call("generate", ids, num_beams=2)``.

        Args:
            method: its name.
            inputs, kwargs: its arguments, cut as those of the forward.
            pad_value: fills up the outputs of ranks that are shorter than those of others, at their ends, as texts
                of unequal lengths are; ``None``: there must be none.

        Returns:
            The outputs, joined as those of the forward.

        Raises:
            AttributeError: the module has no such method.
            ValueError: outputs of unequal lengths, and no ``pad_value``.
        """
        getattr(self.module, method)
        if not self.device_ids:
            return self._move_output(getattr(self.module, method)(*unwrapped(inputs), **unwrapped(kwargs)))
        with NULL_CONTEXT if tracer.sink is None else span("data_parallel"):
            if len(self.device_ids) == 1:
                return self._alone(inputs, kwargs, method)
            return self._over_ranks(inputs, kwargs, method, pad_value)

    def _alone(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], method: str | None = None) -> Any:
        """Run the module itself on the only rank: nothing is copied, and a first forward initialises a lazy module."""
        _check_device(tensors_of(self.module), self.src_device_obj)
        parts, kwargs_parts = self._parts(inputs, kwargs)
        with span("forward", 0, self.src_device_obj):
            call = self.module if method is None else getattr(self.module, method)
            output = call(*parts[0], **kwargs_parts[0])
        if tracer.recording is not None:
            _trace_backward(output)
        return self._move_output(output)

    def _parts(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return the arguments of each rank; without any, the module runs once, on the first rank."""
        parts, kwargs_parts = self.scatter(inputs, kwargs, self.device_ids)
        return (parts, kwargs_parts) if parts or kwargs_parts else (((),), ({},))

    def _over_ranks(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any], method: str | None = None, pad_value: float | None = None
    ) -> Any:
        check_modes()
        tree = _read(self.module, self.src_device_obj)
        parts, kwargs_parts = self._parts(inputs, kwargs)
        team = self._team_of(self.device_ids[: len(parts)])
        if self._is_own("replicate"):
            replicas = replicate_tree(tree, team, not torch.is_grad_enabled())
        else:
            replicas = self.replicate(self.module, self.device_ids[: len(parts)])
        try:
            outputs = self._run_replicas(tree, team, replicas, parts, kwargs_parts, method)
        finally:
            if REWIRED in vars(replicas[-1]):
                loosen(replicas)
        return self.gather(outputs if method is None else padded(outputs, self.dim, pad_value), self.output_device)

    def _run_replicas(
        self,
        tree: ModuleTree,
        team: Team,
        replicas: Sequence[M],
        parts: Any,
        kwargs_parts: Any,
        method: str | None,
    ) -> list[Any]:
        """Call the replicas of a module that was just read."""
        turns = tree.takes_turns and shares_generator(team)
        self._workers = "threads" if tree.ranks_meet else "caller" if turns else self._usual_workers
        called: Sequence[Any] = replicas if method is None else [getattr(each, method) for each in replicas]
        watched = None
        if self._first_calls.go_on:
            arguments = list(zip(parts, kwargs_parts, strict=False))
            rows = [rows_of_part(each, self.dim) for each in arguments]
            watched = Call(self.module, replicas, tree, called, [] if method else arguments, rows)
            self._first_calls.begin(watched)
        if self._is_own("parallel_apply"):
            called = called if watched is None else watched.called
            self._draws.ranks_meet = tree.ranks_meet
            form = method, tree.modes, *map(type, parts[0]), *kwargs_parts[0]
            outputs = apply_to(team, called, parts, kwargs_parts, draws=self._draws, workers=self._workers, form=form)
        else:
            outputs = self.parallel_apply(called, parts, kwargs_parts)
        if watched is not None:
            self._first_calls.end(watched, outputs)
        return outputs

    def _is_own(self, name: str) -> bool:
        """Return whether a method is this class's: neither a subclass's nor put on the wrapper."""
        return name not in self.__dict__ and getattr(type(self), name) is getattr(DataParallel, name)

    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[DeviceLike]) -> Any:
        """Return one tuple of arguments and one dict of keyword arguments per rank."""
        return scatter_kwargs(inputs, kwargs, self._team_of(device_ids), self.dim, shares=self.shares)

    def replicate(self, module: M, device_ids: Sequence[DeviceLike]) -> list[M]:
        """Return one replica of the module per rank."""
        return replicate(module, self._team_of(device_ids).devices, not torch.is_grad_enabled())

    def parallel_apply(self, replicas: Sequence[M], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """Call each replica on its own arguments, all at once; return their outputs."""
        devices = self._team_of(self.device_ids[: len(replicas)]).devices
        return parallel_apply(replicas, inputs, kwargs, devices, rng=self.rng, workers=self._workers)

    def gather(self, outputs: Any, output_device: DeviceLike) -> Any:
        """Return the outputs joined along ``dim`` on ``output_device``."""
        return gather(outputs, output_device, dim=self.dim)

    def close(self) -> None:
        """End the idle worker threads of this wrapper's team now; the next forward starts new ones."""
        if self.device_ids:
            self._team_of(self.device_ids).close()

    def _team_of(self, device_ids: Sequence[DeviceLike]) -> Team:
        """Return the team of these devices; that of ``device_ids``, whatever they are now, is kept."""
        team = self._team
        if team is not None and device_ids == self._ids:
            return team
        team = Team.of(device_ids)
        if device_ids == self.device_ids:
            self._team, self._ids = team, list(device_ids)
        return team

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes but the team, which another machine may not have."""
        return {**self.__dict__, "_team": None, "_ids": None}

    def _move_output(self, output: Any) -> Any:
        """Move a single rank's output to ``output_device``, if that is another device."""
        if self.output_device is None or not self.device_ids or self.output_device == self.device_ids[0]:
            return output
        return self.gather([output], self.output_device)


@when_tracing
def _trace_backward(output: Any) -> None:
    """Trace a single rank's backward by the module's output, since there is no gather."""
    trace_backward(0, list(_tensors_in(output, set())))


def _tensors_in(output: Any, met: set[int]) -> Iterator[torch.Tensor]:
    """Return the tensors of ordinary nests; code of other containers must not run for a recording."""
    if isinstance(output, torch.Tensor):
        yield output
        return
    for kind, opened in _NESTS.items():
        if isinstance(output, kind) and id(output) not in met:
            met.add(id(output))
            for member in opened(output):
                yield from _tensors_in(member, met)


_NESTS: dict[type, Callable[[Any], Iterable[Any]]] = {
    dict: dict.values,
    list: list.__iter__,
    tuple: tuple.__iter__,
}


def _read(module: Module, source: torch.device) -> ModuleTree:
    """Return the module as it is, for its replicas.

    Raises:
        RuntimeError: a parameter or buffer is not on ``source``.
        ValueError: one has not been initialised.
    """
    tree = ModuleTree(module)
    check_initialised(tree.tensors, module)
    _check_device(tree.tensors, source)
    return tree


def _check_device(tensors: Iterable[torch.Tensor], source: torch.device) -> None:
    for tensor in tensors:
        if tensor.device != source:
            raise RuntimeError(
                f"module must have its parameters and buffers on device {source} (device_ids[0]) but found one of "
                f"them on device: {tensor.device}"
            )


def data_parallel(
    module: Module,
    inputs: Any,
    device_ids: Sequence[DeviceLike] | None = None,
    output_device: DeviceLike | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
    *,
    shares: Sequence[float] | None = None,
    rng: str = "auto",
    workers: str = "threads",
) -> Any:
    """``module(*inputs, **module_kwargs)`` over several ranks, once; see :class:`DataParallel`.

    Args:
        inputs: a tuple of positional arguments, or the only one, or ``None``.
    """
    if not isinstance(inputs, tuple):
        inputs = (inputs,) if inputs is not None else ()
    devices = drop_in_devices(device_ids, output_device)
    if devices:
        _check_device(tensors_of(module), devices[0])  # before the wrapper, which would move the module to one device
    return DataParallel(module, devices, output_device, dim, shares=shares, rng=rng, workers=workers)(
        *inputs, **(module_kwargs or {})
    )
