"""Ratios that one GPU can show, in about a minute: `python measure.py OUT.json [--device cuda:0|cpu] [--seconds N]`.

Kernels: GB/s, and how much of a device-to-device copy's bandwidth that is.  Steps: milliseconds of TrainStep next to a
bare loop with torch's fused optimizer, eager and as one CUDA graph.  Requests: a Predictor next to a bare loop.
Loader: DeviceLoader next to pinned copies.  Contestants of a row take turns, and their medians are compared.

OUT.json is written after every row.  Exit status: 0; 1 if a row raised, which stops no other row.  On the CPU the sizes
are small: that tests this file alone.
"""

import argparse
import json
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import mgpu_core
from mgpu_core import kernels
from mgpu_core.tools.mnist.model import build_model

Work = Callable[[], object]


class Bench:
    """The device, and the figures so far.

    Attributes:
        found: by name of a row its numbers: milliseconds, GB/s, and ratios.
    """

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.is_gpu = self.device.type == "cuda"
        self.found: dict[str, dict[str, float]] = {}

    def size(self, on_gpu: int, on_cpu: int) -> int:
        """Return the size of an experiment."""
        return on_gpu if self.is_gpu else on_cpu

    def wait(self) -> None:
        """Wait for all work."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def tell(self, name: str, **numbers: float) -> None:
        """Keep and print the figures of a row."""
        self.found[name] = numbers
        print(f"figure: {name}:", "  ".join(f"{key} {value:.4g}" for key, value in numbers.items()), flush=True)

    def gpu_ms(self, work: Work, repeats: int = 12) -> float:
        """Return the median milliseconds of the GPU's work alone: behind a sleep, between two events."""
        if not self.is_gpu:
            return self.wall_ms({"one": work}, rounds=3)["one"]
        work()
        taken = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(2_000_000)
            begin.record()
            work()
            end.record()
            end.synchronize()
            taken.append(float(begin.elapsed_time(end)))
        return statistics.median(taken)

    def wall_ms(self, contestants: dict[str, Work], rounds: int = 7, turns: int = 10) -> dict[str, float]:
        """Return the median milliseconds of each contestant's turn; they alternate, and the first round is left out."""
        taken: dict[str, list[float]] = {name: [] for name in contestants}
        for number in range(rounds + 1):
            for name, work in contestants.items():
                self.wait()
                begin = time.perf_counter()
                for _ in range(turns):
                    work()
                self.wait()
                if number:
                    taken[name].append((time.perf_counter() - begin) / turns * 1e3)
        return {name: statistics.median(each) for name, each in taken.items()}


