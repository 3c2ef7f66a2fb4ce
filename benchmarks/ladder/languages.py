"""The three languages: each is a module with one function, and is imported when it is first asked for."""

from collections.abc import Callable, Sequence
from importlib import import_module

import torch

from benchmarks.ladder.problems import Problem
from benchmarks.ladder.rungs import LANGUAGES, Unavailable

Launch = Callable[[], None]
Prepare = Callable[[Problem, str], Launch]
"""A problem and a rung to what runs the rung once; raises `Unavailable`."""


def load(language: str) -> Prepare:
    """The language's `prepare`.

    Raises:
        Unavailable: a package that it needs is not installed.
    """
    prepare: Prepare = import_module(f"benchmarks.ladder.{language}_rungs").prepare
    return prepare


def usable(wanted: Sequence[str], probe: Problem) -> dict[str, Prepare | Unavailable]:
    """Each wanted language, or why it cannot run this problem here: one rung is compiled and launched."""
    found: dict[str, Prepare | Unavailable] = {}
    for language in LANGUAGES:
        if language not in wanted:
            continue
        try:
            found[language] = load(language)
            load(language)(probe, "fused")()
        except Unavailable as error:
            found[language] = error
        except Exception as error:  # each library has its own for a compiler or a driver that is not there
            found[language] = Unavailable(f"{type(error).__name__}: {error}")
    return found


def device() -> torch.device | None:
    """The GPU to measure on, or None."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
