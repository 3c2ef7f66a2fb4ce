"""Faults put into the package on purpose, one at a time, to see that the tests notice.

A suite that passes says little until it has been seen to fail.  Each mutant below is a mistake that somebody could
make: a few characters replaced in a copy of the package, or of the C++ sources.  The tests named with it must then
fail.

    python tests/mutants.py                 all of them
    python tests/mutants.py --only NAME     some
    python tests/mutants.py --table         and write docs/mutants.md

The exit status is 1 if a mutant survives.  A mutant whose text is no longer found is an error: mend its entry.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "mutants.md"


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        name: what is wrong.
        path: the file, below the root of the repository.
        changes: (old, new) texts; each old one is there exactly once.
        tests: what must fail: files for pytest below tests/, or the name of a C++ test program.
    """

    name: str
    path: str
    changes: tuple[tuple[str, str], ...]
    tests: str

    @property
    def is_cpp(self) -> bool:
        """Whether the C++ sources are changed."""
        return self.path.startswith("csrc/")

    def text(self, root: Path) -> str:
        """The file with the fault.

        Raises:
            ValueError: an old text is not there, or more than once.
        """
        text = (root / self.path).read_text()
        for old, new in self.changes:
            if text.count(old) != 1:
                raise ValueError(f"{self.name}: found {text.count(old)} times in {self.path}: {old!r}")
            text = text.replace(old, new)
        return text


def mutant(name: str, path: str, old: str, new: str, tests: str, *more: tuple[str, str]) -> Mutant:
    """A mutant in a line."""
    return Mutant(name, path, ((old, new), *more), tests)


STALE = """

_stale = {}


def _remembered(tensors, team, detach):
    key = (id(tensors[0]) if tensors else 0, len(team), detach, tuple(tensor._version for tensor in tensors))
    return _stale.setdefault(key, None) or _stale.update({key: _copy_tensors(tensors, team, detach)}) or _stale[key]
"""

GATHERED = """parts = [readable(part, _rank_name(rank)) for rank, part in enumerate(parts)]
    ends = rooms.cut(whole, parts, dim)
    if ends is not None:
        place"""

