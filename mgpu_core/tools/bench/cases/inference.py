"""Requests to a `Predictor` over two CPU ranks, beside ways to serve the same requests without one.

`direct` calls the network in the threads that ask. `one_core` and `bare` call it in one thread, with one intra-op
thread or with all. `by_hand` has two worker threads, each with a copy of the network and one intra-op thread.
`data_parallel` is the wrapper in eval mode. Rows:

* `one_row`: requests of one row from 16 threads, each of which waits for its answer;
* `outstanding`: the same requests from one thread, of which at most 256 are without an answer;
* `map`: a stream of batches of 64;
* `call`: one call with 64 rows.
"""

import argparse
import contextlib
import copy
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn

from mgpu_core import DataParallel, Predictor
from mgpu_core.tools.bench.case import Case, Contest, RowPlan, at_least, at_most
from mgpu_core.tools.bench.options import add_counts
from mgpu_core.tools.bench.timing import OURS, Contestant, Timing, timed
from mgpu_core.tools.mnist.model import build_model

RANKS, THREADS, OUTSTANDING, ROWS = 2, 16, 256, 64

Answers = list[torch.Tensor]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How much is asked."""
    add_counts(parser, requests=(1600, "of one row"), batches=(64, "of the map"))


def plan(options: argparse.Namespace) -> RowPlan:
    """All kinds of requests."""
    kinds = {"one_row": ("mlp", "simplenet"), "outstanding": ("mlp",), "map": ("cnn",), "call": ("resnet18",)}
    rows = [{"what": what, "net": net} for what, nets in kinds.items() for net in nets]
    return RowPlan(rows, _contests(rows, options))


def _contests(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> Generator[Contest]:
    makers = {"one_row": _one_row, "outstanding": _outstanding, "map": _map, "call": _call}
    for row in rows:
        net, make = row["net"], makers[row["what"]]
        with contextlib.ExitStack() as stack:
            module, shape = _network(net)
            xs, sides = make(module, shape, options, stack)
            wanted = [module(x) for x in xs]
            contestants = {
                name: Contestant(timed(work), _counter(work, wanted))
                for name, work in sides.items()
                if name in (OURS, *options.peers)
            }
            yield Contest(row, contestants, Timing(options.repeats, 1))


def _counter(work: Callable[[], Answers], wanted: Sequence[torch.Tensor]) -> Callable[[], int]:
    def wrong() -> int:
        pairs = zip(work(), wanted, strict=True)
        return sum(int((~torch.isclose(one, other, rtol=1e-4, atol=1e-5)).sum()) for one, other in pairs)

    return wrong


def _network(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """Return the network in eval mode, without gradients, and the shape of a row."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        if name == "mlp":
            sizes = (1024, 4096, 4096, 1000)
            layers = [each for pair in pairwise(sizes) for each in (nn.Linear(*pair), nn.ReLU())]
            net: nn.Module = nn.Sequential(*layers[:-1])
        elif name == "resnet18":
            from torchvision.models import resnet18

            net = resnet18(num_classes=10)
        else:
            net = build_model(name)
    shape = {"mlp": (1024,), "resnet18": (3, 32, 32)}.get(name, (1, 28, 28))
    return net.eval().requires_grad_(False), shape


def _batches(count: int, rows: int, shape: tuple[int, ...]) -> Answers:
    generator = torch.Generator().manual_seed(0)
    return list(torch.rand(count, rows, *shape, generator=generator))


Made = tuple[Answers, Mapping[str, Callable[[], Answers]]]


def _one_row(net: nn.Module, shape: tuple[int, ...], options: argparse.Namespace, stack: contextlib.ExitStack) -> Made:
    xs = _batches(options.requests, 1, shape)
    predict = stack.enter_context(Predictor(net, ["cpu"] * RANKS, max_batch=THREADS))
    return xs, {OURS: lambda: _from_threads(predict, xs), "direct": lambda: _from_threads(net, xs)}


def _outstanding(
    net: nn.Module, shape: tuple[int, ...], options: argparse.Namespace, stack: contextlib.ExitStack
) -> Made:
    xs = _batches(options.requests, 1, shape)
    predict = stack.enter_context(Predictor(net, ["cpu"] * RANKS, max_batch=ROWS))

    def submitted() -> Iterator[torch.Tensor]:
        waiting: deque[Any] = deque()
        for x in xs:
            waiting.append(predict.submit(x))
            if len(waiting) == OUTSTANDING:
                yield waiting.popleft().result()
        yield from (each.result() for each in waiting)

    return xs, {OURS: lambda: list(submitted()), "direct": lambda: _from_threads(net, xs)}


