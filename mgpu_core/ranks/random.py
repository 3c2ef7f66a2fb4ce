"""Random numbers of ranks that share a generator.

All CPU ranks would draw from torch's one default generator, in the order in which their threads happen to come: the
same seed gives other dropout masks in every run.  So each gets a generator of its own for the length of a forward,
seeded from one draw of the default generator.  Ranks that share an accelerator's generator take turns instead.

Torch's random functions take a ``generator=`` argument, but modules do not pass one.  :class:`RankStream` is a
TorchDispatchMode that fills it in.  It costs some microseconds an operation, so it is entered only where a module
draws.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from mgpu_core.devices.plug_ins import numbers_of, put_numbers_back
from mgpu_core.support.warnings import warn_user

__all__ = [
    "RankStream",
    "check_rng",
    "current_generator",
    "current_stream",
    "random_numbers_kept",
    "rank_streams",
    "same_numbers",
]


def check_rng(rng: str) -> None:
    """Raise ValueError for anything but ``auto`` and ``per_rank``."""
    if rng not in ("auto", "per_rank"):
        raise ValueError(f"rng must be 'auto' or 'per_rank', not {rng!r}")


def rank_streams(ranks: int) -> list[RankStream]:
    """Return a stream per rank, seeded by one draw from the caller's generator."""
    _first_use()
    base = int(torch.empty((), dtype=torch.int64, device="cpu").random_(2**32, generator=current_generator()))
    # The CPU generator uses 32 bits of its seed.  An odd step keeps the ranks' seeds apart, whatever the base.
    return [_kind()((base + rank * 0x9E3779B9) % 2**32) for rank in range(ranks)]


@cache
def _first_use() -> None:
    """Warn once, without the GIL, that torch before 2.13 has a race where several ranks draw random numbers."""
    if torch.__version__ < "2.13" and not getattr(sys, "_is_gil_enabled", lambda: True)():
        warn_user(
            f"torch {torch.__version__} has a race without the GIL: a forward in which several CPU ranks draw random "
            'numbers (dropout) can fail with "INTERNAL ASSERT FAILED" in PyHandleCache.h. Use torch 2.13 or newer, '
            "which needs Python 3.14t, or set PYTHON_GIL=1.",
            RuntimeWarning,
        )


@contextmanager
def random_numbers_kept(devices: Iterable[torch.device]) -> Iterator[None]:
    """Put the random state back at the end: of the CPU, and of these accelerators."""
    accelerators = [each for each in devices if each.type != "cpu"]
    on_cpu, states = torch.get_rng_state(), numbers_of(accelerators) if accelerators else {}
    try:
        yield
    finally:
        torch.set_rng_state(on_cpu)
        if states:
            put_numbers_back(states)


@contextmanager
def same_numbers(devices: Sequence[torch.device]) -> Iterator[list[RankStream]]:
    """Yield a stream of CPU numbers per rank, all with those that the caller would draw; accelerators draw so, too.

    At the end the caller's generators have drawn as much as rank 0's.
    """
    streams = [_kind()(0) for _ in devices]
    for stream in streams:
        stream.generator.set_state(torch.get_rng_state())
    first = devices[0]
    others = [each for each in dict.fromkeys(devices) if each.type == first.type != "cpu" and each != first]
    with random_numbers_kept(others):
        if others and (states := numbers_of([first])):
            put_numbers_back(dict.fromkeys(others, states[first]))
        yield streams
    torch.set_rng_state(streams[0].generator.get_state())


class RankStream(TorchDispatchMode):
    """Let one rank draw on the CPU from a generator of its own.

    Attributes:
        generator: the rank's.
        was_used: something was drawn from it.
        given: other generators of the CPU that operations were given, by the address of each.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = torch.Generator().manual_seed(seed)
        self.was_used = False
        self.given: dict[int, torch.Generator] = {}  # alive, so no address is another's

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: a compiled module stays compiled."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch imports its compiler at the first operation: a second in everybody's first call.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        way = _way_of(func) if self is _thread.stream else None  # a rank inside this one draws from its own
        if way is None or not _on_cpu(args, kwargs):
            return func(*args, **kwargs)
        if self.was_used:
            return way(self, args, kwargs)
        before = self.generator.get_state()
        result = way(self, args, kwargs)
        # Attention without dropout, for example, might draw and does not.
        self.was_used = not torch.equal(before, self.generator.get_state())
        return result

    def chosen(self, given: Any) -> Any:
        """Return the generator of an operation that was given this one, or none."""
        if given is not None:
            self.given[given._cdata] = given
            return given
        return self.generator

    def entered(self) -> _Entered:
        """Return a context in which this thread draws everything from this stream."""
        return _Entered(self)


class _UncompiledStream(RankStream):
    """A stream for a process that has loaded torch's compiler, which is told not to look into the method."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    __torch_dispatch__ = RankStream.__torch_dispatch__  # an entry of this class, which torch wraps


