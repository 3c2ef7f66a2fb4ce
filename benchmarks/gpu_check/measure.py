"""Ratios that one GPU can show, in about a minute: `python measure.py OUT.json [--device cuda:0|cpu] [--seconds N]`.

Kernels: GB/s, and how much of a device-to-device copy's bandwidth that is.  Steps: milliseconds of TrainStep next to a
bare loop with torch's fused optimizer, eager and as one CUDA graph.  Requests: a Predictor next to a bare loop.
Loader: DeviceLoader next to pinned copies.  Host: the time after which a call of a step returns, with 1, 2, 4 and 8
ranks and with DistributedDataParallel.  Contestants of a row take turns, and their medians are compared.

Each row has a process of its own, so that no row finds the threads and the memory of another.  OUT.json is written
after every row.  Exit status: 0; 1 if a row raised or took too long, which stops no other row.  On the CPU the sizes
are small: that tests this file alone.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import mgpu_core
from mgpu_core import _core, kernels
from mgpu_core.tools.advise.device_time import DeviceTime
from mgpu_core.tools.advise.host_share import measured_share
from mgpu_core.tools.advise.plan import plan_of
from mgpu_core.tools.bench.fsdp import ShardsTask
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
        """Return the median milliseconds of the GPU's work, which begins when the host has asked for all of it."""
        if not self.is_gpu:
            return self.wall_ms({"one": work}, rounds=3)["one"]
        work()
        seconds = DeviceTime(work)
        return statistics.median(seconds() for _ in range(repeats)) * 1e3

    def host_ms(self, contestants: dict[str, Work], rounds: int = 5) -> dict[str, float]:
        """Return the median milliseconds until a call of each contestant returns; the device has nothing else to do."""
        taken: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(rounds):
            for name, work in contestants.items():
                self.wait()
                begin = time.perf_counter()
                work()
                taken[name].append((time.perf_counter() - begin) * 1e3)
        self.wait()
        return {name: statistics.median(each) for name, each in taken.items()}

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

    def distributed(self) -> Work:
        """Return the bare step of a DistributedDataParallel of one process."""
        backend = "nccl" if self._bench.is_gpu else "gloo"
        store = distributed.HashStore()  # type: ignore[attr-defined]
        distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        ids = [self._bench.device.index] if self._bench.is_gpu else None
        return self.bare(wrap=lambda net: DistributedDataParallel(net, ids, gradient_as_bucket_view=True))

    def ours(
        self, ranks: int, *, capture: bool = False, workers: str = "auto", static_graph: bool = False, warm_up: int = 12
    ) -> Work:
        """Return a TrainStep with our AdamW, of ranks that share the device."""
        net = self._make()
        optimizer = mgpu_core.optim.AdamW(net.parameters(), lr=1e-4)
        step = mgpu_core.TrainStep(
            net, functional.cross_entropy, optimizer, [str(self._bench.device)] * ranks,
            amp_dtype=self._amp_dtype, capture=capture, workers=workers, static_graph=static_graph,
        )  # fmt: skip
        for _ in range(warm_up):
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
        ms = self._bench.wall_ms(_made(name, ways), rounds=5, turns=turns)
        ratios = {
            f"{ours}_to_{theirs}": ms[ours] / ms[theirs]
            for ours, theirs in (("ours_1", "bare"), ("ours_1_capture", "bare_graph"))
            if {ours, theirs} <= ms.keys()
        }
        self._bench.tell(f"step of {name}, ms", **ms, **ratios)

    def measure_host(self, name: str) -> None:
        """Print the milliseconds after which a call of a step returns."""
        ways: dict[str, Callable[[], Work]] = {
            "bare": self.bare,
            "ddp": self.distributed,
            "ours_1": lambda: self.ours(1),
            "ours_1_static": lambda: self.ours(1, static_graph=True),
        }
        many = [ranks for ranks in (2, 4, 8) if ranks <= self._bench.size(8, 2)]
        ways[f"ours_{many[-1]}_static"] = partial(self.ours, many[-1], workers="threads", static_graph=True, warm_up=4)
        for ranks in many:
            for workers in ("threads", "caller"):
                ways[f"ours_{ranks}_{workers}"] = partial(self.ours, ranks, workers=workers, warm_up=4)
        contestants = _made(name, ways)
        for work in contestants.values():
            work()
        self._bench.tell(f"host of a step of {name}, ms", **self._bench.host_ms(contestants))


