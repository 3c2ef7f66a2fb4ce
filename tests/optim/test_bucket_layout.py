"""The layout of flat buckets: integers in, integers out."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mgpu_core
from mgpu_core.optim.bucket_layout import ALIGN_NBYTES, Bucket, Segment, bucket_layout, shard_of
from mgpu_core.optim.flat_buffers import in_memory_order, padding_of

tensors = st.lists(st.tuples(st.integers(0, 5000), st.sampled_from([2, 4, 8])), min_size=1, max_size=30)


@given(tensors, st.integers(1, 100_000), st.randoms(use_true_random=False))
def test_every_parameter_lies_once_aligned_and_apart(tensors, limit, random):
    counts, sizes = [count for count, _ in tensors], [size for _, size in tensors]
    order = list(range(len(tensors)))
    random.shuffle(order)
    buckets = bucket_layout(counts, sizes, sizes, order, limit)
    assert sorted(each.parameter for bucket in buckets for each in bucket.segments) == sorted(order)
    for bucket in buckets:
        kinds = {sizes[each.parameter] for each in bucket.segments}
        assert len(kinds) == 1
        (size,) = kinds
        end = 0
        for each in bucket.segments:
            assert each.begin >= end
            assert each.begin * size % ALIGN_NBYTES == 0
            assert each.count == counts[each.parameter]
            end = each.begin + each.count
        assert bucket.count >= end
        nbytes = sum(each.count for each in bucket.segments) * size
        assert nbytes <= limit or len([each for each in bucket.segments if each.count]) <= 1


def test_order_is_kept():
    (bucket,) = bucket_layout([3, 200, 5], [4, 4, 4], [0, 0, 0], [2, 0, 1], 10_000)
    assert [(each.parameter, each.begin, each.count) for each in bucket.segments] == [
        (2, 0, 5),
        (0, 128, 3),
        (1, 256, 200),
    ]
    assert bucket.count == 256 + 256


def test_a_limit_of_nothing_is_refused():
    with pytest.raises(ValueError, match="positive"):
        bucket_layout([1], [4], [0], [0], 0)


@given(tensors, st.integers(1, 100_000), st.integers(1, 9))
def test_shards_are_equal_aligned_and_hold_every_element_once(tensors, limit, shards):
    counts, sizes = [count for count, _ in tensors], [size for _, size in tensors]
    held = {i: [] for i in range(len(tensors))}
    for bucket in bucket_layout(counts, sizes, sizes, list(held), limit, shards):
        size = sizes[bucket.segments[0].parameter]
        assert bucket.count % shards == 0
        assert bucket.count // shards * size % ALIGN_NBYTES == 0
        begins = {each.parameter: each.begin for each in bucket.segments}
        for index in range(shards):
            shard = shard_of(bucket, index, shards)
            assert shard.count == bucket.count // shards
            end = 0
            for each in shard.segments:
                assert each.begin >= end
                assert not each.count or begins[each.parameter] + each.offset == index * shard.count + each.begin
                held[each.parameter] += range(each.offset, each.offset + each.count)
                end = each.begin + each.count
            assert end <= shard.count
    assert held == {i: list(range(count)) for i, count in enumerate(counts)}


def test_padding_is_what_lies_between_the_segments():
    buckets = bucket_layout([3, 130, 1], [4] * 3, [0] * 3, [2, 0, 1], 1 << 20, shards=2)
    (bucket,) = buckets
    taken = {index for each in bucket.segments for index in range(each.begin, each.begin + each.count)}
    assert padding_of(bucket, torch.device("cpu")).tolist() == sorted(set(range(bucket.count)) - taken)
    for index in range(2):
        shard = shard_of(bucket, index, 2)
        taken = {at for each in shard.segments for at in range(each.begin, each.begin + each.count)}
        assert padding_of(shard, torch.device("cpu")).tolist() == sorted(set(range(shard.count)) - taken)
    assert padding_of(Bucket(4, ()), torch.device("cpu")).tolist() == [0, 1, 2, 3]
    assert padding_of(Bucket(4, (Segment(0, 0, 4),)), torch.device("cpu")).tolist() == []


def test_elements_are_in_the_order_of_the_parameters_memory():
    like = torch.empty(3, 2).t()
    other = torch.arange(6.0).reshape(2, 3)
    assert in_memory_order(other, like).tolist() == [0, 3, 1, 4, 2, 5]
    same = torch.arange(6.0).reshape(3, 2).t()
    assert in_memory_order(same, like).data_ptr() == same.data_ptr()
    assert in_memory_order(same, like).tolist() == [0, 1, 2, 3, 4, 5]


def test_an_algorithm_for_a_single_device_is_warned_of():
    net = torch.nn.Linear(2, 1)
    with pytest.warns(UserWarning, match='algorithm="ring" has no effect: all ranks are on cpu'):
        mgpu_core.TrainStep(
            net, torch.nn.functional.mse_loss, torch.optim.SGD(net.parameters()), ["cpu"] * 2, algorithm="ring"
        )