MUTANTS = [
    # The rows.
    mutant(
        "chunks are cut by ceiling",
        "mgpu_core/parallel/scatter.py",
        "[count for _, count in plan if count] or [0]",
        "[max(0, min(-(-rows // ranks), rows - r * -(-rows // ranks))) for r in range(ranks)] or [0]",
        "parallel/test_scatter.py",
    ),
    mutant(
        "shares are ignored",
        "mgpu_core/parallel/scatter.py",
        "if shares is None else _core.share_plan(rows, list(shares))",
        "if True else plan",
        "parallel/test_scatter.py",
    ),
    mutant(
        "rows that do not fit are dropped in silence",
        "mgpu_core/parallel/scatter.py",
        "elif leaf.size(dim) != self.leaves[first].size(dim):",
        "elif False:",
        "parallel/test_scatter.py",
    ),
    mutant(
        "ranks without rows run too",
        "mgpu_core/parallel/scatter.py",
        "[count for _, count in plan if count] or [0]",
        "[count for _, count in plan]",
        "parallel/test_scatter.py",
    ),
    mutant(
        "a replicated tensor is the caller's own on rank 0",
        "mgpu_core/parallel/scatter.py",
        "copies[0] = copies[0].clone()",
        "pass",
        "parallel/test_scatter.py",
    ),
    mutant(
        "parts are gathered in reverse",
        "mgpu_core/comm/collectives.py",
        GATHERED,
        GATHERED.replace("(parts)]", "(parts)][::-1]"),
        "parallel/test_gather.py",
    ),
    mutant(
        "unequal leaves are gathered as rank 0's",
        "mgpu_core/parallel/gather.py",
        "if other is None:",
        "if True:",
        "parallel/test_gather.py",
    ),
    mutant(
        "the output device is forgotten with one device",
        "mgpu_core/data_parallel.py",
        "return self.gather([output], self.output_device)",
        "return output",
        "test_data_parallel_contract.py",
    ),
    # The gradients.
    mutant(
        "gradients are averaged, not added: a mean of means",
        "mgpu_core/comm/autograd.py",
        'collectives.reduce_batch([table[i] for i in present], "sum", device)',
        'collectives.reduce_batch([table[i] for i in present], "avg", device)',
        "comm/test_autograd.py",
    ),
    mutant(
        "rank 2's gradient is dropped",
        "mgpu_core/comm/autograd.py",
        "table = [grads[i::tensors] for i in range(tensors)]",
        "table = [tuple(g for r, g in enumerate(grads[i::tensors]) if r != 2) for i in range(tensors)]",
        "test_data_parallel_contract.py",
    ),
    mutant(
        "all buckets but the first lose their gradients",
        "mgpu_core/comm/autograd.py",
        "result[rank][i] = copy",
        "result[rank][i] = copy if place == 0 else copy.detach()",
        "comm/test_autograd.py",
    ),
    mutant(
        "unused parameters get zeros",
        "mgpu_core/comm/autograd.py",
        "ctx.set_materialize_grads(False)  # a parameter",
        "pass  # a parameter",
        "comm/test_autograd.py",
    ),
    mutant(
        "buckets keep the engine's lowest priority",
        "mgpu_core/comm/autograd.py",
        "node._set_sequence_nr(number)",
        "pass",
        "comm/test_autograd.py",
    ),
    mutant(
        "an average is a sum",
        "mgpu_core/comm/algorithms.py",
        "pointers, pointers, self.count, self.dtype, self.op, algorithm, self",
        'pointers, pointers, self.count, self.dtype, self.op.replace("avg", "sum"), algorithm, self',
        "conformance/test_collectives.py",
    ),
    mutant(
        "the last three elements are lost",
        "mgpu_core/comm/algorithms.py",
        "pointers, pointers, self.count, self.dtype, self.op, algorithm, self",
        "pointers, pointers, max(self.count - 3, 0), self.dtype, self.op, algorithm, self",
        "conformance/test_collectives.py",
    ),
    mutant(
        "half precision is rounded after every rank",
        "mgpu_core/comm/generic.py",
        "wide = torch.float32 if parts[0].dtype in _HALF else parts[0].dtype",
        "wide = parts[0].dtype",
        "conformance/test_collectives.py",
    ),
    mutant(
        "autograd does not hear of writes",
        "mgpu_core/device/memory.py",
        "torch.autograd.graph.increment_version(versioned)",
        "pass",
        "comm/test_refusals.py",
    ),
    mutant(
        "a leaf that requires grad is written",
        "mgpu_core/device/tensor_checks.py",
        "if tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled():",
        "if False:",
        "comm/test_refusals.py",
    ),
    mutant(
        "a conjugated view is read as it lies",
        "mgpu_core/device/tensor_checks.py",
        "    if tensor.is_conj():\n        tensor",
        "    if False:\n        tensor",
        "comm/test_refusals.py",
    ),
    # The replicas.
    mutant(
        "the last rank has the module's own tensors",
        "mgpu_core/comm/broadcast_reduce.py",
        "tensor if rank == 0 and device",
        "tensor if rank == len(devices) - 1 and device",
        "parallel/test_replicate.py",
    ),
    mutant(
        "rank 0 has rank 1's buffers",
        "mgpu_core/parallel/replicate.py",
        "copies[rank][split:], calls",
        "copies[max(rank, len(copies) > 1)][split:], calls",
        "parallel/test_replicate.py",
    ),
    mutant(
        "hooks are not copied",
        "mgpu_core/parallel/replicate.py",
        "    own = attributes",
        '    attributes["_forward_hooks"] = {}\n    own = attributes',
        "test_data_parallel_contract.py",
    ),
    mutant(
        "replicas are remembered by version: stale after a .data write",
        "mgpu_core/parallel/replicate.py",
        "copies = _copy_tensors(tensors, team, detach)",
        "copies = _remembered(tensors, team, detach)",
        "test_data_parallel_contract.py",
        ("class _WeakMethod:", STALE.strip() + "\n\n\nclass _WeakMethod:"),
    ),
    mutant(
        "methods in attributes stay the original's",
        "mgpu_core/parallel/replicate.py",
        "twin.__dict__[name] = MethodType(function, twins[owner])",
        "pass",
        "parallel/test_replicate.py",
    ),
    mutant(
        "methods in attributes keep their replica alive",
        "mgpu_core/parallel/replicate.py",
        "twin.__dict__[name] = _WeakMethod(method)",
        "pass",
        "test_data_parallel_contract.py",
    ),
    mutant(
        "compiled replicas run the original",
        "mgpu_core/parallel/replicate.py",
        "twins[number].__dict__[_COMPILED] = MethodType(function, twins[number])",
        "pass",
        "test_compiled.py",
    ),
    mutant(
        "an uninitialised parameter is copied",
        "mgpu_core/module_tree.py",
        "        if is_lazy(tensor):",
        "        if False:",
        "parallel/test_replicate.py",
    ),
    mutant(
        "lost attributes are warned of in every forward",
        "mgpu_core/data_parallel.py",
        "            self._forwards_to_watch = 0",
        "            self._forwards_to_watch = 3",
        "test_data_parallel_contract.py",
    ),
    # The ranks.
    mutant(
        "a worker's exception is swallowed",
        "mgpu_core/parallel/apply.py",
        "    if not errors:\n        return",
        "    if True:\n        return",
        "parallel/test_apply.py",
    ),
    mutant(
        "other ranks' failures are not told",
        "mgpu_core/parallel/apply.py",
        "error.add_note(",
        "str(",
        "parallel/test_apply.py",
    ),
    mutant(
        "grad mode is not passed on",
        "mgpu_core/device/context.py",
        "torch.set_grad_enabled(self._grad)",
        "torch.set_grad_enabled(True)",
        "parallel/test_apply.py",
    ),
    mutant(
        "inference mode is not passed on",
        "mgpu_core/device/context.py",
        "torch.inference_mode(self._inference)",
        "torch.inference_mode(False)",
        "parallel/test_apply.py",
    ),
    mutant(
        "autocast's dtype is not passed on",
        "mgpu_core/device/context.py",
        "torch.autocast(kind, dtype=dtype, ",
        "torch.autocast(kind, ",
        "parallel/test_apply.py",
    ),
    mutant(
        "contextvars are not passed on",
        "mgpu_core/device/context.py",
        "return variables.run(work)",
        "return work()",
        "parallel/test_apply.py",
    ),
    mutant(
        "saved-tensor hooks are not passed on",
        "mgpu_core/device/context.py",
        "if self._hooks is not None:",
        "if False:",
        "test_contexts.py",
    ),
    mutant(
        "ranks under a checkpoint do not take turns",
        "mgpu_core/parallel/apply.py",
        "if context.in_turns:",
        "if False:",
        "test_contexts.py",
    ),
    mutant(
        "unsafe modes are let in",
        "mgpu_core/device/modes.py",
        "not getattr(mode, SAFE, False)",
        "False",
        "test_contexts.py",
    ),
    mutant(
        "all ranks draw the same numbers",
        "mgpu_core/device/random.py",
        "(base + rank * 0x9E3779B9)",
        "(base + 0 * rank)",
        "test_random_numbers.py",
    ),
    mutant(
        "ranks draw from one generator",
        "mgpu_core/parallel/apply.py",
        "if draws and team.devices.count(_CPU) > 1:",
        "if False:",
        "test_random_numbers.py",
    ),
    mutant(
        "a checkpoint saves the wrong generator's state",
        "mgpu_core/device/random.py",
        "        _install()\n",
        "",
        "test_random_numbers.py",
    ),
    mutant(
        "a rank waits for ever",
        "mgpu_core/device/workers.py",
        "timeout=max(0.0, until - time.monotonic())",
        "timeout=30",
        "parallel/test_apply.py",
    ),
    mutant(
        "a forked child keeps its parent's threads",
        "mgpu_core/device/workers.py",
        "        pool._forget()\n",
        "        pass\n",
        "device/test_workers.py",
    ),
    mutant(
        "a busy team's crew is lent twice",
        "mgpu_core/device/workers.py",
        "crew = self._idle.pop() if self._idle else None",
        "crew = self._idle[-1] if self._idle else None",
        "device/test_workers.py",
    ),
    # The training.
    mutant(
        "a resumed run forgets its random numbers",
        "mgpu_core/mnist/loop.py",
        "self._generator = checkpoint.generator",
        "pass",
        "mnist/test_checkpoint.py",
    ),
    mutant(
        "a damaged checkpoint is believed",
        "mgpu_core/mnist/checkpoint.py",
        "if damaged is not None:",
        "if False:",
        "mnist/test_checkpoint.py",
    ),
    # The core.
    mutant(
        "the tail of a vector is lost",
        "csrc/backends/cpu/reduce.cpp",
        "tail(r, whole_vectors(r));",
        "whole_vectors(r);",
        "test_reduce",
    ),
    mutant(
        "a NaN is forgotten",
        "csrc/backends/cpu/reduce.cpp",
        "(a < b) | (a != a) ? a : b",
        "a < b ? a : b",
        "test_reduce",
    ),
    mutant(
        "bf16 is cut, not rounded",
        "csrc/backends/cpu/lanes.h",
        "(bits + 0x7fff + ((bits >> 16) & 1)) >> 16",
        "bits >> 16",
        "test_reduce",
    ),
    mutant(
        "the ring passes the wrong chunk on",
        "csrc/core/plan.cpp",
        "(rank - round - shift + 2 * ranks) % ranks",
        "(rank + round - shift + 2 * ranks) % ranks",
        "test_collectives",
    ),
    mutant(
        "the first rank gets all odd rows",
        "csrc/core/plan.cpp",
        "for (int64_t rank = 0; rank < count % ranks; ++rank) ++counts[rank];",
        "counts[0] += count % ranks;",
        "test_plan",
    ),
    mutant(
        "a bucket may be too large",
        "csrc/core/plan.cpp",
        "if (!same_kind || filled + nbytes[i] > limit_nbytes)",
        "if (!same_kind || filled > limit_nbytes)",
        "test_plan",
    ),
]