def _made(name: str, ways: dict[str, Callable[[], Work]]) -> dict[str, Work]:
    """Return the steps, without those that fail."""
    contestants = {}
    for who, make in ways.items():
        try:
            contestants[who] = make()
        except Exception as error:
            print(f"figure: {name} without {who}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    return contestants


class Half(nn.Module):
    """A net under autocast to bfloat16, with its output in float32."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            output: torch.Tensor = self.net(x).float()
        return output


class Gpt(nn.Module):
    """A GPT; of twelve blocks of width 768 it has the size of GPT-2 small."""

    def __init__(self, words: int, blocks: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        block = nn.TransformerEncoderLayer(width, 12, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, blocks, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits with the words in dimension 1, as cross_entropy takes them."""
        hidden = self.blocks(self.words(ids), nn.Transformer.generate_square_subsequent_mask(ids.size(1), ids.device))
        logits: torch.Tensor = self.head(hidden).mT
        return logits


def _busy_gpus(bench: Bench, name: str, net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """Print how many GPUs one process keeps busy with such a batch each, as `mgpu advise` does."""
    if bench.is_gpu:
        share = measured_share(plan_of(Half(net), functional.cross_entropy, (x, y), device_ids=[str(bench.device)]))
        bench.tell(
            f"one process, {name}, {share.rows} rows a GPU", forward_ms=share.forward_s * 1e3,
            backward_ms=share.backward_s * 1e3, device_ms=share.device_s * 1e3, gpus=share.gpus,
        )  # fmt: skip


def _resnet50(bench: Bench) -> tuple[Callable[[], nn.Module], torch.Tensor, torch.Tensor]:
    """Return what makes the net in channels-last memory, and 64 images with their labels."""
    from torchvision.models import resnet50

    def make() -> nn.Module:
        net: nn.Module = resnet50().to(bench.device, memory_format=torch.channels_last)
        return net

    x = torch.randn(64, 3, 224, 224, device=bench.device).contiguous(memory_format=torch.channels_last)
    return make, x, torch.randint(1000, (64,), device=bench.device)


def push_between_streams(bench: Bench) -> None:
    """Microseconds of small all-reduces between streams of one GPU, by push and by direct, until all are done."""
    for ranks in (2, 4):
        streams = [torch.cuda.Stream(bench.device) for _ in range(ranks)] if bench.is_gpu else []
        handles = [_core.Stream("cuda", bench.device.index, stream.cuda_stream) for stream in streams]
        handles = handles or [_core.Stream("cpu", 0, 0)] * ranks  # a dry run has no push
        nbytes = _core.push_memory_nbytes(ranks)
        memory = [torch.zeros(nbytes, dtype=torch.uint8, device=bench.device) for _ in range(ranks)]
        bench.wait()
        team = _core.PushTeam([tensor.data_ptr() for tensor in memory], handles) if streams else None
        for size in (4 << 10, 64 << 10, 256 << 10):
            parts = [torch.ones(size // 4, device=bench.device) for _ in range(ranks)]
            pointers = [part.data_ptr() for part in parts]
            call = pointers, pointers, size // 4, "float32", "max"
            ways: dict[str, Work] = {"direct": partial(_core.all_reduce, *call, "direct", handles, False)}
            if team is not None:
                ways["push"] = partial(team.all_reduce, *call, handles, 10.0)
            for kind, ms in (("us", bench.wall_ms(ways, turns=200)), ("host_us", bench.host_ms(ways, rounds=50))):
                figures = {way: taken * 1e3 for way, taken in ms.items()}
                bench.tell(f"all-reduce of {size >> 10} KiB, {ranks} streams, {kind}", **figures)


def host_of_resnet50(bench: Bench) -> None:
    """Two images a rank; then 64 images."""
    if not bench.is_gpu:
        return
    make, x, y = _resnet50(bench)
    Steps(bench, make, x[:16], y[:16], torch.bfloat16).measure_host("ResNet-50, bf16")
    _busy_gpus(bench, "ResNet-50, bf16", make(), x, y)


def host_of_gpt(bench: Bench) -> None:
    """Two rows of 16 tokens a rank; then eight of 1,024."""
    words, length = bench.size(50_257, 100), bench.size(1024, 16)
    ids, target = torch.randint(words, (2, 16, length), device=bench.device)

    def make() -> nn.Module:
        return Gpt(words, bench.size(12, 1), bench.size(768, 48)).to(bench.device)

    Steps(bench, make, ids[:, :16], target[:, :16], torch.bfloat16).measure_host("GPT of 12 blocks, bf16")
    _busy_gpus(bench, "GPT of 12 blocks, bf16", make(), ids[:8], target[:8])


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
    make, x, y = _resnet50(bench)
    Steps(bench, make, x, y, torch.bfloat16).measure("ResNet-50, bf16", turns=5)


def step_in_shards(bench: Bench) -> None:
    """Parameters in shards, beside copies: 64 and 512 rows of eight blocks of width 512, two ranks."""
    for rows in (64, 512):
        task = ShardsTask(bench.device.type, 2, bench.size(8, 2), bench.size(512, 16), rows)
        ways: dict[str, Work] = {}
        for name, shard in (("shards", "parameters"), ("copies", None)):
            net = task.network()
            optimizer = mgpu_core.optim.SGD(net.parameters(), lr=1e-3)
            step = mgpu_core.TrainStep(
                net, functional.cross_entropy, optimizer, [str(bench.device)] * task.ranks, shard=shard
            )
            ways[name] = partial(step, *task.rows(0))
        ms = bench.wall_ms(ways, rounds=5, turns=bench.size(20, 1))
        bench.tell(f"step in shards, {rows} rows, ms", **ms, shards_to_copies=ms["shards"] / ms["copies"])


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
    step_in_shards, push_between_streams, host_of_resnet50, host_of_gpt, requests, loader,
)  # fmt: skip
LONGEST = 60.0
"""Seconds of a row."""


def _in_child(row: Callable[[Bench], None], device: str, figures: Connection) -> None:
    """Measure a row, and send its figures, also those before an error."""
    bench = Bench(device)
    if not bench.is_gpu:
        torch.set_num_threads(1)  # a dry run, beside other work: threads of torch would wait for each other
    try:
        row(bench)
    finally:
        figures.send(bench.found)


def measured(row: Callable[[Bench], None], device: str) -> tuple[dict[str, dict[str, float]], bool]:
    """Return the figures of a row in a process of its own, and whether it has ended well.

    The process is forked, so that it need not import torch again; this one has used no GPU.
    """
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=_in_child, args=(row, device, sender))
    child.start()
    sender.close()
    found: dict[str, dict[str, float]] = {}
    try:
        if receiver.poll(LONGEST):
            found = receiver.recv()
    except EOFError:  # it has died
        pass
    child.join(5)
    if child.is_alive():
        child.kill()
        child.join()
    return found, child.exitcode == 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and measures; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no row is begun")
    options = parser.parse_args(arguments)
    found: dict[str, dict[str, float]] = {}
    failed, end = [], time.monotonic() + options.seconds
    for row in ROWS:
        if time.monotonic() > end:
            print(f"figure: not measured, because no time was left: {row.__name__}", flush=True)
            continue
        figures, ended_well = measured(row, options.device)
        found |= figures
        if not ended_well:
            failed.append(row.__name__)
        options.out.write_text(json.dumps(found, indent=1))
    print(f"measure: {len(found)} rows; failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
