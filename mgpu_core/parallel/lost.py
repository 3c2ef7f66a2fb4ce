"""Attributes that a forward assigns to its module: with replicas they are lost, and people should hear of it.

``self.steps += 1`` in a forward changes the twin, which is gone after the step.  ``torch.nn.DataParallel`` loses such
values in silence.
"""

from __future__ import annotations

from types import MethodType

from torch.nn import Module

from mgpu_core.caller import warn_caller
from mgpu_core.module_tree import ModuleTree
from mgpu_core.twin_hooks import DICTIONARIES, SHARES_HOOKS

__all__ = ["lost_attributes", "warn_lost"]

_OURS = {
    *DICTIONARIES,
    SHARES_HOOKS,
    "_parameters",
    "_buffers",
    "_modules",
    "_compiled_call_impl",
    "_former_parameters",
    "_is_replica",
    "_forwards_to_watch",
    "_twin_methods",
}


def lost_attributes(replica: Module, module: Module) -> list[str]:
    """Names, such as ``encoder.steps``, of what the forward of rank 0's replica assigned and the module lacks."""
    lost: list[str] = []
    for (path, twin), original in zip(replica.named_modules(), _modules_of(module), strict=False):
        if type(original)._replicate_for_data_parallel is not Module._replicate_for_data_parallel:
            continue  # it has given its twin attributes of its own (RNNs do)
        ours = _OURS | original._parameters.keys() | _rewritten_by_hooks(original)
        for name, value in twin.__dict__.items():
            before = original.__dict__.get(name, _ABSENT)
            if name in ours or value is before or type(before) is MethodType:  # a twin has its own methods
                continue
            lost.append(f"{path}.{name}" if path else name)
        lost += [f"{path}.{name}" if path else name for name in _replaced_buffers(twin, original)]
    return lost


def _modules_of(module: Module) -> list[Module]:
    """Those that a replica has twins of, in its order: wrappers of ``torch.compile`` are not among them."""
    return [node.module for node in ModuleTree(module).nodes]


def _replaced_buffers(twin: Module, original: Module) -> list[str]:
    """Buffers that were assigned instead of written to; rank 0's are the original's own objects."""
    return [
        name
        for name, buffer in original._buffers.items()
        if buffer is not None and not buffer.requires_grad and twin._buffers.get(name) is not buffer
    ]


_ABSENT = object()


def _rewritten_by_hooks(module: Module) -> set[str]:
    """weight_norm, spectral_norm and pruning compute a weight anew in every forward, so nothing of it is lost."""
    names = (getattr(hook, "name", getattr(hook, "_tensor_name", None)) for hook in module._forward_pre_hooks.values())
    return {name for name in names if isinstance(name, str)}


def warn_lost(replica: Module, module: Module) -> bool:
    """Warns of what the replica's forward assigned, if anything; returns whether it did."""
    lost = lost_attributes(replica, module)
    if lost:
        warn_caller(
            f"the forward of {type(module).__name__} assigns {', '.join(lost)}: with several ranks each assigns to a "
            "replica that is gone after the forward, so the value is lost. Return it, or keep it in a buffer that is "
            "changed in place (rank 0's are the module's own)."
        )
    return bool(lost)
