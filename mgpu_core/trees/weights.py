"""Weights from files straight to the devices of a module's tensors, one tensor at a time.

For files of safetensors: one, or a folder with several and, as a rule, an index of them.
"""

from __future__ import annotations

import json
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from mgpu_core.devices.transfer import to_device
from mgpu_core.support.extras import require
from mgpu_core.trees.moves import give_memory

__all__ = ["Weights", "parameters_on_meta", "weights_of"]

_INDEX = "model.safetensors.index.json"
_SHOWN = 5
_COMPUTED = (r"rotary_emb\.inv_freq$", r"embeddings\.position_ids$")
"""Buffers that old checkpoints have, and modules compute."""

_CHANGES = ("WeightRenaming", "WeightConverter")  # classes of transformers

Rename = Callable[[str], str | None]
"""From the name of a tensor in the files to its name in the module; ``None``: it is left out."""


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Let modules that are made inside have parameters without memory, for ``place(..., weights=...)``.

    Buffers are made as always: many are computed, and in no file.  So a change of dtype that would round them is an
    error until the weights are there.  Other threads are not concerned.
    """
    here = threading.get_ident()

    def on_meta(module: Module, name: str, parameter: Any) -> Any:
        if parameter is None or parameter.is_meta or threading.get_ident() != here:
            return None
        placeholder = torch.Tensor._make_subclass(
            type(parameter), torch.empty_like(parameter, device="meta"), parameter.requires_grad
        )
        placeholder.__dict__.update(parameter.__dict__)
        return placeholder

    def guarded(module: Module, *_: Any) -> None:
        if threading.get_ident() == here:
            module.__dict__["_apply"] = partial(_apply_unrounded, weakref.ref(module))

    hooks = register_module_parameter_registration_hook(on_meta), register_module_buffer_registration_hook(guarded)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _apply_unrounded(
    module_ref: weakref.ref[Module], fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> Any:
    """Stand in for ``_apply`` of a module that waits for its weights: it must not round buffers that no file has."""
    module = module_ref()
    assert module is not None, "it is being called"
    for name in module._non_persistent_buffers_set:
        buffer = module._buffers.get(name)
        if buffer is None or not buffer.is_floating_point():
            continue
        if (dtype := fn(buffer.detach()).dtype).itemsize < buffer.dtype.itemsize:
            raise ValueError(
                f"buffer {name} of {type(module).__name__} would be rounded to {dtype}, and no file has its values: "
                f"make the module in its dtype, such as from_config(config, dtype={dtype}), in place of .to({dtype})"
            )
    return type(module)._apply(module, fn, recurse)


class Weights:
    """The tensors of files, checked against a module; nothing is read but the names and shapes.

    Args:
        root: the module, with parameters on meta.
        source: a file, or a folder of files.
        rename: from the name of a tensor in the files to its name in the module, or to ``None``, which leaves it out.
            Without it, names are the same, or those that a model of transformers gives them.

    Raises:
        FileNotFoundError: there is no such file.
        MissingExtra: the package safetensors is missing.
        ValueError: tensors that are missing in the files or surplus there, or have another shape; buffers without
            memory that no file has; a file that cannot be read.
    """

    def __init__(self, root: Module, source: str | PathLike[str], rename: Rename | None = None) -> None:
        self._open = require("safetensors", "weights=").safe_open
        rename = _renaming(root, rename)
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
            with self._opened(path) as file:
                names = {name: rename(name) for name in file.keys()}  # noqa: SIM118
                for name, key in names.items():
                    if key not in self._tensors:
                        surplus += [] if key is None else [name]
                    elif (shape := tuple(file.get_slice(name).get_shape())) != tuple(self._tensors[key].shape):
                        own_shape = tuple(self._tensors[key].shape)
                        raise ValueError(f"{key} has the shape {own_shape}, and {name} in {path} {shape}")
            self._found[path] = {name: key for name, key in names.items() if key in self._tensors}
        there = {self._ids[key] for names in self._found.values() for key in names.values()}
        missing = [name for name, each in _all_named(root) if name in kept and id(each) not in there]
        if missing or surplus:
            raise ValueError(
                f"{source} does not fit a {type(root).__name__}: missing {_listed(missing)}; surplus "
                f"{_listed(surplus)}. Give rename=, a function from names in the files to names of the module, or to "
                "None for those to leave out. Checkpoints that transformers converts while it loads them, such as "
                "experts that it joins, need from_pretrained, and once save_pretrained(folder, "
                "save_original_format=False)"
            )

    @contextmanager
    def _opened(self, path: Path) -> Iterator[Any]:
        """Yield an open file; ValueError with its name if it cannot be read."""
        try:
            file = self._open(path, framework="pt")
        except OSError:
            raise
        except Exception as error:
            raise ValueError(
                f"{path} is no whole file of safetensors, as after a download that broke off: {error}"
            ) from error
        with file as opened:
            yield opened

    def tensors(self) -> Iterator[tuple[str, Any, str]]:
        """Yield each tensor once: its name in the module, an open file, and its name there."""
        for key, path, name in self._places():
            with self._opened(path) as file:  # anew: no pages of other tensors stay in memory
                yield key, file, name

    def values(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each tensor of the module once, and its value in the files, on the host and in the tensor's dtype."""
        for key, file, name in self.tensors():
            yield self._tensors[key], file.get_tensor(name).to(self._tensors[key].dtype)

    def _places(self) -> Iterator[tuple[str, Path, str]]:
        """Yield each tensor once: its name in the module, its file, and its name there."""
        done: set[int] = set()
        for path, names in self._found.items():
            for name, key in names.items():
                if id(self._tensors[key]) not in done:
                    done.add(id(self._tensors[key]))
                    yield key, path, name

    def load(self, device_of: Callable[[torch.Tensor], torch.device]) -> None:
        """Read each tensor, to its device and the dtype of the module; a thread for each device."""
        of_devices: dict[torch.device, list[tuple[str, Path, str]]] = {}
        for place in self._places():
            of_devices.setdefault(device_of(self._tensors[place[0]]), []).append(place)
        failed: list[bool] = []
        with ThreadPoolExecutor(max(1, len(of_devices)), "mgpu weights") as pool:
            try:
                list(pool.map(partial(self._load, failed), of_devices, of_devices.values()))
            except BaseException:  # Ctrl-C, too
                failed.append(True)
                raise

    def _load(self, failed: Sequence[bool], device: torch.device, places: Sequence[tuple[str, Path, str]]) -> None:
        for key, path, name in places:
            if failed:
                return
            with self._opened(path) as file:
                value = to_device(file.get_tensor(name), device, self._tensors[key].dtype)
                give_memory(self._tensors[key], value.clone() if device.type == "cpu" else value)


