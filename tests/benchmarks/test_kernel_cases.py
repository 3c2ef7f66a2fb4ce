"""The kernels' cases: every contestant is right, none passes without having worked, and the clocks do what they say."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from benchmarks.run import main
from mgpu_core import kernels
from mgpu_core.tools.advise.device_time import LONGEST_SLEEP, DeviceTime
from mgpu_core.tools.bench import cases, kernel_case
from mgpu_core.tools.bench.device_clock import DeviceClock
from mgpu_core.tools.bench.kernel_case import Task, even_counts, small_counts

pytestmark = pytest.mark.slow

PIECES = ["pack", "unpack", "l2_norm", "sgd", "adamw"]
NAMES = [*PIECES, "sum_ranks", "scale_cast"]
CPU = torch.device("cpu")


def arguments(name: str, device: str) -> list[str]:
    """A tiny run of everything that the case has."""
    pieces = ["--tensors", "3"] if name in PIECES else []
    many = ["--many", "5"] if name in ("pack", "unpack") else []
    return [name, "--device", device, "--sizes", "1K,100", "--repeats", "2", *pieces, *many]


@pytest.mark.parametrize("name", NAMES)
def test_a_run_on_the_cpu(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments(name, "cpu"), "--json", str(tmp_path / "x.json")]) == 0
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    sizes = [1024, 100, *([4 * sum(small_counts(5))] if name in ("pack", "unpack") else [])]
    assert [row["labels"]["size"] for row in rows] == sizes
    assert {row["labels"]["clock"] for row in rows} == {"wall"}
    assert all(list(row["seconds"]) == ["ours", *cases.load(name).peers] for row in rows)
    assert "| copy " in capsys.readouterr().out


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", NAMES)
def test_a_run_on_a_gpu(name: str, tmp_path: Path) -> None:
    assert main([*arguments(name, "cuda"), "--json", str(tmp_path / "x.json")]) == 0
    labels = [row["labels"] for row in json.loads((tmp_path / "x.json").read_text())["rows"]]
    assert {each["device"] for each in labels} == {"cuda"}
    assert "device" in {each["clock"] for each in labels}


@pytest.mark.parametrize("name", NAMES)
def test_every_contestant_is_right_and_none_is_without_working(name: str) -> None:
    problem = cases.load(name).plan.args[0](Task(CPU, even_counts(4000, 3), "wall"))
    assert set(problem.sides) == {"ours", *cases.load(name).peers} - {"copy"}
    for salt, side in enumerate(problem.sides.values()):
        problem.reset(salt)
        assert problem.wrong() > 0
        problem.reset(salt)
        for _ in range(problem.turns):
            side()
        assert problem.wrong() == 0


@pytest.mark.parametrize("name", ["pack", "sum_ranks", "sgd"])
def test_twins_take_part_where_they_can(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mgpu_core.tools.bench.kernel_case.twins", lambda _device: {"cupy": kernels})
    problem = cases.load(name).plan.args[0](Task(CPU, even_counts(4000, 3), "wall"))
    problem.reset(1)
    for _ in range(problem.turns):
        problem.sides["cupy"]()
    assert problem.wrong() == 0
    assert "cupy" in cases.load(name).more_peers


def test_numba_packs_few_tensors() -> None:
    there = ["cat", "cupy", "numba"]
    assert kernel_case._peers_of(Task(CPU, [1] * 1000, "device"), there) == there
    assert kernel_case._peers_of(Task(CPU, [1] * 1001, "device"), there) == ["cat", "cupy"]


@pytest.mark.parametrize("name", NAMES)
def test_who_writes_nothing_ends_the_run(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    function = "FlatNorm.compute" if name == "l2_norm" else name
    monkeypatch.setattr(f"mgpu_core.kernels.{function}", lambda *_, **__: torch.zeros(()))
    assert main(arguments(name, "cpu")) == 1
    assert "run.py: error: device cpu, size 1 KiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["pack", "--device", "cpu", "--peers", "cupy"], "--peers: cupy needs a GPU and the package cupy"),
        (["sgd", "--device", "cpu", "--sizes", "1K", "--tensors", "65"], "1024 bytes are less than 16 for each of 65"),
        (["adamw", "--peers", "cupy"], "'cupy' is not one of"),
        (["sum_ranks", "--tensors", "3"], "unrecognized arguments"),
        (["unpack", "--device", "gpu"], "invalid choice"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_cannot_be_served_is_2(given: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: object = main(given)
    except SystemExit as end:
        status = end.code
    captured = capsys.readouterr()
    assert (status, captured.out) == (2, "")
    assert reason in captured.err


def test_without_a_gpu_cuda_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["pack", "--device", "cuda"]) == 2
    assert "--device cuda: torch sees no GPU" in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_every_bound_is_about_a_row_of_a_gpus_default_run(name: str) -> None:
    parser = argparse.ArgumentParser()
    case = cases.load(name)
    case.add_arguments(parser)
    tasks = kernel_case.tasks_of(torch.device("cuda", 0), parser.parse_args([]))
    for bound in case.bounds:
        assert [task for task in tasks if bound.where.items() <= task.labels.items()], bound
        assert bound.peer in case.peers
    assert len(case.bounds) == {"pack": 3, "adamw": 2}.get(name, 1)


def test_a_gpus_default_run() -> None:
    options = argparse.Namespace(sizes=None, tensors=64, many=10000)
    full, device, wall = kernel_case.tasks_of(torch.device("cuda", 0), options)
    assert full.labels == {"device": "cuda", "size": 256 << 20, "tensors": 64, "clock": "device"}
    assert device.labels == {"device": "cuda", "size": 332_767_232, "tensors": 10000, "clock": "device"}
    assert wall.labels == device.labels | {"clock": "wall"}


def test_counts() -> None:
    assert even_counts(4000, 3) == [332, 332, 336]
    assert even_counts(100, 1) == [25]
    assert sorted(small_counts(64)) == [256 * kib for kib in range(1, 65)]
    assert small_counts(3) == [256, 38 * 256, 11 * 256]


class FakeGpu:
    """Events of a GPU whose host is late in the first runs."""

    def __init__(self, late: int) -> None:
        self.late, self.slept, self.works = late, [], 0
        self.now = 0.0

    def event(self, enable_timing: bool) -> "FakeGpu.Event":
        assert enable_timing
        return FakeGpu.Event(self)

    class Event:
        def __init__(self, gpu: "FakeGpu") -> None:
            self.gpu, self.at = gpu, 0.0

        def record(self) -> None:
            self.gpu.now += 1.0
            self.at = self.gpu.now

        def query(self) -> bool:
            self.gpu.late -= 1
            return self.gpu.late >= 0

        def synchronize(self) -> None:
            assert self.at == self.gpu.now

        def elapsed_time(self, end: "FakeGpu.Event") -> float:
            return 1000 * (end.at - self.at)


@pytest.mark.parametrize(("late", "runs"), [(0, 1), (3, 4), (10**6, 10)])
def test_a_late_host_sleeps_longer_and_runs_again(late: int, runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(late)
    monkeypatch.setattr("torch.cuda.Event", gpu.event)
    monkeypatch.setattr("torch.cuda._sleep", gpu.slept.append)

    def work() -> None:
        gpu.works += 1
        gpu.now += 2.0

    queued = DeviceTime(work)
    assert queued() == 3.0
    assert gpu.works == len(gpu.slept) == runs
    assert gpu.slept == [int(min(1e-3 * 2**run, LONGEST_SLEEP) * 2e9) for run in range(runs)]
    gpu.late = 0
    queued()  # it remembers how long it had to sleep
    assert gpu.slept[-1] == gpu.slept[-2]


def test_who_waits_for_the_gpu_is_not_put_to_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its wait would be as long as any sleep, in every run."""
    gpu = FakeGpu(10**6)
    monkeypatch.setattr("torch.cuda.Event", gpu.event)
    monkeypatch.setattr("torch.cuda._sleep", gpu.slept.append)
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def work() -> None:
        slept = sum(gpu.slept)
        gpu.slept.clear()
        now[0] += 0.003 + slept / 2e9

    queued = DeviceTime(work)
    queued()
    assert now[0] < 0.1
    spent = now[0]
    queued()
    assert now[0] - spent == pytest.approx(0.003)


