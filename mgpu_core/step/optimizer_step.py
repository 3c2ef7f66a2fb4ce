"""The optimizer's step on all devices: ours over the step's flat memory, any other by its own ``step()``, once.

That updates the first device, and the others get its values: a step may do more than compute (draw random numbers,
count, clamp weights).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from mgpu_core.optim import FlatOptimizer
from mgpu_core.optim.flat_state import FlatState
from mgpu_core.step.grad_buckets import GradBuckets
from mgpu_core.step.options import Options
from mgpu_core.step.reducer import Gradients
from mgpu_core.step.replicas import Replicas
from mgpu_core.support.warnings import warn_user

__all__ = ["LeftOverStep", "OptimizerStep", "why_not_in_shards"]

_version_of = attrgetter("_version")
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_WATCHED = 3  # updates
_SAMPLED = 16  # elements of a gradient


class LeftOverStep:
    """Warn of lines of an old loop that come too late; a hook of the optimizer from an update to the next.

    They are a step by the gradients of the last update, and, looked for after the first ones, changes of these.

    Attributes:
        spent: these gradients, until those of the next update are made.
        watched: updates after which changes are still looked for.
    """

    KEY = -1  # among the optimizer's hooks, to which torch gives numbers from 0

    def __init__(self) -> None:
        self.spent: list[torch.Tensor | None] = []
        self.watched = _WATCHED
        self._versions: list[int] = []
        self._samples: list[torch.Tensor] = []

    def note(self) -> None:
        """Note the gradients of an update that was made."""
        self._versions = [0 if each is None else each._version for each in self.spent]
        self._samples = [_EMPTY if each is None else _sample_of(each).clone() for each in self.spent]

    def check(self, now: Iterable[torch.Tensor | None]) -> None:
        """Warn if gradients that are still their parameters' were made smaller; ``now``: those of all parameters.

        Other changes, such as a backward of another loss or ``zero_grad(set_to_none=False)``, do no harm.
        """
        versions, self._versions = self._versions, []
        if not versions:
            return
        self.watched -= 1
        changed = [
            (_sample_of(spent), sample)
            for spent, grad, version, sample in zip(self.spent, now, versions, self._samples, strict=True)
            if spent is not None and spent is grad and spent._version != version
        ]
        self._samples = []
        if changed and _are_clipped(changed):
            self.watched = 0
            warn_user(
                "gradients were changed after a TrainStep's call, which has made the update by then: clip by its "
                "argument clip_norm, and remove clip_grad_norm_"
            )

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        """Look at the gradients that the optimizer steps by."""
        spent = {id(each) for each in self.spent if each is not None}
        if any(id(each.grad) in spent for group in optimizer.param_groups for each in group["params"]):
            warn_user(
                "optimizer.step() after a TrainStep's call updates a second time by the same gradients: the call has "
                "made the backward and the update already, so remove it"
            )


_EMPTY = torch.empty(0)


def _sample_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return a few elements."""
    values = gradient.detach().reshape(-1) if gradient.layout is torch.strided else _EMPTY
    return values[:: max(1, values.numel() // _SAMPLED)]


def _are_clipped(changed: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Return whether all values of now are those of before, multiplied by one factor between 0 and 1."""
    now, before = (torch.cat([each.double().cpu() for each in samples]) for samples in zip(*changed, strict=True))
    factors = (now / before)[before != 0]
    return bool(factors.numel()) and 0 < float(factors.max()) < 1 and float(factors.min() / factors.max()) > 0.98


class OptimizerStep:
    """Run the user's optimizer on all devices.

    Ours update each device; those of several kinds may differ in the last bit, so that the first one is updated then.

    Args:
        optimizer: over parameters of the user's module; its settings are read at each update.
        replicas, gradients: the ranks' parameters, and their gradients.
        in_shards: each device updates a part of each bucket, and keeps that part's state alone.

    Attributes:
        has_copies: there are several devices, each with values of its own.
        is_flat: the optimizer is one of ours, which multiplies gradients by a factor itself.
        left_over: warns of a step by hand by the gradients of the last update.
        pre_hooks: those of the optimizer.
    """

    def __init__(self, optimizer: Optimizer, replicas: Replicas, gradients: Gradients, in_shards: bool) -> None:
        self._optimizer = optimizer
        self._ours = optimizer if isinstance(optimizer, FlatOptimizer) else None
        self.is_flat = self._ours is not None
        self._replicas, self._in_shards, self._has_warned = replicas, in_shards, False
        self._gradients = gradients
        self.has_copies = len(replicas.devices) > 1
        self._is_torchs = self.is_flat or type(optimizer).__module__.partition(".")[0] == "torch"
        self._flat: FlatState | None = None  # what ours keeps over the step's memory
        self._made_for: Any = None  # the groups, and how often the memory was renewed
        self._before: list[int] = []  # how often each parameter was written before the update
        self.left_over = LeftOverStep()
        # A wrapper may lack what torch's class makes.
        self.pre_hooks: dict[int, Any] = getattr(optimizer, _HOOKS[0], {})
        self.remember_values()

    @property
    def memory(self) -> tuple[int, int] | None:
        """A key that changes with the optimizer's memory; ``None``: a graph cannot hold this update."""
        if self._ours is None or self._flat is None or self._ours.flat is not self._flat or not self._is_plain():
            return None
        return id(self._flat), self._flat.generation

    @property
    def flat(self) -> FlatState:
        """The state of ours over the step's memory, once it is prepared."""
        assert self._flat is not None
        return self._flat

    def prepare(self, used: list[bool]) -> Callable[[float | torch.Tensor], None]:
        """Do the host's part before an update.

        Args:
            used: per parameter whether it has a gradient, and is updated.

        Returns:
            A function that updates all devices.  Ours multiply the gradients by its argument; for others they are
            multiplied already.

        Raises:
            TypeError: ours cannot update sparse gradients, or these dtypes.
        """
        if LeftOverStep.KEY in self.pre_hooks:
            del self.pre_hooks[LeftOverStep.KEY]
        if self._in_shards and not self._has_warned and not self._is_plain():
            self._has_warned = True
            warn_user(
                f"hooks of {type(self._optimizer).__name__}, or a step that stands in for its own, see no gradients "
                "with shard=...: each device has a part of them. If they change gradients, leave shard out"
            )
        self._before = list(map(_version_of, self._replicas.own))
        buckets = self._gradients.buckets
        if self._ours is not None and buckets is not None:
            groups = [list(map(id, group["params"])) for group in self._optimizer.param_groups]
            made_for = groups, self._replicas.renewals
            if self._flat is None or made_for != self._made_for or self._ours.flat is not self._flat:
                self._flat = self._attached(self._ours, buckets)
                self._made_for = made_for
            self._flat.prepare(used)
        if self._ours is None or self.has_copies:
            return partial(self._update, used)
        return partial(self._ours.step_by, None if buckets is None else used)

    def _update(self, used: list[bool], factor: float | torch.Tensor) -> None:
        """Make the step, and send the values to devices that have not computed them."""
        written = self.has_copies and self.values_changed()  # by a forward: rank 0's values count, as in the drop-in
        if self._ours is not None:
            self._ours.step_by(used, factor)
        else:
            self._optimizer.step()
            if self._runs_users_code():  # which may have assigned `p.data`
                self._replicas.settle()
        updates_one = self._ours is None or self._replicas.is_mixed
        if self.has_copies and (written or updates_one or not self._is_plain()):
            self._replicas.send_values()

    def _attached(self, optimizer: FlatOptimizer, buckets: GradBuckets) -> FlatState:
        """Let the optimizer step over the step's memory, on all devices of one kind."""
        self.close()
        if buckets.sparse:
            raise TypeError(
                f"the gradient of {self._replicas.names[buckets.sparse[0]]} is sparse, and the kernels update whole "
                "buffers: use torch.optim.SparseAdam or torch.optim.SGD"
            )
        for name, param in zip(self._replicas.names, self._replicas.own, strict=True):
            for kind in optimizer.rule.states:
                kept = optimizer.state.get(param, {}).get(kind)
                if torch.is_tensor(kept) and kept.shape != param.shape:
                    raise ValueError(
                        f"{name} has shape {tuple(param.shape)}, and the optimizer's {kind} of it {tuple(kept.shape)}: "
                        "after a module was resized, make a new optimizer and a new step"
                    )
        flats = buckets.flats[:1] if self._replicas.is_mixed else buckets.flats
        shards = len(flats) if self._in_shards else 1
        return optimizer.attach(self._replicas.own, buckets.buckets, flats, shards)

    def has_written(self) -> bool:
        """Return whether an update that failed has changed parameters all the same."""
        return bool(self._before) and self._before != list(map(_version_of, self._replicas.own))

    def remember_values(self) -> None:
        """Take the values as they are now for those of all devices."""
        self._versions = self._replicas.versions

    def parameters(self) -> set[int]:
        """Return which parameters the optimizer has."""
        members = {id(each) for group in self._optimizer.param_groups for each in group["params"]}
        return {i for i, each in enumerate(self._replicas.own) if id(each) in members}

    def values_changed(self) -> list[int]:
        """Return the parameters that were written in place since; torch counts that, but not through ``.data``."""
        now = self._replicas.versions
        if now == self._versions:
            return []
        return [i for i, (one, other) in enumerate(zip(now, self._versions, strict=True)) if one != other]

    def close(self) -> None:
        """Leave the optimizer with state of its own."""
        if self._ours is not None and self._flat is not None and self._ours.flat is self._flat:
            self._ours.detach()
        self._flat = None

    def leave(self) -> None:
        """Leave the optimizer alone."""
        self.close()
        if self.pre_hooks.get(LeftOverStep.KEY) is self.left_over:
            del self.pre_hooks[LeftOverStep.KEY]

    def _runs_users_code(self) -> bool:
        """Return whether a step may assign ``p.data``, draw numbers or count."""
        return not self._is_torchs or not self._is_plain()

    def _is_plain(self) -> bool:
        """Return whether there are no step hooks, and no step of the object's own."""
        optimizer = self._optimizer
        if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
            return False
        hooks = [hook for name in _HOOKS for hook in getattr(optimizer, name, {}).values()]
        if any(type(hook) is not LeftOverStep for hook in hooks):
            return False
        step = vars(optimizer).get("step")
        if getattr(step, "_wrapped_by_lr_sched", False):
            step = getattr(step, "__wrapped__", None)
        return step is None or getattr(step, "__func__", step) is type(optimizer).step


def why_not_in_shards(options: Options) -> str | None:
    """Return why the optimizer, or the devices, cannot have shards; ``None``: they can, or there are none."""
    devices, kind = set(options.team.devices), type(options.optimizer)
    if options.shard is None or (options.shard == "optimizer" and len(devices) == 1):
        return None
    if not issubclass(kind, FlatOptimizer):
        name = f"{kind.__module__.removesuffix('._functional')}.{kind.__name__}"
        return (
            f'shard="{options.shard}" is for the optimizers of mgpu_core.optim (SGD, Adam, AdamW, Lion), not for {name}'
        )
    if len({device.type for device in devices}) > 1:
        return f'shard="{options.shard}" wants devices of one kind: those of several round differently'
    return None
