"""A strict reader of IDX, the file format of MNIST.

An IDX file is four bytes (zero, zero, type of the values, number of dims), the dims as big-endian u32, and the
values in row order, nothing more. A file that is shorter, longer or of another kind is refused with one
`ValueError` that names the file, the expected and the actual value. The values are read in pieces, so a header that
claims 4 GiB costs no memory.
"""

import gzip
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

PIECE_NBYTES = 1 << 20
UNSIGNED_BYTE = 0x08


class Readable(Protocol):
    """A binary file, a gzip file, or a member of a zip: all that a parser needs of them."""

    def read(self, limit: int, /) -> bytes:
        """At most `limit` bytes; none at the end."""
        ...


@dataclass(frozen=True)
class Idx:
    """The content of one IDX file: its dims, and its values as bytes in row order."""

    shape: tuple[int, ...]
    values: bytearray

    def tensor(self) -> torch.Tensor:
        """Return a uint8 tensor of `shape` on the CPU, over the same memory as `values`."""
        return torch.frombuffer(self.values, dtype=torch.uint8).view(self.shape)


def read_idx(stream: Readable, name: str, dims: int) -> Idx:
    """Read one IDX file of unsigned bytes to its end.

    Args:
        stream: an open binary file, at its beginning.
        name: the file's name, for the error.
        dims: how many dims the caller wants (3 for images, 1 for labels).

    Raises:
        ValueError: not an IDX file of unsigned bytes, another number of dims, no values, or not as long as it says.
    """
    shape = _read_header(stream, name, dims)
    wanted = math.prod(shape)
    values = _read_at_most(stream, wanted + 1)
    if wanted == 0:
        raise ValueError(f"{name}: wanted at least one value, the header says {_show(shape)}")
    if len(values) != wanted:
        came = f"{len(values)} came" if len(values) < wanted else "more came"
        raise ValueError(f"{name}: wanted {wanted} bytes of values for {_show(shape)}, {came}")
    return Idx(shape, values)


def read_idx_file(path: Path, dims: int) -> Idx:
    """`read_idx` of a file, unpacked first if its name ends in `.gz`. `ValueError` also for a damaged gzip file."""
    if path.suffix != ".gz":
        with path.open("rb") as plain:
            return read_idx(plain, str(path), dims)
    try:
        with gzip.open(path, "rb") as unpacked:
            return read_idx(unpacked, str(path), dims)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: wanted a whole gzip file, came a damaged one ({error})") from error


def _read_header(stream: Readable, name: str, dims: int) -> tuple[int, ...]:
    magic = bytes(_read_at_most(stream, 4))
    wanted = bytes((0, 0, UNSIGNED_BYTE, dims))
    if magic != wanted:
        raise ValueError(
            f"{name}: wanted an IDX file that begins with {wanted.hex(' ')}, came {magic.hex(' ') or 'nothing'}"
        )
    header = _read_at_most(stream, 4 * dims)
    if len(header) != 4 * dims:
        raise ValueError(f"{name}: wanted {4 * dims} bytes of dims, {len(header)} came")
    return struct.unpack(f">{dims}I", header)


def _read_at_most(stream: Readable, limit: int) -> bytearray:
    values = bytearray()
    while len(values) < limit:
        piece = stream.read(min(PIECE_NBYTES, limit - len(values)))
        if not piece:
            break
        values += piece
    return values


def _show(shape: tuple[int, ...]) -> str:
    return " x ".join(str(dim) for dim in shape)
