"""Prints the shape of the CUDA kernels' machine code: what decides how fast a kernel that waits for memory can be.

    python tools/machine_code.py [--arch 90 ...] [--all] [--json FILE]
    python tools/machine_code.py --write     the table of docs/machine_code.md

A row is a kernel template for an architecture, with the worst of its instances; ``--all`` prints each instance.
Registers are of a thread.  Spilled are bytes of registers that are kept in memory.  Loads in flight are the most
16-byte loads that a thread issues before an instruction reads one of their results.  Store bytes are the widest store.
Needs nvcc, and nvdisasm (of the toolkit, of triton, or of ``pip install nvidia-cuda-nvdisasm``).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "csrc" / "backends" / "cuda"
FILES = ("move", "sum_ranks", "gather_rows", "l2_norm", "optimizers")
FLAGS = ["-O3", "-std=c++17", "-fmad=false", "-Wno-deprecated-gpu-targets", "-I", str(ROOT / "csrc")]
ARCHITECTURES = (75, 90, 120)
PAGE = ROOT / "docs" / "machine_code.md"


class Unavailable(Exception):
    """A tool is not installed."""


@dataclass(frozen=True)
class Kernel:
    """The machine code of one kernel."""

    name: str
    arch: int
    registers: int
    spilled: int  # bytes, stores and loads
    instructions: int
    loads_in_flight: int  # of 16 bytes
    store_nbytes: int  # of the widest store to global memory

    @property
    def template(self) -> str:
        """Its name without template arguments, but for the operation of a reduction."""
        op = re.search(r"sum_ranks_kernel<(\d)", self.name)
        return self.name.split("<")[0] + (f" {OPS[int(op[1])]}" if op else "")


OPS = ("sum", "avg", "prod", "min", "max")


def tool(name: str) -> str:
    """Return the path of one of CUDA's programs.

    Raises:
        Unavailable: it is neither on the PATH, nor in CUDA's toolkit, nor in a package.
    """
    folders = [Path(path) for path in os.get_exec_path()]
    folders += [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"]
    folders += [folder / "cu13" / "bin" for folder in _package("nvidia")]
    folders += [folder / "backends" / "nvidia" / "bin" for folder in _package("triton")]
    for folder in folders:
        if found := shutil.which(name, path=str(folder)):
            return found
    raise Unavailable(f"needs {name}")


def _package(name: str) -> list[Path]:
    spec = find_spec(name)
    return [Path(folder) for folder in spec.submodule_search_locations or []] if spec else []


def measure(arch: int, files: Sequence[str] = FILES) -> list[Kernel]:
    """Compile files of kernels for an architecture and return their kernels, sorted by name.

    Raises:
        Unavailable: nvcc or nvdisasm is not installed.
        subprocess.CalledProcessError: a file does not compile.
    """
    nvcc, nvdisasm = tool("nvcc"), tool("nvdisasm")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        kernels = pool.map(lambda name: _measure_file(nvcc, nvdisasm, arch, name, Path(folder)), files)
        return sorted((kernel for each in kernels for kernel in each), key=lambda kernel: kernel.name)


def _measure_file(nvcc: str, nvdisasm: str, arch: int, name: str, folder: Path) -> list[Kernel]:
    cubin = folder / f"{name}.cubin"
    command = [nvcc, "-cubin", f"-arch=sm_{arch}", "-Xptxas", "-v", *FLAGS, str(SOURCES / f"launch_{name}.cu")]
    said = subprocess.run([*command, "-o", str(cubin)], check=True, capture_output=True, text=True).stderr
    code = subprocess.run([nvdisasm, "-c", str(cubin)], check=True, capture_output=True, text=True).stdout
    facts = dict(_compiler_facts(said))
    return [Kernel(plain_name(name), arch, *facts[name], *_shape(body)) for name, body in _functions(code)]


def _compiler_facts(said: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield each kernel's registers and spilled bytes, from what ``ptxas -v`` says."""
    for part in re.split(r"Compiling entry function '", said)[1:]:
        name = part.split("'")[0]
        stores, loads = map(int, re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part).groups())
        yield name, (int(re.search(r"Used (\d+) registers", part)[1]), stores + loads)


def _functions(code: str) -> Iterator[tuple[str, list[str]]]:
    for part in re.split(r"^\s*\.section\s+\.text\.", code, flags=re.MULTILINE)[1:]:
        yield part.split(",")[0], part.splitlines()


