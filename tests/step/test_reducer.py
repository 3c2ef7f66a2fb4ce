"""Who is ready with what: the counting behind the buckets, in orders that threads seldom take."""

from mgpu_core.step.reducer import ReadyCounter


def test_a_bucket_is_complete_when_all_ranks_have_all_of_it():
    count = ReadyCounter([2, 1], ranks=2, buckets=2)
    assert not count.is_complete(0, 0)
    assert not count.is_complete(1, 0)
    assert not count.is_complete(0, 1)
    assert not count.is_complete(0, 0)
    assert count.is_complete(1, 1)
    assert count.is_complete(1, 0)
    assert count.left() == []


def test_what_is_not_complete_is_left():
    count = ReadyCounter([1, 1, 1], ranks=2, buckets=3)
    assert not count.is_complete(0, 0)
    assert not count.is_complete(0, 2)
    assert count.is_complete(1, 2)
    assert count.left() == [0, 1]


def test_a_gradient_that_comes_again_makes_the_sum_too_early():
    count = ReadyCounter([1], ranks=2, buckets=1)
    assert not count.is_complete(0, 0)
    assert count.is_complete(1, 0)
    assert not count.is_complete(0, 0), "a checkpoint came twice"
    assert count.left() == [0]
    count = ReadyCounter([1], ranks=2, buckets=1)
    assert not count.is_complete(0, 0)
    assert not count.is_complete(0, 0)
    assert not count.is_complete(1, 0)
    assert count.left() == [0]


def test_without_overlap_nothing_is_complete():
    count = ReadyCounter((), ranks=2, buckets=3)
    assert not count.is_complete(0, 0)
    assert count.left() == [0, 1, 2]
