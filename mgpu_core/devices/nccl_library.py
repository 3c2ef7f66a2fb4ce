"""Which NCCL this process gets, from where, and its version, without loading it here.

The order is the core's own: the path in MGPU_CORE_NCCL and then nothing else; the library that torch has already
loaded; the one of pip's NVIDIA wheels; the system's. A library is asked for its version in a child process, because
loading one here could decide which NCCL torch gets later, and because a broken file may take its process down.
"""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

VARIABLE = "MGPU_CORE_NCCL"
SONAME = "libnccl.so.2"
TIMEOUT_SECONDS = 30.0

Source = Literal["MGPU_CORE_NCCL", "loaded", "wheel", "system"]

_ASK = """
import ctypes, json, sys
try:
    library = ctypes.CDLL(sys.argv[1])  # RTLD_LOCAL
    version = ctypes.c_int(0)
    status = library.ncclGetVersion(ctypes.byref(version))
    with open("/proc/self/maps") as maps:
        paths = [line.split(maxsplit=5)[5].strip() for line in maps if sys.argv[2] in line]
    answer = {"version": version.value, "status": status, "path": (paths or [sys.argv[1]])[0]}
except (OSError, AttributeError) as error:
    answer = {"error": str(error)}
print()
print(json.dumps(answer))
"""


@dataclass(frozen=True, slots=True)
class NcclLibrary:
    """Where NCCL comes from; `version` is None when it cannot be used, and then `problem` says why."""

    source: Source
    path: str
    version: str | None = None
    problem: str | None = None


def find_nccl(environ: Mapping[str, str]) -> NcclLibrary | None:
    """Return the library that wins, or the best one's problem when none is usable; None when there is none at all."""
    override = environ.get(VARIABLE)
    if override:
        return ask_version("MGPU_CORE_NCCL", override)
    failures: list[NcclLibrary] = []
    for source, path in _candidates():
        answer = ask_version(source, path)
        if answer.version:
            return answer
        failures += [answer] if source != "system" else []
    return failures[0] if failures else None


def loaded_nccl(maps: Iterable[str]) -> str | None:
    """Return the path of the NCCL in this process, from the lines of /proc/self/maps."""
    for line in maps:
        path = line.rstrip("\n").split(maxsplit=5)[5:]
        if path and Path(path[0]).name.startswith("libnccl.so"):
            return path[0]
    return None


def ask_version(source: Source, path: str, timeout_seconds: float = TIMEOUT_SECONDS) -> NcclLibrary:
    """Load `path` in a child process and call ncclGetVersion there."""
    command = [sys.executable, "-I", "-c", _ASK, path, Path(path).name]
    try:
        child = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout_seconds
        )
    except subprocess.TimeoutExpired:
        return NcclLibrary(source, path, problem=f"it did not answer within {timeout_seconds:g} seconds")
    except OSError as error:
        return NcclLibrary(source, path, problem=f"no child process to ask it in: {error}")
    if child.returncode:
        return NcclLibrary(source, path, problem=f"loading it ended the process (exit status {child.returncode})")
    return _read_answer(source, path, child.stdout)


def version_text(code: int) -> str:
    """Return NCCL's version number as text: 2304 is 2.3.4, and from 2.9 on 23007 is 2.30.7."""
    step = 1000 if code < 10000 else 10000
    return f"{code // step}.{code % step // 100}.{code % 100}"


def _candidates() -> Iterator[tuple[Source, str]]:
    loaded = loaded_nccl(_own_maps())
    if loaded:
        yield "loaded", loaded
    for wheel in wheel_libraries():
        yield "wheel", wheel
    yield "system", SONAME


def _own_maps() -> list[str]:
    try:
        return Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:
        return []


def wheel_libraries() -> list[str]:
    """Return the paths where pip's NVIDIA wheels have the library."""
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec else None
    return [str(path) for folder in folders or () if (path := Path(folder, "nccl", "lib", SONAME)).exists()]


def _read_answer(source: Source, path: str, output: str) -> NcclLibrary:
    # The library may print as well; the answer is the last line.
    try:
        answer = json.loads(output.splitlines()[-1])
    except (IndexError, ValueError):
        return NcclLibrary(source, path, problem="loading it ended the process without an answer")
    if "error" in answer:
        return NcclLibrary(source, path, problem=str(answer["error"]).removeprefix(f"{path}: "))
    if answer["status"] != 0 or answer["version"] <= 0:
        return NcclLibrary(source, path, problem=f"ncclGetVersion failed with status {answer['status']}")
    return NcclLibrary(source, answer["path"], version_text(answer["version"]))