def test_a_host_whose_times_vary_is_not_taken_for_one_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """34 ms, then 54: seen on an H100."""
    gpu = FakeGpu(0)
    monkeypatch.setattr("torch.cuda.Event", gpu.event)
    monkeypatch.setattr("torch.cuda._sleep", gpu.slept.append)
    now, asked = [0.0], iter([0.034] * 5 + [0.054] * 3)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def work() -> None:
        took = next(asked)
        now[0] += took
        gpu.late = int(took > gpu.slept[-1] / 2e9)

    DeviceTime(work)()
    assert gpu.slept[-1] == pytest.approx(0.064 * 2e9)


def test_a_twin_that_does_not_run_here_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        @staticmethod
        def sum_ranks(*_: object, **__: object) -> None:
            raise AttributeError("numpy has no row_stack")

    monkeypatch.setattr("mgpu_core.tools.bench.kernel_case.twins", lambda _device: {"numba": Broken, "cupy": kernels})
    assert main(arguments("sum_ranks", "cpu")) == 0
    out, err = capsys.readouterr()
    assert "without numba: AttributeError: numpy has no row_stack" in err
    assert "| cupy " in out
    assert "x numba" not in err + out


def test_the_clock_of_a_cpu_is_the_wall() -> None:
    done: list[str] = []
    clock = DeviceClock(CPU)
    assert clock.run_of(lambda: done.append("work"), "device")() >= 0
    clock.flush()
    assert done == ["work"]
