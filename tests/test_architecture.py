"""The arrows point down: read from the sources, file by file.

Python, from the top: tools -> integrations -> data_parallel, data -> step, inference -> pipeline, tensor_parallel ->
parallel, optim -> comm -> kernels -> ranks, trees -> devices -> errors -> trace -> support -> _core.
And in tools: cli -> bench -> doctor, lessons, mnist, run -> advise -> options -> explain -> cpu_ranks, user_script.
C++: bindings -> backends.cpp -> backends/* -> core; backends do not include each other; only bindings uses pybind11.
"""

import ast
import re
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import mgpu_core

PACKAGE = Path(mgpu_core.__file__).parent
SOURCES = Path(__file__).parent.parent / "csrc"
LAYERS = [
    {"_core"},
    {"support"},
    {"trace"},
    {"errors"},
    {"devices"},
    {"ranks", "trees"},
    {"kernels"},
    {"comm"},
    {"parallel", "optim"},
    {"pipeline", "tensor_parallel"},
    {"step", "inference"},
    {"data_parallel", "data"},
    {"integrations"},
    {"tools.cpu_ranks", "tools.user_script"},
    {"tools.explain"},
    {"tools.options"},
    {"tools.advise"},
    {"tools.doctor", "tools.lessons", "tools.mnist", "tools.run"},
    {"tools.bench"},
    {"tools.cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def layer_of(module: str) -> str:
    """Return the folder of a module, or its file at the root; a tool is a layer of its own."""
    return ".".join(module.split(".")[: 2 if module.startswith("tools.") else 1])


def module_of(path: Path) -> str:
    """Return the dotted name below mgpu_core; a folder's is its ``__init__``'s."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> set[str]:
    """Return the modules below mgpu_core that the file imports, also in functions, and for types alone."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            package, *below = (node.module or "").split(".")
            found |= {_module(below, alias.name) for alias in node.names} if package == "mgpu_core" else set()
        elif isinstance(node, ast.Import):
            found |= {name[10:] for name in (alias.name for alias in node.names) if name.startswith("mgpu_core.")}
    return found - {""}


def _module(below: list[str], name: str) -> str:
    longer = PACKAGE.joinpath(*below, name)
    if longer.is_dir() or longer.with_suffix(".py").exists():
        return ".".join([*below, name])
    return ".".join(below) if below else mgpu_core._HOME_OF.get(name, "")


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
IMPORTS = {module_of(path): imports_of(path) for path in FILES}

WAITS = {"Condition", "RLock", "Event", "Semaphore", "BoundedSemaphore", "Barrier", "Thread", "Timer"}
WAITING = ("ranks.", "devices.exclusive", "devices.peers", "inference.request_queue")  # peers reads a child's pipes


def test_lanes_wait_in_ranks_and_threads_for_each_other_in_one_file():
    """A lock of a few statements may be anywhere; whoever waits for other code has a limit, and says for what."""
    for path in FILES:
        names = {alias.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)
                 and node.module == "threading" for alias in node.names}  # fmt: skip
        names |= set(re.findall(r"\bthreading\.(\w+)\(", path.read_text()))
        if not module_of(path).startswith((*WAITING, "tools.")):
            assert not names & WAITS, path


@pytest.mark.parametrize("module", IMPORTS)
def test_python_arrows_point_down(module):
    mine = layer_of(module)
    for name in IMPORTS[module]:
        theirs = layer_of(name)
        assert theirs in LEVEL, f"imports mgpu_core.{name}, which is in no layer"
        assert theirs == mine or LEVEL[theirs] < LEVEL[mine], f"imports mgpu_core.{name}, which is not below it"


def test_no_files_import_each_other_in_a_circle():
    """A folder's ``__init__`` may import its files, which may import their folder for another of its files."""
    TopologicalSorter(IMPORTS).prepare()  # raises CycleError with the circle


def test_every_folder_and_file_has_a_layer():
    assert {layer_of(module) for module in IMPORTS} <= set(LEVEL) | {"tools"}


def test_phases_of_the_forward_pass_do_not_import_each_other():
    """A phase is a file of parallel, or a folder, whose files may."""
    for module, names in IMPORTS.items():
        package, *phase = module.split(".")
        if package == "parallel" and phase:
            assert not [name for name in names if name.startswith("parallel.") and name.split(".")[1] != phase[0]]


def test_tensors_become_pointers_in_few_files():
    """data_ptr is called by comm and kernels alone, and by the device's own tests and checks."""
    users = {str(p.relative_to(PACKAGE)) for p in FILES if re.search(r"\.data_ptr\(", p.read_text())}
    assert {user.split("/")[0] for user in users} <= {"comm", "kernels", "devices"}
    assert {user for user in users if user.startswith("devices/")} <= {
        "devices/peer_probe.py",
        "devices/push_teams.py",
        "devices/shared_memory.py",
        "devices/tensor_checks.py",
    }


def names_a_device(call: ast.Call) -> bool:
    """Whether it is a call of ``to`` with a device among its arguments, by the names in them."""
    arguments = [*call.args, *(each.value for each in call.keywords)]
    names = [getattr(node, "id", getattr(node, "attr", "")) for each in arguments for node in ast.walk(each)]
    return getattr(call.func, "attr", "") == "to" and any(name.startswith("device") for name in names)


def test_tensors_go_to_other_devices_by_one_file():
    """It knows which ones may copy directly.  Benchmarks show what torch does, and the reference starts from files."""
    found = {
        str(path.relative_to(PACKAGE).parent)
        for path in FILES
        if path != PACKAGE / "devices" / "transfer.py"
        if any(isinstance(node, ast.Call) and names_a_device(node) for node in ast.walk(ast.parse(path.read_text())))
    }
    assert found <= {"tools/bench", "tools/bench/cases", "tools/mnist"}


def includes_of(path: Path) -> list[str]:
    return re.findall(r'#include [<"]([^>"]+)[>"]', path.read_text())


CPP = sorted(path for end in ("h", "cpp", "cuh", "cu") for path in SOURCES.rglob(f"*.{end}"))


@pytest.mark.parametrize("path", CPP, ids=lambda path: str(path.relative_to(SOURCES)))
def test_cpp_arrows_point_down(path):
    folder, *rest = path.relative_to(SOURCES).parts
    for include in includes_of(path):
        parts = include.split("/")
        if folder == "core":
            assert parts[0] not in ("backends", "bindings", "backends.h")
        if folder == "backends":
            assert parts[0] not in ("bindings", "backends.h")
            assert parts[0] != "backends" or parts[1] == rest[0], "backends do not include each other"
        if folder == "bindings":
            assert parts[0] != "backends", "bindings ask backends.h"
        assert "pybind11" not in include or folder == "bindings"
        assert not include.startswith(("torch", "ATen", "c10", "Python.h"))


def test_the_gil_is_released_in_one_file():
    users = [path.name for path in CPP if "gil_scoped_release" in path.read_text()]
    assert users == ["bindings.h"]


def test_a_class_name_has_one_meaning():
    """Also of private ones; those of torch that `mgpu run` stands in for have torch's."""
    files = [path for path in FILES if module_of(path) != "tools.run.functions"]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    names = Counter(node.name.lstrip("_") for node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []
