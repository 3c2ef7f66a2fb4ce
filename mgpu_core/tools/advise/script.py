"""A user's script, run for the names that it defines: net, loss, batch, loader.

It runs under a name of its own, so that the training, below ``if __name__ == "__main__":``, does not run.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mgpu_core.tools import user_script
from mgpu_core.tools.advise.loading import first_batch

__all__ = [
    "RUN_NAME",
    "Chosen",
    "Found",
    "ScriptFailed",
    "check_names",
    "dim_of",
    "found_in",
    "run_script",
    "run_to_end",
    "without_wrappers",
]

RUN_NAME = "__mgpu_advise__"

NETS, LOSSES = ("net", "model"), ("loss_fn", "criterion", "loss")
SAMPLES, LOADERS = ("sample", "batch"), ("loader", "train_loader")

_MISSING = object()  # a loss may be None


class ScriptFailed(Exception):
    """The script has ended by an error of its own, which has been shown; the first argument is its exit status."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Names that the user gave; ``None``: the usual ones."""

    net: str | None = None
    loss: str | None = None
    sample: str | None = None
    loader: str | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """The net, loss and data that a script defines."""

    net: Any
    loss_fn: Any
    sample: Any
    loader: Any


def run_script(script: Path) -> dict[str, Any]:
    """Run the script, and return its globals.

    Raises:
        ScriptFailed: an error in it, whose traceback has been shown, or an exit with a status.
        ValueError: it ended before its end, without an error.
    """
    names = _run(script, RUN_NAME)
    if names is None:
        raise ValueError(
            f"{script} ended itself by sys.exit(): its names are wanted, so put the training below "
            '`if __name__ == "__main__":`'
        )
    return names


def run_to_end(script: Path) -> None:
    """Run the script as ``python script.py`` does, to its end.

    Raises:
        ScriptFailed: as for :func:`run_script`.
    """
    _run(script, "__main__")


def _run(script: Path, name: str) -> dict[str, Any] | None:
    """Return the script's globals; ``None`` where it ended by ``sys.exit()``, without an error."""
    try:
        return user_script.run_script(script, name)
    except SystemExit as end:
        if end.code in (None, 0):
            return None
        raise ScriptFailed(user_script.exit_status(end.code)) from None
    except Exception as error:
        user_script.show_error(error, script)
        raise ScriptFailed(1) from None


def found_in(names: Mapping[str, Any], chosen: Chosen, script: Path) -> Found:
    """Return the net without its wrapper; the loss; the loader, if there is one; the sample, else the loader's first.

    Raises:
        ValueError: one of them is missing; the message lists the names that were looked for.
    """
    check_names(names, chosen, script)
    net, loss_fn = _one(names, chosen.net, NETS), _one(names, chosen.loss, LOSSES)
    sample, loader = _one(names, chosen.sample, SAMPLES), _one(names, chosen.loader, LOADERS)
    if sample is _MISSING:
        sample = first_batch(loader)
    if (dim := dim_of(net)) != 0:
        raise ValueError(
            f"{script}: the wrapper cuts along dimension {dim}, and advise measures dimension 0: run the training with "
            f"`mgpu run --advise {script}`, which takes the dimension along"
        )
    return Found(without_wrappers(net), loss_fn, sample, None if loader is _MISSING else loader)


def without_wrappers(net: Any) -> Any:
    """Return the net inside the wrappers that use several devices."""
    while isinstance(net, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
        net = net.module
    return net


def dim_of(net: Any) -> int:
    """Return the dimension of the rows: that of the outermost wrapper."""
    return int(getattr(net, "dim", 0)) if isinstance(net, torch.nn.DataParallel) else 0


def check_names(names: Container[str], chosen: Chosen, script: Path) -> None:
    """Raise ValueError unless the script defines a net, a loss, and a sample or a loader; the message lists them."""
    missing = []
    if not _is_there(names, chosen.net, NETS):
        missing.append(_told("a net", chosen.net, NETS, "--net"))
    if not _is_there(names, chosen.loss, LOSSES):
        missing.append(_told("a loss", chosen.loss, LOSSES, "--loss"))
    has_loader = _is_there(names, chosen.loader, LOADERS)
    if not has_loader and chosen.loader:
        missing.append(_told("a loader", chosen.loader, LOADERS, "--loader"))
    elif not _is_there(names, chosen.sample, SAMPLES) and (chosen.sample or not has_loader):
        missing.append(_told("a sample or a loader", chosen.sample, (*SAMPLES, *LOADERS), "--sample, --loader"))
    if missing:
        raise ValueError(
            f"{script} lacks at its top level: {'; '.join(missing)}. Where they live in a function, "
            f"`mgpu run --wrap auto --advise {script}` finds the net by running the script"
        )


def _is_there(names: Container[str], chosen: str | None, usual: Sequence[str]) -> bool:
    return any(name in names for name in ([chosen] if chosen else usual))


def _one(names: Mapping[str, Any], chosen: str | None, usual: Sequence[str]) -> Any:
    """Return the first that is there."""
    return next((names[name] for name in ((chosen,) if chosen else usual) if name in names), _MISSING)


def _told(what: str, chosen: str | None, usual: Sequence[str], option: str) -> str:
    return f"{what}, looked for as {chosen or ' or '.join(usual)} ({option} NAME)"
