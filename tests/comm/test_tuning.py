"""What `auto` is on GPUs: measured with a clock of the test's own, kept, looked up; and the fixed table."""

import ctypes
import threading
from types import SimpleNamespace

import pytest
import torch

from mgpu_core._core import Stream
from mgpu_core.comm import algorithms, tuning
from mgpu_core.devices import cache, nccl_teams
from mgpu_core.devices.streams import HOST
from mgpu_core.errors import BackendUnavailable, Error, NcclError

STREAMS = [Stream("cuda", 0, 5), Stream("cuda", 1, 6)]
ALGORITHMS = ["direct", "ring", "naive", "nccl"]
KEPT = {4096: "push", 65536: "nccl", 2**18: "nccl", 2**20: "nccl", 2**24: "nccl"}
RUNS = 5 + 4 * (5 + 5 + 5 + 4 + 4)  # once each; each size by each, the larger ones not by push


class Machine:
    """Runs all-reduces that take as long as the test says, by its own clock."""

    def __init__(self, seconds):
        self.seconds = seconds  # (algorithm, nbytes) -> seconds, or an error
        self.now = 0.0
        self.runs = []

    def clock(self):
        return self.now

    def run(self, algorithm, nbytes):
        self.runs.append((algorithm, nbytes))
        answer = self.seconds(algorithm, nbytes)
        if isinstance(answer, Exception):
            raise answer
        self.now += answer


def slow_to_start(algorithm, nbytes):
    """Algorithms that differ in what they cost at all and in what each MB costs."""
    base, per_mb = {
        "direct": (1e-5, 9e-4),
        "push": (5e-6, 1e-3),
        "ring": (1e-4, 4e-4),
        "naive": (3e-5, 3e-3),
        "nccl": (5e-5, 2e-4),
    }[algorithm]
    return base + per_mb * nbytes / 1e6


def test_the_fastest_of_each_size():
    machine = Machine(slow_to_start)
    found = tuning.measure(machine.run, [*ALGORITHMS], [4096, 65536, 2**24], 1.0, machine.clock)
    assert found == {4096: "direct", 65536: "nccl", 2**24: "nccl"}
    assert machine.now < 1.1


def test_the_budget_ends_it():
    machine = Machine(lambda algorithm, nbytes: 0.125)  # half a second for each algorithm
    # not one size is complete
    assert tuning.measure(machine.run, [*ALGORITHMS], tuning.SIZES, 1.25, machine.clock) == {}
    assert machine.now == 1.5  # what had begun was ended
    assert tuning.measure(machine.run, [*ALGORITHMS], tuning.SIZES, 2.25, machine.clock) == {4096: "direct"}


def test_the_first_run_is_not_counted():
    started = set()

    def seconds(algorithm, nbytes):
        first = algorithm not in started
        started.add(algorithm)
        return 0.1 if first and algorithm == "nccl" else {"nccl": 0.001}.get(algorithm, 0.002)

    machine = Machine(seconds)
    assert tuning.measure(machine.run, [*ALGORITHMS], [4096], 9.0, machine.clock) == {4096: "nccl"}


def test_an_algorithm_that_fails_is_left_out():
    def seconds(algorithm, nbytes):
        return BackendUnavailable("no NCCL") if algorithm == "nccl" else slow_to_start(algorithm, nbytes)

    machine = Machine(seconds)
    found = tuning.measure(machine.run, [*ALGORITHMS], [4096, 2**24], 1.0, machine.clock)
    assert found == {4096: "direct", 2**24: "ring"}
    assert [algorithm for algorithm, _ in machine.runs].count("nccl") == 1


def test_what_failed_is_not_chosen_for_sizes_that_were_not_reached(machine):
    """NCCL hangs for small sizes alone, and is given up when the budget has long passed."""

    def seconds(algorithm, nbytes):
        if algorithm == "nccl" and nbytes == 4096:
            machine.now += tuning.PRACTICE_SECONDS
            return NcclError("made no progress for 30 s")
        return 1e-3

    machine.seconds = seconds
    assert tuning.choose([0, 1], 2**24, machine.run) == "direct"


def test_threads_measure_one_after_the_other(machine):
    """The second one takes what the first one has found."""
    chosen, second_runs = [], threading.Event()
    second = threading.Thread(target=lambda: chosen.append(tuning.choose([0, 1], 100, run_of_second)))

    def run_of_second(algorithm, nbytes):
        second_runs.set()
        machine.run(algorithm, nbytes)

    def run(algorithm, nbytes):
        if not machine.runs:
            second.start()
            assert not second_runs.wait(0.1)
        machine.run(algorithm, nbytes)

    chosen.append(tuning.choose([0, 1], 100, run))
    second.join(10)
    assert chosen == ["push", "push"]


