"""The PTX machine itself: it must name each fault of a kernel, and find none in kernels that are right."""

import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from fakes import ptx

pytestmark = [pytest.mark.fakes, pytest.mark.timeout(300)]  # the first run compiles the machine
THREADS = 64
SEEDS = [0, 7, 8]

# Kernel, blocks, and the beginnings of the faults of which the machine names at least one, and no other first.
FAULTY = {
    "load_out_of_bounds": (1, "load outside of memory"),
    "store_out_of_bounds": (1, "store outside of memory"),
    "misaligned_vector": (1, "misaligned address"),
    "misaligned_scalar": (1, "misaligned address"),
    "uninitialized": (1, "load of memory that was never written"),
    "divides_by_zero": (1, "division by zero"),
    "writes_race": (1, "race of two writes"),
    "warps_race": (1, "race of two writes"),
    "blocks_race": (2, "race of two writes"),
    "reads_a_neighbour": (1, "race of a"),
    "reads_another_block": (2, "race of a"),
    "hand_over_too_early": (2, "race of a read with a write"),
    "taken_too_early": (2, "race of a read with a write"),
    "shared_race": (1, ("race of a", "shared memory read before it is written")),
    "shared_race_in_a_loop": (1, "race of a"),
    "shared_uninitialized": (1, "shared memory read before it is written"),
    "shared_out_of_bounds": (1, "access outside of shared memory"),
    "divergent_barrier": (1, "barrier that threads reach at different instructions"),
    "barrier_after_return": (1, "barrier"),
    "incomplete_shuffle": (1, "shuffle"),
}
RIGHT = {
    "right": 2,
    "right_shared": 1,
    "right_shuffle": 1,
    "right_half_shuffle": 1,
    "right_hand_over": 2,
    "blocks_race": 1,
}


@cache
def text():
    if reason := ptx.what_is_missing():
        pytest.skip(reason)
    return ptx.compile_ptx(Path(__file__).with_name("faulty_kernels.cu"), 75)


def run(kernel, blocks, seed):
    machine = ptx.Machine(text())
    a, b = aligned(), aligned()
    machine.add_memory(a, "a", initialized=kernel != "uninitialized")
    machine.add_memory(b, "b")
    second = {"divides_by_zero": np.int32(3), "shared_out_of_bounds": np.int32(1), "right": np.int32(THREADS)}
    arguments = [a, second.get(kernel, b)][: len(machine.parameters(kernel))]
    return machine.launch(kernel, blocks, THREADS, arguments, seed=seed), a


def aligned():
    """64 zeros on a multiple of 16 bytes."""
    whole = np.zeros(THREADS + 4, np.int32)
    skipped = -whole.ctypes.data % 16 // 4
    return whole[skipped : skipped + THREADS]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kernel", FAULTY)
def test_a_fault_is_named_with_its_line(kernel, seed):
    blocks, named = FAULTY[kernel]
    faults, _ = run(kernel, blocks, seed)
    assert faults[0].startswith(named)
    assert re.search(r"faulty_kernels\.cu:\d+|sm_30_intrinsics\.hpp:\d+", faults[0])  # the latter has shuffles


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kernel", RIGHT)
def test_right_kernels_have_no_fault(kernel, seed):
    faults, _ = run(kernel, RIGHT[kernel], seed)
    assert faults == []


def test_kernels_compute():
    def values(kernel):
        return run(kernel, 1, 0)[1]

    assert values("right").view(np.float32).tolist() == [1.0] * THREADS
    assert values("right_shared").tolist() == list(reversed(range(THREADS)))
    assert values("right_shuffle")[[0, 32]].tolist() == [sum(range(32)), sum(range(32, 64))]
    assert values("right_half_shuffle")[:17].tolist() == [*range(1, 16), 15, 16]


def test_what_does_not_fit_is_an_error():
    machine = ptx.Machine(text())
    with pytest.raises(RuntimeError, match="no kernel absent"):
        machine.launch("absent", 1, 1, [])
    with pytest.raises(RuntimeError, match="right: 2 parameters, but 1 arguments"):
        machine.launch("right", 1, 1, [np.uint64(0)])
    with pytest.raises(RuntimeError, match="right: parameter 1 has 4 bytes, its argument 8"):
        machine.launch("right", 1, 1, [np.uint64(0), np.uint64(0)])
    with pytest.raises(RuntimeError, match="right: an invalid grid of 0 x 64"):
        machine.launch("right", 0, 64, [np.uint64(0), np.int32(0)])
    with pytest.raises(RuntimeError, match=r"PTX line \d+: unknown instruction frobnicate\.u32"):
        ptx.Machine(text().replace("mov.u32", "frobnicate.u32", 1))
