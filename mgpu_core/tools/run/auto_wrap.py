"""Find the net that a script trains, and let its calls run over all devices, in place.

The script keeps its own object: the class of the net is exchanged for a subclass whose ``__call__`` goes through a
``DataParallel`` of the net.  The replicas have that class too, and are called as they are.
"""

from __future__ import annotations

import copyreg
import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from operator import attrgetter
from typing import Any, SupportsIndex

import torch
from torch.nn import Module
from torch.optim import Optimizer

from mgpu_core.data_parallel import DataParallel
from mgpu_core.devices.devices import default_devices
from mgpu_core.ranks.random import random_numbers_kept
from mgpu_core.support.warnings import warn_user
from mgpu_core.trees.comparison import any_in_half, difference
from mgpu_core.trees.module_copy import copy_module
from mgpu_core.trees.nested import cloned, tensors_in

__all__ = ["AutoWrap", "not_counted", "uncounted"]

uncounted: ContextVar[bool] = ContextVar("uncounted", default=False)
"""True while wrappers and calls are our own, and not the script's."""


@contextmanager
def not_counted() -> Iterator[None]:
    """Make wrappers and calls inside the block our own."""
    token = uncounted.set(True)
    try:
        yield
    finally:
        uncounted.reset(token)


_WRAPPERS = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)


class AutoWrap:
    """Wrap the module that is called first among those with the parameters of the first optimizer.

    Args:
        report: called with a text where the net is not wrapped.
        hint: called with a text on outputs that a script may not expect.
        dim: the dimension of the rows.
    """

    def __init__(self, report: Callable[[str], object], hint: Callable[[str], object], dim: int) -> None:
        self._report, self._hint, self._dim = report, hint, dim
        self._open = True  # until an optimizer was made
        self._called = False  # a candidate, or a replica of it in the script's own wrapper
        self._candidates: list[Module] = []
        self._net: Module | None = None
        self._model: DataParallel[Module] | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch optimizers being made inside the block; afterwards the net is called as before."""
        original = Optimizer.__init__

        @wraps(original)
        def constructed(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            if self._open:
                self._open = False
                self._prepare(optimizer)

        Optimizer.__init__ = constructed  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            Optimizer.__init__ = original  # type: ignore[method-assign]
            self._restore([*self._candidates, *([self._net] if self._net is not None else [])])
            if self._open:
                self._report("no net: no optimizer was made")
            elif self._candidates and not self._called:
                self._report(f"{', '.join(type(each).__name__ for each in self._candidates)}: never called as a whole")

    def _prepare(self, optimizer: Optimizer) -> None:
        wanted = {id(each) for group in optimizer.param_groups for each in group["params"]}
        holders = [each for each in _modules() if wanted <= {id(parameter) for parameter in each.parameters()}]
        if not holders:
            self._report("the parameters of the first optimizer, which are of no single module")
        for module in holders:
            try:
                object.__setattr__(module, "__class__", _routed(type(module), self))
            except TypeError as error:
                self._report(f"{type(module).__name__}: {error}")
            else:
                self._candidates.append(module)

    def call(self, module: Module, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a candidate or a replica of it: the candidate that is called first is the net, a traced call aside."""
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            return plain(*args, **kwargs)
        self._called = True
        if any(module is each for each in self._candidates):
            candidates, self._candidates = self._candidates, []
            self._restore([each for each in candidates if each is not module])
            self._choose(module)
            if self._model is not None:
                self._compare(module, args, kwargs)
        if module is self._net and self._model is not None:
            return self._model(*args, **kwargs)
        return plain(*args, **kwargs)

    def _choose(self, net: Module) -> None:
        """Wrap the net, unless the script has done so meanwhile or there is nothing to spread it over."""
        self._net, devices = net, default_devices()
        held = {each.device for each in net.parameters()}
        wrappers = (each for each in _modules() if isinstance(each, _WRAPPERS))
        if any(part is net for each in wrappers for part in each.modules()):  # not ==, which metrics overload
            return
        if len(devices) < 2:
            self._report(f"{type(net).__name__}: there are no two devices (--ranks N makes CPU ranks)")
        elif held != {devices[0]}:
            self._report(f"{type(net).__name__}: it is on {', '.join(map(str, held))}, not on {devices[0]}")
        else:
            self._model = DataParallel(net, dim=self._dim)

    def _compare(self, net: Module, args: Any, kwargs: Any) -> None:
        """Warn if the ranks give other outputs than the plain net: on copies of the net, in eval mode."""
        try:
            copied = copy_module(net)
            for module in copied.modules():
                module.training = False
            with not_counted():
                calls = (copied, DataParallel(copied, dim=self._dim))
            with torch.no_grad(), random_numbers_kept(map(_device_of, net.parameters())), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                plain, over_ranks = (each(*cloned(args), **cloned(kwargs)) for each in calls)
            is_number = not all(each.dim() for each in tensors_in(plain))
            if is_number:
                name = type(net).__name__
                self._hint(
                    f"{name} returns a number, and over ranks one for each: backward() needs its .mean(), which is one "
                    "device's where all ranks have as many rows and labels"
                )
            different = difference(over_ranks, plain, half=any_in_half(net.parameters()))
        except Exception:  # the script's own call says what is wrong
            return
        if different is not None:
            cure = (
                "A forward that returns one number has one for each rank: return rows, or use mgpu_core.TrainStep"
                if is_number
                else f"Rows were cut along dimension {self._dim}: pass theirs (`mgpu run --dim N`), and return rows"
            )
            warn_user(f"{type(net).__name__} over ranks gives other outputs than the plain net: {different}. {cure}")

    def _restore(self, modules: list[Module]) -> None:
        for module in modules:
            object.__setattr__(module, "__class__", type(module).__base__)


_device_of = attrgetter("device")


def _modules() -> list[Module]:
    return [each for each in gc.get_objects() if issubclass(type(each), Module)]


def _routed(kind: type[Module], router: AutoWrap) -> type[Module]:
    """Return a subclass whose calls go to the router; a copy or a pickle of its objects is of the class itself."""

    def __call__(self: Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        return router.call(self, partial(kind.__call__, self), args, kwargs)

    def forward(self: Module, *args: Any, **kwargs: Any) -> Any:
        return router.call(self, partial(kind.forward, self), args, kwargs)

    def __reduce_ex__(self: Module, protocol: SupportsIndex) -> Any:  # noqa: N807
        routed = type(self)
        object.__setattr__(self, "__class__", kind)
        try:
            reduced = self.__reduce_ex__(protocol)
        finally:
            object.__setattr__(self, "__class__", routed)
        # pickle compares the class given to __newobj__ with that of the object
        return (object.__new__, *reduced[1:]) if reduced[0] is copyreg.__newobj__ else reduced  # type: ignore[attr-defined]

    names = {"__call__": __call__, "forward": forward, "__reduce_ex__": __reduce_ex__, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), {**names, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__})