def main() -> int:
    """Runs the mutants; the exit status."""
    parser = argparse.ArgumentParser(description="Puts faults into copies of the package and sees that tests fail.")
    parser.add_argument("--only", metavar="TEXT", help="only mutants with this in their name")
    parser.add_argument("--table", action="store_true", help=f"write {TABLE.relative_to(ROOT)}")
    options = parser.parse_args()
    chosen = [each for each in MUTANTS if options.only is None or options.only in each.name]
    rows, survived = [], []
    for each, caught in run(chosen):
        print(f"{'caught  ' if caught else 'SURVIVED'} {each.name}: {caught or each.tests}", flush=True)
        rows.append((each, caught))
        if not caught:
            survived.append(each.name)
    print(f"{len(rows) - len(survived)} of {len(rows)} mutants caught")
    if options.table and not survived:
        TABLE.write_text(page(rows))
    return 1 if survived or not rows else 0


def run(mutants: list[Mutant]) -> Iterator[tuple[Mutant, str]]:
    """Each mutant and the test that caught it, or ``""``."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name)
        python = [each for each in mutants if not each.is_cpp]
        if python:
            home = copy_of_the_package(folder / "python")
            for each in python:
                yield each, in_copy(each, home, lambda each=each: failing_test(each, home))
        cpp = [each for each in mutants if each.is_cpp]
        if cpp:
            home = copy_of_the_sources(folder / "cpp")
            for each in cpp:
                yield each, in_copy(each, home, lambda each=each: failing_program(each, home))


def in_copy(each, home: Path, look) -> str:
    """The result of looking while the fault is in the copy."""
    path = home / each.path
    whole = path.read_text()
    path.write_text(each.text(home))
    try:
        return look()
    finally:
        path.write_text(whole)


def copy_of_the_package(home: Path) -> Path:
    """A folder from which ``import mgpu_core`` takes the copy, also where the package is installed editable."""
    import mgpu_core  # here: the C++ mutants need no installed package
    from mgpu_core import _core

    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(mgpu_core.__file__).parent, home / "mgpu_core", ignore=skip)
    shutil.copy(_core.__file__, home / "mgpu_core")
    finders = "ScikitBuildRedirectingFinder"
    (home / "sitecustomize.py").write_text(
        f"import sys\nsys.meta_path[:] = [each for each in sys.meta_path if type(each).__name__ != {finders!r}]\n"
    )
    return home


def failing_test(each: Mutant, home: Path) -> str:
    """The first test that fails, as ``file::test``."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--timeout=60",
        *each.tests.split(),
    ]
    environment = os.environ | {"PYTHONPATH": str(home), "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run(command, cwd=ROOT / "tests", env=environment, capture_output=True, text=True, timeout=600)
    if ran.returncode == 0:
        return ""
    for line in ran.stdout.splitlines():
        if line.startswith("FAILED "):
            return line.split()[1].removeprefix("tests/").split("[")[0].rstrip(":")
        if line.startswith("+++") and "Timeout" in line:
            return f"{each.tests} (ended by its time limit)"
    raise RuntimeError(f"{each.name}: the tests could not run\n{ran.stdout[-3000:]}\n{ran.stderr[-2000:]}")


def copy_of_the_sources(home: Path) -> Path:
    """The C++ half with its tests, configured and built once."""
    for name in ("csrc", "cmake", "tests/cpp"):
        shutil.copytree(ROOT / name, home / name)
    shutil.copy(ROOT / "CMakeLists.txt", home)
    options = ["-DMGPU_PYTHON=OFF", "-DMGPU_TESTS=ON", "-DMGPU_CUDA=off"]
    quietly(["cmake", "-S", home, "-B", home / "build", "-G", "Ninja", *options])
    quietly(["cmake", "--build", home / "build"])
    return home


def failing_program(each: Mutant, home: Path) -> str:
    """The first check that fails, as ``program: file:line``."""
    time.sleep(0.01)  # ninja looks at times
    quietly(["cmake", "--build", home / "build", "--target", each.tests])
    ran = subprocess.run([home / "build" / "tests" / "cpp" / each.tests], capture_output=True, text=True, timeout=120)
    if ran.returncode == 0:
        return ""
    return f"cpp/{each.tests}.cpp:{ran.stderr.split(':')[1] if ran.stderr.count(':') else '?'}"


def quietly(command: list[object]) -> None:
    """Runs a tool; shows what it said if it fails."""
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(f"{command[0]} failed\n{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}")


def page(rows: list[tuple[Mutant, str]]) -> str:
    """docs/mutants.md."""
    lines = [
        "# Faults that the tests catch\n",
        "Made by `python tests/mutants.py --table`: each fault is put into a copy of the package, alone, and the test",
        "named beside it fails.\n",
        "| fault | file | caught by |",
        "|---|---|---|",
    ]
    lines += [f"| {each.name} | `{each.path}` | `{caught}` |" for each, caught in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
