"""What is refused because it shares memory, against all addresses written down."""

from itertools import combinations, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mgpu_core.devices.shared_memory import check_disjoint

SIZES, STRIDES = st.integers(1, 3), st.integers(0, 7)
VIEWS = st.tuples(st.integers(0, 12), SIZES, STRIDES, SIZES, STRIDES)


def addresses(view):
    start, rows, down, columns, along = view
    return {start + row * down + column * along for row in range(rows) for column in range(columns)}


def refuses(written, read):
    try:
        check_disjoint(written, "tensor {}".format, read)
    except ValueError:
        return True
    return False


@given(st.lists(VIEWS, min_size=2, max_size=4), st.integers(1, 4))
def test_memory_that_is_shared_is_found(views, written):
    memory = torch.zeros(60)
    tensors = [memory.as_strided((rows, columns), (down, along), start) for start, rows, down, columns, along in views]
    indices = [addresses(view) for view in views]
    elsewhere = [indices[i] for i in range(written, len(views)) if look(tensors[i]) not in map(look, tensors[:written])]
    pairs = [*combinations(indices[:written], 2), *product(indices[:written], elsewhere)]
    assert refuses(tensors[:written], tensors[written:]) == any(one & two for one, two in pairs)


def look(tensor):
    """Equal for what is read and written in place."""
    end = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.storage_offset(), end, () if tensor.is_contiguous() else tensor.stride()


@pytest.mark.parametrize("kind", [torch.complex64, torch.int16])
def test_bytes_count_and_not_elements(kind):
    memory = torch.zeros(64, dtype=torch.uint8)
    size = kind.itemsize
    wide = memory[: 4 * 2 * size].view(kind)[::2]  # every other element
    between = memory[size:][: 6 * size].view(kind)[::2] if size != 8 else memory[8:56].view(kind)[::2]
    assert not refuses([wide, between], [])
    narrow = memory[size - 1 :: 2 * size][:3]
    assert refuses([wide, narrow], [])


def test_neighbours_share_nothing():
    memory = torch.zeros(12)
    assert not refuses([memory[:4], memory[4:8], memory[8::2]], [])


def test_inputs_may_share_memory_with_each_other():
    memory = torch.zeros(9)
    assert not refuses([memory[:2], memory[2:4]], [memory[4:8], memory[5:9]])


def test_what_is_long_to_find_out_is_refused():
    memory = torch.zeros(4_000_000)
    assert refuses([memory.as_strided((1_000_000,), (3,), 0), memory.as_strided((500_000,), (5,), 1)], [])
    assert not refuses([memory[0::2], memory[1::2]], [])