def memory_bound_kernels(bench: Bench) -> None:
    """Next to a copy of as many bytes."""
    count, device = bench.size(1 << 26, 1 << 16), bench.device
    a, b = torch.randn(count, device=device), torch.empty(count, device=device)
    copied = 8 * count / bench.gpu_ms(lambda: b.copy_(a)) / 1e6
    bench.tell("copy of 256 MiB", GBps=copied)

    def row(name: str, nbytes: int, ours: Work, peer: str, theirs: Work, at_least: float = 0) -> None:
        ms = bench.gpu_ms(ours)
        numbers = {"GBps": nbytes / ms / 1e6, "of_copy": nbytes / ms / 1e6 / copied}
        bench.tell(name, **numbers, **{f"times_{peer}": bench.gpu_ms(theirs) / ms})
        if bench.is_gpu and numbers["of_copy"] < at_least:
            print(f"figure: missed: {name}: of_copy {numbers['of_copy']:.3f} < {at_least}", flush=True)

    half = torch.empty(count, device=device, dtype=torch.bfloat16)
    row("scale_cast f32 -> bf16", 6 * count, lambda: kernels.scale_cast(a, 0.125, torch.bfloat16, out=half),
        "mul", lambda: torch.mul(a, 0.125, out=half))  # fmt: skip
    pieces = list(a.split(count // 64))
    row("pack of 64", 8 * count, lambda: kernels.pack(pieces, out=b), "cat", lambda: torch.cat(pieces, out=b))
    many = [a[i * 4096 : i * 4096 + 1024 + i % 7 * 64] for i in range(min(4000, count // 4096))]
    total = sum(map(len, many))
    row(f"pack of {len(many)} small", 8 * total, lambda: kernels.pack(many, out=b[:total]),
        "cat", lambda: torch.cat(many, out=b[:total]))  # fmt: skip
    four, out = [torch.randn(count // 4, device=device) for _ in range(4)], torch.empty(count // 4, device=device)
    row("sum_ranks of 4", 5 * count, lambda: kernels.sum_ranks(four, "sum", out=out),
        "stack_sum", lambda: torch.stack(four).sum(0))  # fmt: skip
    norm = kernels.FlatNorm([a])
    row("l2_norm", 4 * count, norm.compute, "norm", lambda: a.norm(), at_least=0.9)
    rows = torch.randint(0, 256, (bench.size(60000, 100), 784), dtype=torch.uint8, device=device)
    index = torch.randperm(len(rows), device=device)[: count // 784 // 4]
    row("gather_rows", index.numel() * 784 * 5, lambda: kernels.gather_rows(rows, index),
        "index", lambda: rows[index].float().mul_(1 / 255), at_least=0.9)  # fmt: skip


def host_part_of_pack(bench: Bench) -> None:
    """What a tensor of a list costs the host: 10,000 of the CPU, of a few elements each, in microseconds."""
    many = [torch.ones(8 + i % 3) for i in range(bench.size(10_000, 1_000))]
    out = torch.empty(sum(map(len, many)))
    ways: dict[str, Work] = {
        "pack": lambda: kernels.pack(many, out=out), "cat": lambda: torch.cat(many, out=out)
    }  # fmt: skip
    us = {name: ms * 1e3 / len(many) for name, ms in bench.wall_ms(ways, rounds=9, turns=2).items()}
    bench.tell("host part of pack, us a tensor", **us)
    if us["pack"] > 0.5:
        print(f"figure: missed: host part of pack: {us['pack']:.3f} us a tensor > 0.5", flush=True)


def optimizer_kernels(bench: Bench) -> None:
    """Next to torch's fused ones, over 64 tensors of 256 MiB together; GB/s of what they read and write."""
    count = bench.size(1 << 26, 1 << 16)
    counts = [count // 64] * 64
    fused = ("sgd", 5, partial(torch.optim.SGD, momentum=0.9)), ("adamw", 7, torch.optim.AdamW)
    for name, passes, make in fused:
        values, gradients = (torch.randn(count, device=bench.device) for _ in range(2))
        states = [torch.zeros(count, device=bench.device) for _ in range(1 if name == "sgd" else 2)]
        segments = kernels.segment_table(counts, device=bench.device)
        if name == "sgd":
            groups = kernels.sgd_groups({"lr": 1e-3, "momentum": 0.9}, device=bench.device)
        else:
            groups = kernels.adam_groups({"lr": 1e-3, "weight_decay": 0.01}, device=bench.device)
        no_maximum = [None] if name == "adamw" else []
        kernel = kernels.FlatKernel(name, values, gradients, [*states, *no_maximum], segments, groups)
        parameters = [nn.Parameter(each) for each in torch.randn(count, device=bench.device).split(counts)]
        for each, gradient in zip(parameters, gradients.split(counts), strict=True):
            each.grad = gradient
        theirs = make(parameters, lr=1e-3, fused=True)
        ours_ms, theirs_ms = bench.gpu_ms(kernel.step), bench.gpu_ms(theirs.step)
        bench.tell(f"{name}, 64 tensors", GBps=4 * passes * count / ours_ms / 1e6, times_fused=theirs_ms / ours_ms)


class Steps:
    """The ways to train one net on one batch.

    Args:
        make: makes the net on the device.
        x, y: the batch, there.
        amp_dtype: of autocast; ``None``: none.
    """

    def __init__(
        self, bench: Bench, make: Callable[[], nn.Module], x: torch.Tensor, y: torch.Tensor,
        amp_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self._bench, self._make, self._x, self._y, self._amp_dtype = bench, make, x, y, amp_dtype

    def bare(self, *, capturable: bool = False, wrap: Callable[[nn.Module], nn.Module] = lambda net: net) -> Work:
        """Return a bare loop's step with torch's fused AdamW."""
        net = self._make()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True, capturable=capturable)
        model = wrap(net)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(self._bench.device.type, self._amp_dtype, enabled=self._amp_dtype is not None):
                loss = functional.cross_entropy(model(self._x), self._y)
            loss.backward()
            optimizer.step()

        return step

    def bare_graph(self) -> Work:
        """Return the bare step as one CUDA graph, as torch's own documentation makes it."""
        step, side = self.bare(capturable=True), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay

    def ours(self, ranks: int, *, capture: bool = False, workers: str = "auto") -> Work:
        """Return a TrainStep with our AdamW, of ranks that share the device."""
        net = self._make()
        optimizer = mgpu_core.optim.AdamW(net.parameters(), lr=1e-4)
        step = mgpu_core.TrainStep(
            net, functional.cross_entropy, optimizer, [str(self._bench.device)] * ranks,
            amp_dtype=self._amp_dtype, capture=capture, workers=workers,
        )  # fmt: skip
        for _ in range(12):
            step(self._x, self._y)
        if step.graphs is not None and not step.graphs.replays:
            raise RuntimeError(f"not captured: {step.graphs.reason}")
        return lambda: step(self._x, self._y)

    def measure(self, name: str, turns: int) -> None:
        """Print the milliseconds of all ways, and ours next to theirs."""
        ways: dict[str, Callable[[], Work]] = {
            "bare": self.bare,
            "ours_1": lambda: self.ours(1),
            "ours_2_threads": lambda: self.ours(2, workers="threads"),
            "ours_2_caller": lambda: self.ours(2, workers="caller"),
        }
        if self._bench.is_gpu:
            ways |= {
                "bare_graph": self.bare_graph,
                "ours_1_capture": lambda: self.ours(1, capture=True),
                "ours_2_capture": lambda: self.ours(2, capture=True),
                "torch_DataParallel": lambda: self.bare(wrap=lambda net: nn.DataParallel(net, [0])),
            }
        contestants = {}
        for who, make in ways.items():
            try:
                contestants[who] = make()
            except Exception as error:
                print(f"figure: {name} without {who}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        ms = self._bench.wall_ms(contestants, rounds=5, turns=turns)
        ratios = {
            f"{ours}_to_{theirs}": ms[ours] / ms[theirs]
            for ours, theirs in (("ours_1", "bare"), ("ours_1_capture", "bare_graph"))
            if {ours, theirs} <= ms.keys()
        }
        self._bench.tell(f"step of {name}, ms", **ms, **ratios)


def step_of_simplenet(bench: Bench) -> None:
    """Batches of 64."""
    x, y = torch.randn(64, 1, 28, 28, device=bench.device), torch.randint(10, (64,), device=bench.device)
    steps = Steps(bench, lambda: build_model("simplenet").to(bench.device), x, y)
    steps.measure("SimpleNet", turns=bench.size(40, 1))


def step_of_cnn(bench: Bench) -> None:
    """Batches of 256."""
    rows = bench.size(256, 8)
    x, y = torch.randn(rows, 1, 28, 28, device=bench.device), torch.randint(10, (rows,), device=bench.device)
    Steps(bench, lambda: build_model("cnn").to(bench.device), x, y).measure("CNN", turns=bench.size(20, 1))


def step_of_resnet50(bench: Bench) -> None:
    """Batches of 64 in channels-last memory and bfloat16."""
    if not bench.is_gpu:
        return
    from torchvision.models import resnet50

    x = torch.randn(64, 3, 224, 224, device=bench.device).contiguous(memory_format=torch.channels_last)
    y = torch.randint(1000, (64,), device=bench.device)

    def make() -> nn.Module:
        net: nn.Module = resnet50().to(bench.device, memory_format=torch.channels_last)
        return net

    Steps(bench, make, x, y, torch.bfloat16).measure("ResNet-50, bf16", turns=5)


def requests(bench: Bench) -> None:
    """Batches of 64 rows by ``map``, and single rows from 16 threads, of an MLP 1024-4096-4096-1000."""
    width = bench.size(4096, 64)
    net = nn.Sequential(
        nn.Linear(1024, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1000)
    ).to(bench.device).eval().requires_grad_(False)  # fmt: skip
    batches = [torch.randn(64, 1024) for _ in range(bench.size(200, 6))]
    pinned = [x.pin_memory() if bench.is_gpu else x for x in batches]
    rows = [x[:1] for x in batches] * 4

    @torch.inference_mode()
    def direct(x: torch.Tensor) -> None:
        net(x.to(bench.device)).cpu()

    @torch.inference_mode()
    def pinned_loop() -> None:
        made = [net(x.to(bench.device, non_blocking=True)) for x in pinned]
        for each in made:
            each.cpu()

    def from_threads(call: Callable[[torch.Tensor], object]) -> None:
        def ask(first: int) -> None:
            for each in rows[first::16]:
                call(each)

        threads = [threading.Thread(target=ask, args=(first,)) for first in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    make = partial(mgpu_core.Predictor, net, [str(bench.device)], max_batch=64, max_wait_ms=0.2)
    with make() as predict:
        loops: dict[str, Work] = {
            "loop": lambda: list(map(direct, batches)),
            "pinned_loop": pinned_loop,
            "predictor": lambda: list(predict.map(batches)),
        }
        ms = bench.wall_ms(loops, rounds=3, turns=1)
        bench.tell("batches a second", **{name: len(batches) / each * 1e3 for name, each in ms.items()})
        calls: dict[str, Work] = {"direct": lambda: from_threads(direct), "predictor": lambda: from_threads(predict)}
        ms = bench.wall_ms(calls, rounds=3, turns=1)
        bench.tell("rows a second from 16 threads", **{name: len(rows) / each * 1e3 for name, each in ms.items()})
    if bench.is_gpu:
        with make(capture=True) as predict:
            (each,) = bench.wall_ms({"predictor": lambda: list(predict.map(batches))}, rounds=3, turns=1).values()
            bench.tell("batches a second, captured", predictor=len(batches) / each * 1e3)


def loader(bench: Bench) -> None:
    """An epoch of 30 batches of 12.6 MB from the host."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, 512), nn.ReLU(), nn.Linear(512, 10)).to(bench.device)
    count = bench.size(30, 2)
    batches = [(torch.randn(256, 3, 64, 64), torch.randint(10, (256,))) for _ in range(count)]
    pinned = [tuple(each.pin_memory() if bench.is_gpu else each for each in pair) for pair in batches]
    ready = [tuple(each.to(bench.device) for each in pair) for pair in batches]
    ahead = mgpu_core.DeviceLoader(batches, [str(bench.device)])

    def train(source: Iterable[Sequence[torch.Tensor]]) -> None:
        for pair in source:
            x, y = (each.to(bench.device, non_blocking=True) for each in pair)
            functional.cross_entropy(net(x), y).backward()

    sources = {"pageable": batches, "pinned": pinned, "DeviceLoader": ahead, "on_the_device": ready}
    ways: dict[str, Work] = {name: lambda source=source: train(source) for name, source in sources.items()}  # type: ignore[misc]
    bench.tell(f"epoch of {count} batches, ms", **bench.wall_ms(ways, rounds=3, turns=1))


ROWS = (
    memory_bound_kernels, host_part_of_pack, optimizer_kernels, step_of_simplenet, step_of_cnn, step_of_resnet50,
    requests, loader,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and measures; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no row is begun")
    options = parser.parse_args(arguments)
    bench, failed, end = Bench(options.device), [], time.monotonic() + options.seconds
    for row in ROWS:
        if time.monotonic() > end:
            print(f"figure: not measured, because no time was left: {row.__name__}", flush=True)
            continue
        try:
            row(bench)
        except Exception:
            traceback.print_exc()
            failed.append(row.__name__)
        options.out.write_text(json.dumps(bench.found, indent=1))
        if bench.is_gpu:
            torch.cuda.empty_cache()
    print(f"measure: {len(bench.found)} rows; failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
