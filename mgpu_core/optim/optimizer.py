"""An optimizer whose state is flat: torch's interface over our kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress, repeat
from operator import attrgetter, is_not, itemgetter
from typing import Any, ClassVar, TypeAlias

import torch
from torch.autograd import profiler
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from mgpu_core.devices import streams
from mgpu_core.devices.memory import note_written
from mgpu_core.devices.streams import core_stream
from mgpu_core.devices.tensor_checks import LiesLike
from mgpu_core.optim.bucket_layout import Bucket, bucket_layout
from mgpu_core.optim.flat_buffers import FlatTensors, compact, warn_of_holders
from mgpu_core.optim.flat_state import FlatState
from mgpu_core.optim.rules import Rule

__all__ = ["FlatOptimizer"]

_UNLIMITED = 2**62  # bytes of a bucket: outside a TrainStep all parameters of a dtype share one
_data_ptr = torch.Tensor.data_ptr
_dtype_of, _grad_of, _members_of = attrgetter("dtype"), attrgetter("grad"), itemgetter("params")

# What a TrainStep wants of the step that it is about to call: the parameters to update, whose gradients lie in the flat
# memory that it has attached (``None``: those that have a ``grad``), and what gradients are multiplied by.
_Order: TypeAlias = tuple[list[bool] | None, float | torch.Tensor]
_BY_HAND: _Order = (None, 1.0)  # of a step that no TrainStep makes


class FlatOptimizer(Optimizer):
    """Step all parameters of a device and dtype by one kernel, over values, gradients and state in flat buffers.

    At the first step the parameters' ``data`` become views of a flat buffer; where they were moved since, that is made
    anew, and the state kept.  ``state`` shows views of the flat state.  Entries that are written in place, replaced or
    taken away count from the next step on.

    Raises:
        ValueError: ``differentiable=True``; groups that differ in ``amsgrad``.
    """

    rule: ClassVar[Rule]
    flat: FlatState | None = None  # what it steps over
    _is_attached = False
    _like: LiesLike | None = None  # of gradients that kernels read where they lie
    _gpu: int | None = None  # where these kernels are, if on a GPU
    _parameters: Sequence[torch.Tensor] = ()
    _views: list[torch.Tensor | None] | None = None  # of the flat gradients; ``None``: these have no memory yet
    _order: _Order | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; return the result of ``closure``.

        Raises:
            TypeError: sparse gradients, or parameters that are not floating.
        """
        if (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
            or profiler._is_profiler_enabled
        ):
            return self._hooked_step(closure)
        return self._step(closure)

    step.hooked = True  # type: ignore[attr-defined]  # torch need not wrap it: that costs half of a step's calls

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        used, factor = self._order or _BY_HAND
        flat, gradients = self.flat, None
        if flat is not None and flat.is_cut and self._order is None:
            raise RuntimeError(
                'optimizer.step() by hand, while a TrainStep with shard="parameters" keeps the values: call '
                "step.close() before, which makes the module whole"
            )
        is_changed = self._optimizer_step_pre_hooks or _global_optimizer_pre_hooks  # a hook may write gradients
        if flat is None or used is None or (is_changed and flat.shards == 1 and not flat.is_cut):
            flat, used, gradients = self._take_gradients()
            flat.prepare(used)
        elif is_changed or not flat.launches:  # a step of the user's own may have loaded a state
            flat.prepare(used)
        if type(factor) is not float or factor != flat.factor:
            flat.scale_by(factor)
        launches, graphs = flat.recorded
        is_recorded = launches is flat.launches and gradients is None
        for graph in graphs if is_recorded else ():
            graph.replay()
        for kernel, parameters in () if is_recorded else flat.launches:
            kernel.step(None if gradients is None else [gradients[i] for i in parameters])
        if flat.shards > 1:
            flat.share_values()
        note_written(list(compress(self._parameters, used)))
        return loss

    _hooked_step = Optimizer.profile_hook_step(_step)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, or fill them with zeros, as torch does."""
        if not set_to_none or profiler._is_profiler_enabled:
            super().zero_grad(set_to_none)
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _take_gradients(self) -> tuple[FlatState, list[bool], list[torch.Tensor] | None]:
        """Return who has a gradient, and where kernels read them: ``None`` where they were copied into the flat ones.

        Kernels read each gradient where it lies, if it lies as its parameter does.  A graph finds it there when it is
        replayed only in memory that is the graph's own, so what is captured copies.
        """
        flat = self._laid_out()
        gradients = list(map(_grad_of, self._parameters))
        used = list(map(is_not, gradients, repeat(None)))
        is_captured = self._gpu is not None and streams.is_capturing(self._gpu)
        if self._like is not None and not is_captured and self._like.holds_for(gradients):
            if False in used:  # their segments are not active, and no kernel reads there
                with_parameters = zip(gradients, self._parameters, strict=True)
                gradients = [parameter if each is None else each for each, parameter in with_parameters]
            return flat, used, gradients
        if self._views is None:
            flat.hold_gradients()
            views = {i: view for own in flat.flats for i, view in own.gradient_views.items()}
            self._views = [views.get(i) for i in range(len(gradients))]
        pairs = [
            (view, gradient)
            for view, gradient in zip(self._views, gradients, strict=True)
            if view is not None and gradient is not None and gradient is not view
        ]
        if pairs:
            _copy_all(pairs)
        if self._is_attached:
            flat.spread_gradients()
        return flat, used, None

    def _laid_out(self) -> FlatState:
        flat = self.flat
        if flat is not None and self._is_attached:
            return flat
        members = [
            parameter
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.requires_grad or parameter.grad is not None
        ]
        memory = list(map(len, map(_members_of, self.param_groups))), list(map(_data_ptr, members))
        if flat is None or memory != self._memory or list(map(id, members)) != self._ids:
            flat = self._lay_out(members)
        return flat

    def _lay_out(self, members: list[torch.Tensor]) -> FlatState:
        """Give the members flat memory; a frozen parameter gets its own memory back and takes no room."""
        if self.flat is not None:
            for parameter in self._parameters:
                if not parameter.requires_grad and not _is_in(parameter, members):
                    parameter.data = compact(parameter)
        self.detach()
        self.rule.check_alike(self.param_groups)
        laid_out = [_flat_on(device, members) for device in dict.fromkeys(each.device for each in members)]
        buckets, flats = [each for each, _ in laid_out], [each for _, each in laid_out]
        mine = set(map(id, self._parameters))  # have flat memory of this class's
        new = [each for each in members if id(each) not in mine]
        warn_of_holders(new, [f"a parameter of shape {tuple(each.shape)}" for each in new])
        in_place = len(flats) == 1 and core_stream(flats[0].device) is not None
        self._like = LiesLike(members) if in_place and len(set(map(_dtype_of, members))) == 1 else None
        flat = FlatState(self, self.rule, members, buckets, flats, copies=False, holds_gradients=self._like is None)
        for flat_tensors in flats:
            flat_tensors.adopt(members, list(flat_tensors.value_views))
        self.flat, self._parameters = flat, members
        self._views = None  # they are made where kernels cannot read gradients in place
        self._ids = list(map(id, members))
        self._memory = list(map(len, map(_members_of, self.param_groups))), list(map(_data_ptr, members))
        gpus = [own.device.index for own in flats if own.device.type == streams.GPU_TYPE]
        self._gpu = gpus[0] if in_place and gpus else None
        return flat

    def attach(
        self, parameters: Sequence[torch.Tensor], buckets: Sequence[Bucket], flats: Sequence[FlatTensors], shards: int
    ) -> FlatState:
        """Step over a TrainStep's memory from now on: the same buckets on all devices, whole or in shards."""
        self.detach()
        self.rule.check_alike(self.param_groups)
        every = [buckets] * len(flats)
        self.flat = FlatState(self, self.rule, parameters, every, flats, copies=True, shards=shards)
        self._parameters, self._is_attached, self._like, self._gpu = list(parameters), True, None, None
        self._views = [flats[0].gradient_views.get(i) for i in range(len(parameters))]
        return self.flat

    def detach(self) -> None:
        """Keep the state as torch does: compact copies, which the next layout takes over."""
        if self.flat is not None:
            self.state = self.flat.whole()
            self.flat, self._is_attached = None, False

    def step_by(self, used: list[bool] | None, factor: float | torch.Tensor) -> None:
        """Call :meth:`step`, with all hooks of the user's, for a TrainStep.

        Args:
            used: the parameters to update, whose gradients lie in the memory of :meth:`attach`; ``None``: those that
                have a ``grad``.
            factor: the number that gradients are multiplied by.
        """
        self._order = used, factor
        try:
            self.step()
        finally:
            self._order = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch does; the next step lays out again and keeps the state."""
        super().add_param_group(param_group)
        self.rule.check_alike(self.param_groups)
        self.detach()

    def state_dict(self) -> dict[str, Any]:
        """Return a state that torch's class of the same name loads: compact copies, gathered from shards."""
        shown = self.state
        if self.flat is not None:
            self.state = self.flat.whole()
        try:
            return super().state_dict()
        finally:
            self.state = shown

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, of this class or of torch's of the same name."""
        super().load_state_dict(state_dict)
        if self.flat is not None:
            self.flat.fill()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return state if self.flat is None else state | {"state": self.flat.whole()}