def weights_of(net: Module, source: str | PathLike[str] | None, rename: Rename | None) -> Weights | None:
    """Return the files with the weights of a module; ``None`` where it has them itself.

    Raises:
        ValueError: no files, and a parameter without memory; as for :class:`Weights`.
    """
    if source is not None:
        files = Weights(net, source, rename)
        for module in net.modules():  # from now on dtypes may change
            if isinstance(apply := vars(module).get("_apply"), partial) and apply.func is _apply_unrounded:
                del module.__dict__["_apply"]
        return files
    if empty := next((name for name, each in net.named_parameters() if each.is_meta), None):
        raise ValueError(f"parameter {empty!r} has no memory: pass weights=, the files that have it")
    return None


def _renaming(root: Module, given: Rename | None) -> Rename:
    """Return a function from names in files to names of a module: a model of transformers has a table of its own."""
    kept = root.state_dict(keep_vars=True)
    dropped = (*_COMPUTED, *(getattr(root, "_keys_to_ignore_on_load_unexpected", None) or ()))
    table = None if given is not None else _table_of(root)

    def rename(name: str) -> str | None:
        key = name if given is None else given(name)
        if table is not None and key not in kept:
            key = table(name, kept)
        return None if key not in kept and any(re.search(each, name) for each in dropped) else key

    return rename


def _table_of(root: Any) -> Callable[[str, Mapping[str, Any]], str] | None:
    """Return the function by which transformers names the tensors of a model's files; ``None``: it is no such model."""
    if not hasattr(root, "base_model_prefix") or not hasattr(root, "config"):
        return None
    try:
        loading, mapping = map(import_module, ("transformers.core_model_loading", "transformers.conversion_mapping"))
    except ImportError:  # another package's model, or a transformers without the table
        return None
    changes = mapping.get_model_conversion_mapping(root)
    kinds = [[each for each in changes if isinstance(each, getattr(loading, kind))] for kind in _CHANGES]

    def table(name: str, kept: Mapping[str, Any]) -> str:
        key, converter = loading.rename_source_key(name, *kinds, root.base_model_prefix, kept)
        return name if converter is not None else key  # of one that joins tensors the name alone would not do

    return table


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    if not source.exists():
        raise FileNotFoundError(
            f"there is no file or folder {source}: for a model of the hub pass "
            f"huggingface_hub.snapshot_download({str(source)!r})"
        )
    index = source / _INDEX
    if index.is_file():
        listed: Mapping[str, str] = json.loads(index.read_text())["weight_map"]
        return [source / name for name in dict.fromkeys(listed.values())]
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{source} has no *.safetensors")
    return files


def _all_named(root: Module) -> list[tuple[str, Any]]:
    """Return all parameters and buffers under all of their names."""
    return [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more if names else "nothing"
