"""DESIGN's arrows point down: read from the sources, so that nobody has to remember them.

Python: cli -> doctor, lessons, mnist -> advice -> explain -> data_parallel -> train -> parallel, optim -> comm ->
kernels -> device -> module_tree -> nested, replica_hooks, record, errors, files, user_script -> recording,
nothing, caller, containers -> _core, entries, extras.
C++: bindings -> backends.cpp -> backends/* -> core; backends do not know each other; only bindings knows pybind11.
"""

import ast
import re
from pathlib import Path

import pytest

import mgpu_core

PACKAGE = Path(mgpu_core.__file__).parent
SOURCES = Path(__file__).parent.parent / "csrc"
LAYERS = [
    {"_core", "entries", "extras"},
    {"recording", "nothing", "caller", "containers"},
    {"record", "errors", "nested", "replica_hooks", "files", "user_script"},
    {"module_tree"},
    {"device"},
    {"kernels"},
    {"comm"},
    {"parallel", "processes", "sync_batchnorm", "optim"},
    {"train"},
    {"data_parallel"},
    {"explain"},
    {"advice"},
    {"doctor", "lessons", "mnist"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def unit(module: str) -> str:
    """The layer's word of a dotted name below mgpu_core: ``parallel.scatter`` -> ``parallel``."""
    return module.split(".")[0]


def imports_of(path: Path) -> set[str]:
    """Names below mgpu_core that the file imports: ``comm.autograd``, ``nested``; "" for the package itself."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "mgpu_core":
            below = node.module.split(".")[1:]
            for alias in node.names:
                longer = not below or is_module(below, alias.name)
                found.add(".".join([*below, alias.name] if longer else below))
        elif isinstance(node, ast.Import):
            found |= {".".join(a.name.split(".")[1:]) for a in node.names if a.name.split(".")[0] == "mgpu_core"}
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}: relative import"
    return found


def is_module(below: list[str], name: str) -> bool:
    place = PACKAGE.joinpath(*below, name)
    return place.is_dir() or place.with_suffix(".py").exists()


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_python_arrows_point_down(path):
    mine = path.relative_to(PACKAGE).with_suffix("").parts
    for name in imports_of(path):
        if name.startswith("__version__"):
            continue
        theirs = unit(name)
        assert theirs in LEVEL, f"imports mgpu_core.{name}, which is in no layer"
        if theirs != mine[0]:
            assert LEVEL[theirs] < LEVEL[mine[0]], f"imports mgpu_core.{name}, which is not below it"


def test_every_folder_and_file_has_a_layer():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    files = {path.stem for path in PACKAGE.glob("*.py")}
    assert (folders | files) - {"__init__"} <= set(LEVEL)


def test_steps_of_the_road_do_not_import_each_other():
    """A step is a file of parallel, or a folder, whose files may."""
    for path in (PACKAGE / "parallel").rglob("*.py"):
        step, *_ = path.relative_to(PACKAGE / "parallel").with_suffix("").parts
        if step != "__init__":
            others = [name for name in imports_of(path) if unit(name) == "parallel" and name.split(".")[1] != step]
            assert not others, path


def test_record_knows_nobody():
    """Everyone imports it."""
    assert imports_of(PACKAGE / "record.py") == {"caller", "entries", "nothing", "recording"}
    assert imports_of(PACKAGE / "entries.py") == set()


def test_only_the_gates_turn_tensors_into_pointers():
    """data_ptr is called by comm and kernels alone."""
    users = {str(p.relative_to(PACKAGE)) for p in FILES if re.search(r"\.data_ptr\(", p.read_text())}
    assert users <= {
        "comm/algorithms.py",
        "comm/batches.py",
        "comm/dispatch.py",
        "comm/rank_sums.py",
        "comm/watch.py",
        "device/peer_probe.py",
        "device/shared_memory.py",
        "device/tensor_checks.py",
        "kernels/arguments.py",
        "kernels/flat_norm.py",
        "kernels/ops.py",
        "kernels/flat_optimizers.py",
    }


def includes_of(path: Path) -> list[str]:
    return re.findall(r'#include [<"]([^>"]+)[>"]', path.read_text())


CPP = sorted(path for end in ("h", "cpp", "cuh", "cu") for path in SOURCES.rglob(f"*.{end}"))


@pytest.mark.parametrize("path", CPP, ids=lambda path: str(path.relative_to(SOURCES)))
def test_cpp_arrows_point_down(path):
    place = path.relative_to(SOURCES).parts
    for include in includes_of(path):
        parts = include.split("/")
        if place[0] == "core":
            assert parts[0] not in ("backends", "bindings", "backends.h")
        if place[0] == "backends":
            assert parts[0] not in ("bindings", "backends.h")
            assert parts[0] != "backends" or parts[1] == place[1], "backends do not know each other"
        if place[0] == "bindings":
            assert parts[0] != "backends", "bindings ask backends.h"
        assert "pybind11" not in include or place[0] == "bindings"
        assert not include.startswith(("torch", "ATen", "c10", "Python.h"))


def test_the_gil_is_released_in_one_place():
    users = [path.name for path in CPP if "gil_scoped_release" in path.read_text()]
    assert users == ["bindings.h"]
