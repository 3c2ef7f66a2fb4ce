"""Ballots come through a sum over processes in every dtype, bit by bit."""

import math

import pytest
import torch

from mgpu_core.processes.ballot import Ballot, Standing, read, tail_count, write

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_of_all_messages_holds_all_ballots(dtype, processes):
    weights = [1 / 3, 1e300, 12345678901.0, 0.0, 5e-324, 257.0, 65505.0, 1.0][:processes]
    total = torch.zeros(tail_count(processes, 3), dtype=dtype)
    for process, weight in enumerate(weights):
        tail = torch.full_like(total, float("nan"))  # whatever was there before
        standing = Standing(process % 3)
        ballot = Ballot(standing, 2**32 + 70000 + process, 2**32 - 1 - process, weight, [process == 0, False, True])
        write(tail, ballot, process, processes)
        total += tail
    tally = read(total, processes)
    assert tally.standings == tuple(Standing(process % 3) for process in range(processes))
    assert tally.updates == tuple(70000 + process for process in range(processes))
    assert tally.settings == tuple(2**32 - 1 - process for process in range(processes))
    assert tally.weight == sum(weights)
    assert tally.used == [True, False, True]


def test_a_weight_that_is_no_number_is_not_lost():
    tail = torch.zeros(tail_count(1, 0))
    write(tail, Ballot(Standing.TRAINS, 0, 0, math.nan, []), 0, 1)
    assert math.isnan(read(tail, 1).weight)
