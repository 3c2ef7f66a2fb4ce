"""The extras: packages that only some of the work needs, and the words that install each.

Call :func:`require` before the work begins, so that a missing package is named early and in the same words.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

__all__ = ["MissingExtra", "cure", "require"]

_EXTRAS = {
    "accelerate": "transformers",
    "lightning": "lightning",
    "matplotlib": "mnist",
    "pynvml": "doctor",
    "safetensors": "weights",
    "torch_geometric": "pyg",
    "torchvision": "mnist",
    "transformers": "transformers",
}
"""Which extra of `pyproject.toml` brings a package."""


class MissingExtra(ModuleNotFoundError):
    """A package that is asked for is not there, or cannot be imported; the text has the cure and the reason."""


def cure(package: str) -> str:
    """Return the command that installs a package."""
    return f"pip install 'mgpu-core[{_EXTRAS[package]}]'"


def require(module: str, needed_by: str) -> ModuleType:
    """Return the module, imported.

    Args:
        module: of one of the packages above: ``matplotlib``, ``torchvision.datasets``.
        needed_by: the feature that needs it; the message begins with it.

    Raises:
        MissingExtra: it cannot be imported.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package, reason = module.partition(".")[0], " ".join(str(error).split())
        raise MissingExtra(f"{needed_by} needs {package}: {cure(package)} ({reason})") from error
