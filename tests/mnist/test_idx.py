"""The IDX reader takes whole files and nothing else, and says what was wrong with the others."""

import contextlib
import gzip
import io
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mgpu_core.mnist.idx import read_idx, read_idx_file

Build = Callable[..., bytes]


@given(dims=st.lists(st.integers(1, 5), min_size=1, max_size=4), first=st.integers(0, 255))
def test_reads_what_was_written(idx: Build, dims: list[int], first: int) -> None:
    values = bytes((first + index) % 256 for index in range(math.prod(dims)))
    came = read_idx(io.BytesIO(idx(values, *dims)), "file", len(dims))
    assert came.shape == tuple(dims)
    assert came.tensor().dtype == torch.uint8
    assert came.tensor().flatten().tolist() == list(values)


def test_every_truncation_is_refused(idx: Build) -> None:
    whole = idx(bytes(range(12)), 3, 2, 2)
    for length in range(len(whole)):
        with pytest.raises(ValueError, match=r"^name: wanted .* came"):
            read_idx(io.BytesIO(whole[:length]), "name", 3)


def test_one_byte_too_many_is_refused(idx: Build) -> None:
    with pytest.raises(ValueError, match="name: wanted 4 bytes of values for 2 x 2, more came"):
        read_idx(io.BytesIO(idx(b"12345", 2, 2)), "name", 2)


@pytest.mark.parametrize(
    "magic",
    [
        pytest.param(b"\0\0\x0d", id="float32"),
        pytest.param(b"\0\0\x09", id="int8"),
        pytest.param(b"\x1f\x8b\x08", id="gzip"),
        pytest.param(b"\0\1\x08", id="not zero"),
    ],
)
def test_another_kind_of_file_is_refused(idx: Build, magic: bytes) -> None:
    with pytest.raises(ValueError, match="begins with 00 00 08 01, came"):
        read_idx(io.BytesIO(idx(b"1234", 4, magic=magic)), "name", 1)


def test_another_number_of_dims_is_refused(idx: Build) -> None:
    with pytest.raises(ValueError, match="begins with 00 00 08 03, came 00 00 08 01"):
        read_idx(io.BytesIO(idx(b"1234", 4)), "name", 3)


def test_no_values_are_refused(idx: Build) -> None:
    with pytest.raises(ValueError, match="at least one value, the header says 0 x 28"):
        read_idx(io.BytesIO(idx(b"", 0, 28)), "name", 2)


def test_a_header_that_claims_everything_costs_nothing(idx: Build) -> None:
    huge = 2**32 - 1
    with pytest.raises(ValueError, match="3 came"):
        read_idx(io.BytesIO(idx(b"123", huge, huge, huge)), "name", 3)


@given(index=st.integers(0, 15), value=st.integers(0, 255))
def test_a_damaged_header_is_refused_or_harmless(idx: Build, index: int, value: int) -> None:
    damaged = bytearray(idx(bytes(range(12)), 3, 2, 2))
    damaged[index] = value
    with contextlib.suppress(ValueError):
        came = read_idx(io.BytesIO(bytes(damaged)), "name", 3)
        assert math.prod(came.shape) == len(came.values) == 12


def test_gzip_is_unpacked(idx: Build, tmp_path: Path) -> None:
    path = tmp_path / "labels.gz"
    path.write_bytes(gzip.compress(idx(b"abc", 3)))
    assert bytes(read_idx_file(path, 1).values) == b"abc"


@pytest.mark.parametrize("damage", ["truncated", "flipped", "foreign"])
def test_damaged_gzip_is_refused_by_name(idx: Build, tmp_path: Path, damage: str) -> None:
    packed = bytearray(gzip.compress(idx(bytes(range(200)), 200)))
    if damage == "truncated":
        packed = packed[:-9]
    elif damage == "flipped":
        packed[-6] ^= 1
    else:
        packed[:2] = b"PK"
    path = tmp_path / "labels.gz"
    path.write_bytes(packed)
    with pytest.raises(ValueError, match=r"labels\.gz: wanted a whole gzip file"):
        read_idx_file(path, 1)