def _map(net: nn.Module, shape: tuple[int, ...], options: argparse.Namespace, stack: contextlib.ExitStack) -> Made:
    xs = _batches(options.batches, ROWS, shape)
    predict = stack.enter_context(Predictor(net, ["cpu"] * RANKS, max_batch=ROWS))
    pool = stack.enter_context(contextlib.closing(_ByHand(net)))
    return xs, {
        OURS: lambda: list(predict.map(xs)),
        "one_core": lambda: _on_one_core(net, xs),
        "bare": lambda: _bare(net, xs),
        "by_hand": lambda: pool.answers(xs),
    }


def _call(net: nn.Module, shape: tuple[int, ...], options: argparse.Namespace, stack: contextlib.ExitStack) -> Made:
    (x,) = xs = _batches(1, ROWS, shape)
    predict = stack.enter_context(Predictor(net, ["cpu"] * RANKS, max_batch=ROWS))
    pool = stack.enter_context(contextlib.closing(_ByHand(net)))
    wrapper = DataParallel(net, ["cpu"] * RANKS)

    def wrapped() -> Answers:
        with torch.inference_mode():
            return [wrapper(x)]

    return xs, {
        OURS: lambda: [predict(x)],
        "one_core": lambda: _on_one_core(net, xs),
        "bare": lambda: _bare(net, xs),
        "by_hand": lambda: [torch.cat(pool.answers(list(x.chunk(RANKS))))],
        "data_parallel": wrapped,
    }


def _from_threads(call: Callable[[torch.Tensor], torch.Tensor], xs: Answers) -> Answers:
    """Return the answers to all requests, of which each thread makes its share, one after the other."""
    answers: list[Any] = [None] * len(xs)

    def work(first: int) -> None:
        with torch.inference_mode():
            for index in range(first, len(xs), THREADS):
                answers[index] = call(xs[index])

    threads = [threading.Thread(target=work, args=(first,)) for first in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def _bare(net: nn.Module, xs: Answers) -> Answers:
    with torch.inference_mode():
        return [net(x) for x in xs]


def _on_one_core(net: nn.Module, xs: Answers) -> Answers:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _bare(net, xs)
    finally:
        torch.set_num_threads(before)


class _ByHand:
    """Worker threads with a copy of the network each, as one writes them without a library."""

    def __init__(self, net: nn.Module) -> None:
        self._inbox: SimpleQueue[tuple[int, torch.Tensor] | None] = SimpleQueue()
        self._outbox: SimpleQueue[tuple[int, torch.Tensor]] = SimpleQueue()
        before = torch.get_num_threads()
        ready = threading.Barrier(RANKS + 1)
        self._threads = [
            threading.Thread(target=self._work, args=(copy.deepcopy(net), before // RANKS, ready)) for _ in range(RANKS)
        ]
        for thread in self._threads:
            thread.start()
        ready.wait()
        torch.set_num_threads(before)

    def _work(self, net: nn.Module, cores: int, ready: threading.Barrier) -> None:
        torch.set_num_threads(max(1, cores))
        ready.wait()
        with torch.inference_mode():
            while (given := self._inbox.get()) is not None:
                self._outbox.put((given[0], net(given[1])))

    def answers(self, xs: Answers) -> Answers:
        for numbered in enumerate(xs):
            self._inbox.put(numbered)
        by_number = dict(self._outbox.get() for _ in xs)
        return [by_number[index] for index in range(len(xs))]

    def close(self) -> None:
        for _ in self._threads:
            self._inbox.put(None)
        for thread in self._threads:
            thread.join()


CASE = Case(
    name="inference",
    summary="requests to a Predictor over two CPU ranks",
    peers=("direct", "one_core", "bare", "by_hand", "data_parallel"),
    plan=plan,
    add_arguments=add_arguments,
    unit="ms",
    bounds=(
        at_least(1.6, "direct", what="one_row", net="mlp"),
        at_least(4.0, "direct", what="outstanding", net="mlp"),
        at_least(2.0, "direct", what="one_row", net="simplenet"),
        at_least(1.7, "one_core", what="map", net="cnn"),
        at_most(1.05, "bare", what="map", net="cnn"),
        at_most(1.1, "by_hand", what="call", net="resnet18"),
    ),
    repeats=5,
)
