"""Weights from files straight to the devices of a placed module, one tensor at a time.

For files of safetensors: one, or a folder with several and, as a rule, an index of them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module
from torch.nn.modules.module import register_module_parameter_registration_hook

from mgpu_core.devices.transfer import to_device
from mgpu_core.pipeline.placement import Placement, give_memory
from mgpu_core.support.extras import require

__all__ = ["Weights", "parameters_on_meta", "weights_of"]

_INDEX = "model.safetensors.index.json"
_SHOWN = 5


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Let modules that are made inside have parameters without memory, for ``place(..., weights=...)``.

    Buffers are made as always: many are computed, and in no file.  Other threads are not concerned.
    """
    here = threading.get_ident()

    def on_meta(module: Module, name: str, parameter: Any) -> Any:
        if parameter is None or parameter.is_meta or threading.get_ident() != here:
            return None
        made = torch.Tensor._make_subclass(
            type(parameter), torch.empty_like(parameter, device="meta"), parameter.requires_grad
        )
        made.__dict__.update(parameter.__dict__)
        return made

    hook = register_module_parameter_registration_hook(on_meta)
    try:
        yield
    finally:
        hook.remove()


class Weights:
    """The tensors of files, checked against a module; nothing is read but the names and shapes.

    Args:
        root: the module, with parameters on meta.
        source: a file, or a folder of files.
        rename: from the name of a tensor in the files to its name in the module; ``None``: the same.

    Raises:
        FileNotFoundError: there is no such file.
        MissingExtra: the package safetensors is missing.
        ValueError: tensors that are missing in the files or surplus there, or have another shape; buffers without
            memory that no file has.
    """

    def __init__(self, root: Module, source: str | PathLike[str], rename: Callable[[str], str] | None = None) -> None:
        self._open = require("safetensors", "weights=").safe_open
        kept = set(root.state_dict(keep_vars=True))
        for name, buffer in root.named_buffers():
            if buffer.is_meta and name not in kept:
                raise ValueError(
                    f"buffer {name!r} has no memory, and no file has it: make the module with its buffers, inside "
                    "mgpu_core.parameters_on_meta()"
                )
        self._ids = {name: id(each) for name, each in _all_named(root)}
        self._tensors = dict(_all_named(root))
        self._found: dict[Path, dict[str, str]] = {}  # by file the names there, with those in the module
        surplus: list[str] = []
        for path in _files(Path(source)):
            with self._open(path, framework="pt") as file:
                names = {name: name if rename is None else rename(name) for name in file.keys()}  # noqa: SIM118
                for name, own in names.items():
                    if own not in self._tensors:
                        surplus.append(name)
                    elif (shape := tuple(file.get_slice(name).get_shape())) != tuple(self._tensors[own].shape):
                        own_shape = tuple(self._tensors[own].shape)
                        raise ValueError(f"{own} has the shape {own_shape}, and {name} in {path} {shape}")
            self._found[path] = {name: own for name, own in names.items() if own in self._tensors}
        there = {self._ids[own] for names in self._found.values() for own in names.values()}
        missing = [name for name, each in _all_named(root) if name in kept and id(each) not in there]
        if missing or surplus:
            raise ValueError(
                f"{source} does not fit a {type(root).__name__}: missing {_listed(missing)}; surplus "
                f"{_listed(surplus)}. Give rename=, a function from names in the files to names of the module. "
                "Checkpoints that transformers converts while it loads them (experts of Mixtral) need from_pretrained, "
                "and once save_pretrained(folder, save_original_format=False)"
            )

    def tensors(self) -> Iterator[tuple[str, Any, str]]:
        """Yield each tensor once: its name in the module, an open file, and its name there."""
        done: set[int] = set()
        for path, names in self._found.items():
            for name, own in names.items():
                target = self._tensors[own]
                if id(target) not in done:
                    done.add(id(target))
                    with self._open(path, framework="pt") as file:  # anew: no pages of other tensors stay in memory
                        yield own, file, name

    def load(self, placement: Placement) -> None:
        """Read each tensor, to the device of its stage and the dtype of the module."""
        for own, file, name in self.tensors():
            target = self._tensors[own]
            device = placement.devices[placement.stage_of(target)]
            value = to_device(file.get_tensor(name), device, target.dtype)
            value = value.clone() if device.type == "cpu" else value
            give_memory(target, value)


def weights_of(net: Module, source: str | PathLike[str] | None, rename: Callable[[str], str] | None) -> Weights | None:
    """Return the files with the weights of a module; ``None`` where it has them itself.

    Raises:
        ValueError: no files, and a parameter without memory; as for :class:`Weights`.
    """
    if source is not None:
        return Weights(net, source, rename)
    if empty := next((name for name, each in net.named_parameters() if each.is_meta), None):
        raise ValueError(f"parameter {empty!r} has no memory: pass weights=, the files that have it")
    return None


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    index = source / _INDEX
    if index.is_file():
        listed: Mapping[str, str] = json.loads(index.read_text())["weight_map"]
        return [source / name for name in dict.fromkeys(listed.values())]
    found = sorted(source.glob("*.safetensors"))
    if not found:
        raise FileNotFoundError(f"{source} has no *.safetensors")
    return found


def _all_named(root: Module) -> list[tuple[str, Any]]:
    """Return all parameters and buffers under all of their names."""
    return [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more if names else "nothing"
