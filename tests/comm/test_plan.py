"""Plans, by their properties: integers in, integers out."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_core import _core

counts = st.integers(0, 2**50)
ranks = st.integers(1, 64)


def check_cover(plan, count):
    begin = 0
    for chunk_begin, chunk_count in plan:
        assert chunk_begin == begin
        assert chunk_count >= 0
        begin += chunk_count
    assert begin == count


@given(counts, ranks)
def test_chunks_cover_all_rows_and_differ_by_at_most_one(count, ranks):
    plan = _core.chunk_plan(count, ranks)
    check_cover(plan, count)
    sizes = [size for _, size in plan]
    assert len(sizes) == ranks
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@given(counts, st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=16))
def test_shares_are_kept_within_one_row(count, shares):
    plan = _core.share_plan(count, shares)
    check_cover(plan, count)
    assert len(plan) == len(shares)
    if count >= len(shares):
        for (_, size), exact in zip(plan, exact_rows(count, shares), strict=True):
            assert size >= 1
            assert abs(size - exact) <= 1 + 1e-6 * count


def exact_rows(count, shares):
    """A rank whose share is less than a row gets one; the others share the rest."""
    few = set()
    while True:
        rest = count - len(few)
        whole = math.fsum(share for rank, share in enumerate(shares) if rank not in few)
        exact = [1 if rank in few else rest * (share / whole) for rank, share in enumerate(shares)]
        if min(exact) >= 1:
            return exact
        few |= {rank for rank, each in enumerate(exact) if each < 1}


def test_tiny_shares_are_taken_from_all():
    assert [size for _, size in _core.share_plan(20, [10.0, 10.0] + [0.001] * 8)] == [6, 6] + [1] * 8
    assert [size for _, size in _core.share_plan(12, [5.0, 5.0, 0.1, 0.1, 0.1, 0.1])] == [4, 4, 1, 1, 1, 1]


@given(st.integers(0, 5000), st.integers(1, 12))
def test_equal_shares_are_chunks(count, ranks):
    assert _core.share_plan(count, [0.7] * ranks) == _core.chunk_plan(count, ranks)


@given(st.integers(0, 20), st.integers(1, 20))
def test_ranks_with_rows_are_the_first_ones(count, ranks):
    sizes = [size for _, size in _core.share_plan(count, [float(1 + rank) for rank in range(ranks)])]
    assert all(sizes[: min(count, ranks)])
    assert not any(sizes[count:])


@pytest.mark.parametrize("shares", [[1, 0], [1, -1], [1, math.nan], [1, math.inf], [1e308, 1e308], []])
def test_bad_shares(shares):
    with pytest.raises(ValueError, match=r"share|ranks"):
        _core.share_plan(5, shares)


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 2)), max_size=40), st.integers(1, 150))
def test_buckets_are_neighbours_of_one_kind_up_to_the_limit(tensors, limit):
    nbytes, kinds = [size for size, _ in tensors], [kind for _, kind in tensors]
    plan = _core.bucket_plan(nbytes, kinds, limit)
    assert [i for bucket in plan for i in bucket] == list(range(len(tensors)))
    for bucket in plan:
        assert len({kinds[i] for i in bucket}) == 1
        assert sum(nbytes[i] for i in bucket) <= limit or len(bucket) == 1
    for one, other in itertools.pairwise(plan):  # no bucket could have taken the next tensor
        full = sum(nbytes[i] for i in one) + nbytes[other[0]] > limit
        assert full or kinds[one[-1]] != kinds[other[0]]


def run_schedule(schedule, ranks, chunks):
    """Return what each rank has of each chunk at the end, as the ranks whose parts were added, in order."""
    held = [[[rank] for _ in range(chunks)] for rank in range(ranks)]
    for hops in schedule:
        before = [[list(chunk) for chunk in rank] for rank in held]
        for source, target, chunk, reduce in hops:
            mine = held[target][chunk] if reduce else []
            held[target][chunk] = mine + before[source][chunk]
    return held


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 13])
def test_schedules_bring_every_part_to_every_rank_once(ranks):
    for schedule, chunks in ((_core.ring_schedule(ranks), ranks), (_core.tree_schedule(ranks), 1)):
        for rank in run_schedule(schedule, ranks, chunks):
            assert all(sorted(chunk) == list(range(ranks)) for chunk in rank)


@pytest.mark.several_ranks
def test_a_ring_moves_the_optimal_bytes(ranks):
    hops = [hop for round_ in _core.ring_schedule(ranks) for hop in round_]
    sent = [sum(source == rank for source, *_ in hops) for rank in range(ranks)]
    assert sent == [2 * (ranks - 1)] * ranks  # chunks of 1 / ranks each
