"""A recorded step in few numbers: hand-made spans, and what is counted once, shared, or the host's."""

import pytest

from mgpu_core.tools.explain.predict import predict_step
from mgpu_core.tools.explain.profiles import profile_of
from mgpu_core.tools.explain.steps import Step
from mgpu_core.tools.explain.topology import Link, Topology
from mgpu_core.trace.events import ALL_RANKS, NO_BUCKET, Collective, Cut, Mark, Span

FREE = Topology("free", Link(0.0, 1e30))  # a byte costs so little that it is gone beside a second
S = 10**9


def span(step, rank, begin, end, thread=1, device=""):
    return Span(step, rank, NO_BUCKET, device, begin * S, end * S, begin * S, end * S, thread)


def mark(step, rank, at, thread, run="1"):
    return Mark(step, rank, 0, run, at * S, at * S, thread)


def call(operation, nbytes, begin, end, host_end, thread=1):
    ranks = tuple(range(len(nbytes)))
    devices = ("cpu",) * len(nbytes)
    times = {"cpu": (begin * S, end * S)}
    return Collective(operation, "direct", ranks, nbytes, devices, (), times, begin * S, host_end * S, thread)


def cut(step, count, ranks, device="cpu"):
    devices = (device,) * ranks
    return Cut(step, "x", 0, (count,) * ranks, (), "f", (4 * count,) * ranks, "copy", device, devices, 0, 1)


def engine():
    """Two ranks; of 0 to 100, none of 2, 12, 80, 97 and 99 is anyone's: 2 + 2 + 1 + 2 + 1 of the host."""
    return [
        span("train_step", ALL_RANKS, 0, 100),
        span("scatter", ALL_RANKS, 2, 12),
        cut("scatter", 4, 2),
        span("apply", ALL_RANKS, 13, 80),
        *(span("forward", rank, 14 + rank, 30, 2 + rank, "cpu") for rank in range(2)),
        *(span("loss", rank, 30, 31, 2 + rank, "cpu") for rank in range(2)),
        *(span("backward", rank, 31, 70 + 10 * rank, 2 + rank, "cpu") for rank in range(2)),
        span("all_reduce", ALL_RANKS, 60, 82, 2),
        call("reduce", (8, 8), 61, 84, 63, 2),  # the device is later than the host
        span("l2_norm", ALL_RANKS, 85, 90),
        span("update", ALL_RANKS, 90, 97, 1, "cpu"),
        span("sgd", ALL_RANKS, 91, 96),
    ]


def test_the_host_has_what_no_part_of_a_prediction_has():
    # modelled: 2 to 12, 14 to 84 (sums beside backward count once), 85 to 97
    found = profile_of(Step(0, "train_step", engine()), "net")
    assert found.host_overhead_seconds == 100 - 10 - 70 - 12
    assert found.update_seconds == 12
    assert (found.forward_seconds, found.backward_seconds) == (15.5 + 1, 44)
    assert found.broadcast_nbytes == 0


def test_the_parts_of_a_step_are_no_longer_than_it():
    found = profile_of(Step(0, "train_step", engine()), "net")
    assert predict_step(found, 2, FREE).step_s == 16.5 + 44 + 12 + 8


def drop_in(threads):
    """Scatter, replicate, forward, gather; then backwards 50 to 80 and 52 to 90 by marks, in these threads."""
    return [
        span("data_parallel", ALL_RANKS, 0, 45),
        span("scatter", ALL_RANKS, 0, 5),
        cut("scatter", 4, 2),
        span("replicate", ALL_RANKS, 5, 20),
        call("broadcast", (0, 300), 6, 10, 11),
        call("broadcast", (0, 20), 12, 14, 15),
        *(span("forward", rank, 20, 40, 4 + rank, "cpu") for rank in range(2)),
        call("broadcast", (0, 7000), 21, 22, 22, 4),  # a wrapper inside a rank
        span("gather", ALL_RANKS, 40, 45),
        cut("gather", 4, 2),
        *(mark("backward", rank, 50 + 2 * rank, threads[rank]) for rank in range(2)),
        *(mark("ready", rank, 80 + 10 * rank, threads[rank]) for rank in range(2)),
        span("reduce", ALL_RANKS, 90, 98),
        call("reduce", (320, 320), 91, 99, 92),
    ]


def test_the_drop_ins_broadcasts_and_movements_are_not_the_hosts():
    found = profile_of(Step(0, "data_parallel", drop_in([1, 1])), "net")
    assert found.broadcast_nbytes == 320
    assert found.host_overhead_seconds == 5  # 45 to 50
    assert (found.scatter_nbytes, found.gather_nbytes) == (32, 32)


@pytest.mark.parametrize(("threads", "seconds"), [([1, 1], 20), ([1, 2], 34)])
def test_ranks_whose_backward_one_thread_runs_share_its_time(threads, seconds):
    found = profile_of(Step(0, "data_parallel", drop_in(threads)), "net")
    assert found.backward_seconds == seconds


def test_runs_of_a_shared_thread_add_up():
    again = [
        *(mark("backward", rank, 110, 1, "2") for rank in range(2)),
        *(mark("ready", rank, 120, 1, "2") for rank in range(2)),
    ]
    found = profile_of(Step(0, "data_parallel", [*drop_in([1, 1]), *again]), "net")
    assert found.backward_seconds == (40 + 10) / 2


@pytest.mark.parametrize(
    ("devices", "seconds"), [(["cpu"] * 4, 10), (["cuda:0", "cuda:1"] * 2, 20), (["cuda:0", "cuda:1"], 40)]
)
def test_one_backward_for_all_ranks_is_shared_by_those_of_a_device(devices, seconds):
    events = [
        *(span("forward", rank, 0, 10, 2 + rank, device) for rank, device in enumerate(devices)),
        cut("scatter", 4, len(devices)),
        span("backward", ALL_RANKS, 10, 50),
    ]
    found = profile_of(Step(0, "train_step", events), "net")
    assert found.backward_seconds == seconds


@pytest.mark.parametrize(
    ("devices", "seconds"),
    [
        (["cpu", "cpu"], (0, 0)),  # computes itself
        (["cuda:0", "cuda:1"], (6, 14)),  # forwards cover 11, losses 1 more; a thread a GPU for backwards
        (["cuda:0", "cuda:0"], (6, 7)),
    ],
)
def test_the_host_asks_for_forwards_in_turn_and_for_backwards_by_a_thread_a_gpu(devices, seconds):
    def late(step, rank, host_begin, host_end):
        """Return a span whose device is later than its host."""
        return Span(step, rank, NO_BUCKET, devices[rank], 20 * S, 90 * S, host_begin * S, host_end * S, 2 + rank)

    spans = [span("train_step", ALL_RANKS, 0, 100), cut("scatter", 4, 2)]
    for rank in range(2):
        spans += [late("forward", rank, rank, 10 + rank), late("loss", rank, 11, 12), late("backward", rank, 20, 34)]
    found = profile_of(Step(0, "train_step", spans), "net")
    assert (found.host_forward_seconds, found.host_backward_seconds) == seconds