def _flat_on(device: torch.device, members: Sequence[torch.Tensor]) -> tuple[Sequence[Bucket], FlatTensors]:
    """Return the layout of a device's parameters, a bucket per dtype, and flat tensors for it."""
    kinds = {dtype: kind for kind, dtype in enumerate(dict.fromkeys(each.dtype for each in members))}
    numbers = [kinds[each.dtype] for each in members]
    order = sorted((i for i, each in enumerate(members) if each.device == device), key=numbers.__getitem__)
    counts, sizes = [each.numel() for each in members], [each.element_size() for each in members]
    buckets = bucket_layout(counts, sizes, numbers, order, _UNLIMITED)
    return buckets, FlatTensors(buckets, members, device)


def _is_in(tensor: torch.Tensor, tensors: Sequence[torch.Tensor | None]) -> bool:
    return any(tensor is each for each in tensors)


def _copy_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    views, gradients = [view for view, _ in pairs], [each for _, each in pairs]
    for gradient in gradients:
        if gradient.layout is not torch.strided:
            raise TypeError(
                "sparse gradients are for torch.optim.SparseAdam or torch.optim.SGD: the kernels update whole buffers"
            )
    if True in [each.requires_grad for each in gradients]:  # of create_graph=True
        gradients = [each.detach() for each in gradients]
    torch._foreach_copy_(views, gradients)