def _kind() -> type[RankStream]:
    return _UncompiledStream if "torch._dynamo" in sys.modules else RankStream


class _Entered:
    """A stream in use by a thread: no generator function, whose frame would keep a failure's tensors alive."""

    __slots__ = ("_outer", "_stream")

    def __init__(self, stream: RankStream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._outer, _thread.stream = _thread.stream, self._stream
        _count_askers(1)
        _push_mode(self._stream)  # see Modes.entered: `with stream` is not for several threads

    def __exit__(self, *error: object) -> None:
        _pop_mode()
        _thread.stream = self._outer
        _count_askers(-1)


class _Thread(threading.local):
    stream: RankStream | None = None


_thread = _Thread()


def current_stream() -> RankStream | None:
    """Return the stream that this thread draws from, if it runs a rank that has one."""
    return _thread.stream


def current_generator() -> torch.Generator:
    """Return the generator of CPU numbers that this thread draws from."""
    stream = _thread.stream
    return torch.default_generator if stream is None else stream.generator


@cache
def _way_of(func: Any) -> Callable[[RankStream, tuple[Any, ...], dict[str, Any]], Any] | None:
    """Return how an operator is called so that it draws from a generator; ``None``: it draws nothing."""
    names = [argument.name for argument in func._schema.arguments]
    if "generator" in names:
        return partial(_filled, func, names.index("generator"))
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    sibling = _with_generator(func)
    return partial(_lent, func) if sibling is None else partial(_filled, sibling, len(names))


def _with_generator(func: Any) -> Any:
    """``aten.rand.generator`` for ``aten.rand.default``: the same arguments and, by keyword, a generator."""
    wanted = _arguments(func)
    overloads = [getattr(func.overloadpacket, name) for name in func.overloadpacket.overloads()]
    siblings = [each for each in overloads if each is not func and _arguments(each) == wanted]
    return next((each for each in siblings if any(a.name == "generator" for a in each._schema.arguments)), None)


def _arguments(func: Any) -> list[tuple[str, str]]:
    return [(each.name, str(each.type)) for each in func._schema.arguments if each.name != "generator"]


def _filled(func: Any, position: int, stream: RankStream, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``func`` with a generator as its argument at ``position``: the stream's, unless the caller passes one."""
    if len(args) > position:
        return func(*args[:position], stream.chosen(args[position]), *args[position + 1 :], **kwargs)
    return func(*args, **{**kwargs, "generator": stream.chosen(kwargs.get("generator"))})


def _lent(func: Any, stream: RankStream, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function without a generator argument, with the rank's state in the default generator meanwhile."""
    default, generator = torch.default_generator, stream.chosen(None)
    with _lending:
        before = default.get_state()
        default.set_state(generator.get_state())
        try:
            return func(*args, **kwargs)
        finally:
            generator.set_state(default.get_state())
            default.set_state(before)


_lending = threading.Lock()


def _on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operator with these arguments works in host memory."""
    device = kwargs.get("device")
    if device is None:
        tensors = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))
        device = next((tensor.device for tensor in tensors), None)
    return device is None or torch.device(device).type == "cpu"


class _DefaultGenerator:
    """A stand-in for torch's default generator: in the thread of a rank, that rank's own.

    A checkpoint asks for the state of the generator before it runs its function, and sets it before it runs the
    function again, in backward.  It must get the state that the function drew from, or the second masks differ from the
    first and the gradients are wrong.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(current_generator(), name)


_asking, _askers = threading.Lock(), [0]


def _count_askers(more: int) -> None:
    """Have torch ask the rank while some rank draws; at all other times a user finds the default generator there."""
    seen_by_torch: Any = torch.random
    with _asking:
        _askers[0] += more
        seen_by_torch.default_generator = _DefaultGenerator() if _askers[0] else torch.default_generator


def _after_fork_in_child() -> None:
    global _lending, _asking
    _lending, _asking = threading.Lock(), threading.Lock()
    _askers[0] = 0
    _count_askers(0)


os.register_at_fork(after_in_child=_after_fork_in_child)