def test_lookup_takes_the_next_larger_size():
    table = {4096: "direct", 65536: "naive", 2**24: "ring"}
    sizes = [0, 4096, 4097, 65536, 65537, 2**24, 2**30]
    found = [tuning.lookup(table, nbytes) for nbytes in sizes]
    assert found == ["direct", "direct", "naive", "naive", "ring", "ring", "ring"]


def test_the_fixed_table():
    assert [tuning.fixed_choice(nbytes, nccl=True) for nbytes in (0, 2**20, 2**20 + 1)] == ["direct", "direct", "nccl"]
    assert tuning.fixed_choice(2**30, nccl=False) == "direct"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Two GPUs that there are not, a clock of our own and a cache of our own."""
    machine = Machine(slow_to_start)
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    cache.forget()
    monkeypatch.setattr(tuning, "_tables", {})
    monkeypatch.setattr(tuning, "machine_key", lambda devices: {"gpus": [f"GPU-{device}" for device in devices]})
    monkeypatch.setattr(tuning, "nccl_is_there", lambda: True)
    monkeypatch.setattr(tuning.time, "perf_counter", machine.clock)
    yield machine
    cache.forget()


def test_it_is_measured_once_and_kept(machine, monkeypatch):
    assert tuning.choose([0, 1], 100, machine.run) == "push"
    runs = len(machine.runs)
    assert runs == RUNS
    assert tuning.choose([0, 1], 2**24, machine.run) == "nccl"
    assert len(machine.runs) == runs
    monkeypatch.setattr(tuning, "_tables", {})  # another process
    cache.forget()
    assert tuning.choose([0, 1], 2**24, machine.run) == "nccl"
    assert len(machine.runs) == runs
    assert tuning.kept_table([0, 1]) == KEPT
    assert tuning.kept_table([1, 0]) is None
    tuning.choose([0, 0, 1], 2**24, machine.run)  # another team is another table
    assert len(machine.runs) == 2 * runs


def test_one_device_is_not_measured(machine):
    assert tuning.choose([1, 1, 1], 2**24, machine.run) == "direct"
    assert machine.runs == []


def test_while_a_graph_is_captured_nothing_is_measured_and_some_are_refused(machine, monkeypatch):
    ran = []
    monkeypatch.setattr("mgpu_core.comm.algorithms._is_captured", lambda stream: True)
    monkeypatch.setattr(algorithms._core, "all_reduce", lambda *arguments: ran.append(arguments[5]) or arguments[5])
    monkeypatch.setattr(tuning, "_tables", {(0, 1): {4096: "nccl"}})  # also where it is known
    call = algorithms.AllReduceAlgorithm([64, 128], STREAMS, 7, "float32", 28, "sum", True)
    assert [call.run(algorithm) for algorithm in ("auto", "ring")] == ["direct", "ring"]
    assert ran == ["direct", "ring"]
    assert machine.runs == []
    for algorithm in ("nccl", "push"):
        with pytest.raises(BackendUnavailable, match=f"{algorithm} cannot be captured"):
            call.run(algorithm)


def test_what_runs_for_the_first_time_is_not_on_the_clock(machine):
    started = set()

    def seconds(algorithm, nbytes):
        if algorithm not in started:
            started.add(algorithm)
            return 3.0  # communicators are made
        return slow_to_start(algorithm, nbytes)

    machine.seconds = seconds
    assert tuning.choose([0, 1], 2**24, machine.run) == "nccl"
    assert tuning.kept_table([0, 1]) == KEPT


def test_a_guess_is_not_kept(machine):
    machine.seconds = lambda algorithm, nbytes: 0.03 if nbytes < 2**20 else 5.0
    assert tuning.choose([0, 1], 2**24, machine.run) == "nccl"
    assert tuning.kept_table([0, 1]) is None


@pytest.mark.parametrize("content", ["", "{", '{"format": "mgpu_core cache 1", "key": {}, "value": 7}'])
def test_a_corrupt_cache_means_measuring(machine, content):
    tuning.choose([0, 1], 1, machine.run)
    (path,) = cache.cache_folder().iterdir()
    path.write_text(content)
    cache.forget()
    tuning._tables.clear()
    runs = len(machine.runs)
    assert tuning.choose([0, 1], 2**24, machine.run) == "nccl"
    assert len(machine.runs) == 2 * runs


def test_on_gpus_auto_is_what_was_chosen_and_nccl_goes_to_its_team(monkeypatch):
    asked = []

    class Team:
        def all_reduce(self, *arguments):
            asked.append(arguments)

    monkeypatch.setattr("mgpu_core.comm.algorithms._is_captured", lambda stream: False)
    monkeypatch.setattr(tuning, "choose", lambda devices, nbytes, run: {((0, 1), 28): "nccl"}[tuple(devices), nbytes])
    monkeypatch.setattr(algorithms, "with_nccl", lambda devices, call: (asked.append(devices), call(Team())))
    call = algorithms.AllReduceAlgorithm([64, 128], STREAMS, 7, "float32", 28, "sum", True)
    assert call.run("auto") == "nccl"
    assert asked == [[0, 1], ([64, 128], [64, 128], 7, "float32", "sum", STREAMS, True)]
    asked.clear()
    low = algorithms.AllReduceAlgorithm([64, 128], STREAMS, 7, "float32", 28, "min", True)
    monkeypatch.setattr(algorithms._core, "all_reduce", lambda *arguments: asked.append(arguments[5]) or arguments[5])
    assert low.run("auto") == "direct"  # NCCL would drop a NaN
    assert asked == ["direct"]
    monkeypatch.undo()
    with pytest.raises(Error):
        algorithms.AllReduceAlgorithm([64], [HOST], 7, "float32", 28, "sum", True).run("nccl")


def test_no_memory_for_a_practice_is_no_error_of_the_users(machine):
    def seconds(algorithm, nbytes):
        return torch.OutOfMemoryError("CUDA out of memory") if algorithm == "ring" else 0.001

    machine.seconds = seconds
    assert tuning.choose([0, 1], 2**24, machine.run) in ("direct", "naive", "nccl")
    assert "ring" not in tuning._tables[0, 1].values()


def fill(pointers, count, value):
    for pointer in pointers:
        if count == 16:  # a practice's; the others are no memory
            (ctypes.c_float * count).from_address(pointer)[:] = [value] * count


def gpus_in_host_memory(monkeypatch):
    ones = torch.ones
    monkeypatch.setattr(algorithms, "_is_captured", lambda stream: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(
        algorithms, "core_streams", lambda devices: [Stream("cuda", device.index, 9) for device in devices]
    )
    monkeypatch.setattr(algorithms.torch, "ones", lambda count, device: ones(count))


@pytest.mark.parametrize("fault", ["", "wrong", "aborted"])
def test_nccl_that_adds_wrongly_or_is_given_up_is_not_chosen(machine, monkeypatch, fault):
    gpus_in_host_memory(monkeypatch)
    monkeypatch.setattr(tuning, "SIZES", (64,))

    class Team:
        def all_reduce(self, pointers, out, count, *rest):
            fill(pointers, count, 2 + (fault == "wrong"))

        def wait(self, streams):
            if fault == "aborted":  # by the watchdog, which lets the streams go on
                raise NcclError("did not end within 30 s")

    def all_reduce(pointers, out, count, *rest):
        machine.now += 1e-3
        fill(pointers, count, 2)
        return rest[2]

    monkeypatch.setattr(algorithms, "with_nccl", lambda devices, call: call(Team()))
    monkeypatch.setattr(algorithms._core, "all_reduce", all_reduce)
    call = algorithms.AllReduceAlgorithm([64, 128], STREAMS, 7, "float32", 28, "sum", True)
    assert tuning.choose([0, 1], 64, call._like_this) == ("direct" if fault else "nccl")


def test_nccl_that_is_not_trusted_is_not_tried(machine, monkeypatch):
    cache.store("tuning", tuning._key([0, 1]), {"4096": "nccl"})  # from a process that could trust it
    monkeypatch.setattr(nccl_teams, "_trusted", False)
    assert tuning.choose([0, 1], 2**24, machine.run) == "ring"
    assert "nccl" not in {algorithm for algorithm, _ in machine.runs}


def test_auto_never_asks_nccl_for_what_it_refuses(monkeypatch):
    """Ranks that share a GPU, and must not be merged there; and what is measured, is measured as most calls are."""
    practised = []
    gpus_in_host_memory(monkeypatch)
    monkeypatch.setattr(algorithms, "with_nccl", lambda devices, call: practised.append("nccl"))
    monkeypatch.setattr(
        algorithms._core,
        "all_reduce",
        lambda pointers, *rest: practised.append(rest[-1]) or fill(pointers, rest[1], len(pointers)) or "direct",
    )

    def choose(devices, nbytes, run):
        run("ring", 64)
        return "nccl"

    monkeypatch.setattr(tuning, "choose", choose)
    streams = [*STREAMS, Stream("cuda", 0, 7)]
    for merges, wanted in ((False, "direct"), (True, "nccl")):
        call = algorithms.AllReduceAlgorithm([64, 128, 192], streams, 7, "float32", 28, "sum", merges)
        assert call.run("auto") == wanted
    assert practised == [True, False, True, "nccl"]
    apart = algorithms.AllReduceAlgorithm([64, 128], streams[:2], 7, "float32", 28, "sum", False)
    assert apart.run("auto") == "nccl"