def _shape(body: Sequence[str]) -> tuple[int, int, int]:
    """Return the number of instructions, the most 16-byte loads in flight, and the bytes of the widest store."""
    instructions = most = widest = 0
    pending: set[int] = set()  # registers that loads in flight will write
    count = 0
    for line in body:
        if re.match(r"\.L", line.strip()):  # a label: another path may join here
            pending, count = set(), 0
        found = re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line)
        if not found:
            continue
        instructions += 1
        text = re.sub(r"^@!?U?P\w+\s+", "", found[1])
        used = {int(number) for number in re.findall(r"\bR(\d+)", text)}
        load = re.match(r"LDG\.\S*128\S*\s+R(\d+)", text)
        if load:
            into = int(load[1])
            used -= set(range(into, into + 4))
        if used & pending or re.match(r"(BRA|EXIT|RET|BAR|CALL)", text):
            pending, count = set(), 0
        if load:
            pending |= set(range(into, into + 4))
            count += 1
            most = max(most, count)
        if store := re.match(r"STG(\S*)", text):
            width = re.search(r"\.(?:U|S)?(8|16|64|128)\b", store[1])
            widest = max(widest, int(width[1]) // 8 if width else 4)
    return instructions, most, widest


def plain_name(symbol: str) -> str:
    """Return a kernel's name and template arguments, such as ``move_kernel<float, __half, 128>``."""
    demangled = subprocess.run(["c++filt", symbol], check=True, capture_output=True, text=True).stdout.strip()
    name = re.sub(r"^void |\(int\)|\(mgpu::ReduceOp\)|mgpu::cuda::", "", demangled)
    return re.sub(r"\(.*", "", name)


def worst(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Return one kernel for each template and architecture, with the worst number of each kind."""
    groups: dict[tuple[str, int], list[Kernel]] = {}
    for each in kernels:
        groups.setdefault((each.template, each.arch), []).append(each)
    return [
        Kernel(
            name,
            arch,
            max(each.registers for each in group),
            max(each.spilled for each in group),
            max(each.instructions for each in group),
            min(each.loads_in_flight for each in group),
            min(each.store_nbytes for each in group),
        )
        for (name, arch), group in sorted(groups.items())
    ]


def table(kernels: Sequence[Kernel]) -> str:
    """Return the kernels as a Markdown table."""
    rows = [
        "| kernel | sm | registers | spilled | instructions | loads in flight | store bytes |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for each in kernels:
        numbers = (each.registers, each.spilled, each.instructions, each.loads_in_flight, each.store_nbytes)
        rows.append(f"| `{each.name}` | {each.arch} | " + " | ".join(map(str, numbers)) + " |")
    return "\n".join(rows)


def nvcc_release() -> str:
    """Return the release of nvcc, such as ``13.0``: another one makes other numbers."""
    said = subprocess.run([tool("nvcc"), "--version"], check=True, capture_output=True, text=True).stdout
    return re.search(r"release (\d+\.\d+)", said)[1]


PAGE_TEXT = """# The machine code of the CUDA kernels

Made by `python tools/machine_code.py --write` with nvcc {release}, without a GPU; a test compares. A row has the worst
of a template's instances (dtypes, table sizes), and `--all` prints each. A kernel that moves memory is fast if its
threads have many loads in flight: four of 16 bytes for each thread of a full multiprocessor are 128 KiB, several times
what its memory needs. Spilled registers are extra traffic; there are none.

{table}
"""


def page(kernels: Sequence[Kernel]) -> str:
    """Return docs/machine_code.md."""
    return PAGE_TEXT.format(release=nvcc_release(), table=table(worst(kernels)))


def main() -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHITECTURES), help="such as 90")
    parser.add_argument("--all", action="store_true", help="a row for each instance")
    parser.add_argument("--json", type=Path, help="also write the numbers of each instance there")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    try:
        kernels = [kernel for arch in options.arch for kernel in measure(arch)]
    except Unavailable as reason:
        print(f"machine_code.py: {reason}", file=sys.stderr)
        return 1
    print(table(kernels if options.all else worst(kernels)))
    if options.write:
        PAGE.write_text(page(kernels))
    if options.json:
        options.json.write_text(json.dumps([asdict(kernel) for kernel in kernels], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
