"""The finder of NCCL, on libraries made here: one that answers, and every way a file can fail to be NCCL."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from mgpu_core.devices import nccl_library
from mgpu_core.devices.nccl_library import NcclLibrary, ask_version, find_nccl, loaded_nccl, version_text

GOOD = "int ncclGetVersion(int *version) { *version = 22703; return 0; }"
ON_LOAD = "__attribute__((constructor)) static void on_load(void)"


@pytest.fixture
def library(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        pytest.skip("no C compiler to make a library with")

    def build(source: str, name: str = "libnccl.so.2") -> str:
        (tmp_path / "fake.c").write_text(source)
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-o", tmp_path / name, tmp_path / "fake.c"], check=True, timeout=60
        )
        return str(tmp_path / name)

    return build


def test_the_override_wins_and_is_not_loaded_here(library):
    path = library(GOOD)
    assert find_nccl({"MGPU_CORE_NCCL": path}) == NcclLibrary("MGPU_CORE_NCCL", path, "2.27.3")
    assert path not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("int something_else;", "undefined symbol: ncclGetVersion"),
        ("int ncclGetVersion(int *version) { return 5; }", "ncclGetVersion failed with status 5"),
        ("int ncclGetVersion(int *version) { return 0; }", "ncclGetVersion failed with status 0"),
        (f"#include <stdlib.h>\n{ON_LOAD} {{ abort(); }}", "ended the process (exit status -6)"),
        (f"#include <unistd.h>\n{ON_LOAD} {{ _exit(0); }}", "ended the process without an answer"),
    ],
)
def test_a_library_that_is_not_nccl_is_a_clear_problem(library, source, problem):
    found = find_nccl({"MGPU_CORE_NCCL": library(source)})
    assert found is not None
    assert found.version is None
    assert problem in (found.problem or "")


def test_a_library_that_prints_still_answers(library):
    path = library(f'#include <stdio.h>\n{ON_LOAD} {{ puts("{{\\"version\\": 1}}"); fflush(stdout); }}\n{GOOD}')
    assert ask_version("wheel", path) == NcclLibrary("wheel", path, "2.27.3")


def test_a_library_that_hangs_is_given_up(library):
    path = library(f"#include <unistd.h>\n{ON_LOAD} {{ for (;;) pause(); }}")
    assert ask_version("wheel", path, timeout_seconds=1.0).problem == "it did not answer within 1 seconds"


@pytest.mark.parametrize(
    ("text", "problem"), [(None, "No such file"), ("not ELF" * 100, "invalid ELF header"), ("", "file too short")]
)
def test_a_missing_or_garbage_file_is_a_clear_problem(tmp_path, text, problem):
    path = tmp_path / "libnccl.so.2"
    if text is not None:
        path.write_text(text)
    found = find_nccl({"MGPU_CORE_NCCL": str(path)})
    assert found is not None
    assert (found.source, found.path, found.version) == ("MGPU_CORE_NCCL", str(path), None)
    assert problem in (found.problem or "")
    assert str(path) not in (found.problem or "")


@pytest.fixture
def indices(monkeypatch):
    """Sets which libraries there are, and which of them answer."""

    def set_indices(loaded: list[str], wheels: list[str], answers: dict[str, str]) -> None:
        monkeypatch.setattr(
            nccl_library, "_own_maps", lambda: [f"7f00-7f01 r-xp 0 fe:00 1   {path}" for path in loaded]
        )
        monkeypatch.setattr(nccl_library, "wheel_libraries", lambda: wheels)

        def answer(source: str, path: str) -> NcclLibrary:
            return NcclLibrary(source, path, answers.get(path), None if path in answers else "broken")

        monkeypatch.setattr(nccl_library, "ask_version", answer)

    return set_indices


ALL = {"/a/libnccl.so.2": "2.1.0", "/b/libnccl.so.2": "2.2.0", "libnccl.so.2": "2.3.0"}


@pytest.mark.parametrize(
    ("loaded", "wheels", "answers", "expected"),
    [
        (["/a/libnccl.so.2"], ["/b/libnccl.so.2"], ALL, ("loaded", "2.1.0")),
        ([], ["/b/libnccl.so.2"], ALL, ("wheel", "2.2.0")),
        ([], [], ALL, ("system", "2.3.0")),
        (["/a/libnccl.so.2"], ["/b/libnccl.so.2"], {"/b/libnccl.so.2": "2.2.0"}, ("wheel", "2.2.0")),
        (["/a/libnccl.so.2"], ["/b/libnccl.so.2"], {}, ("loaded", None)),
        ([], ["/b/libnccl.so.2"], {}, ("wheel", None)),
    ],
)
def test_the_order_of_the_indices(indices, loaded, wheels, answers, expected):
    indices(loaded, wheels, answers)
    found = find_nccl({"MGPU_CORE_NCCL": ""})
    assert found is not None
    assert (found.source, found.version) == expected


def test_nothing_anywhere(indices):
    indices([], [], {})
    assert find_nccl({}) is None


def test_loaded_library_in_the_map_of_a_process():
    lines = [
        "7f90b9600000-7f90c5752000 r-xp 00000000 fe:00 16042398                   /usr/lib/libnccl-net.so\n",
        "7f90b9600000-7f90c5752000 rw-p 00000000 00:00 0 \n",
        "7f90b9600000-7f90c5752000 r-xp 00000000 fe:00 16042399                   /my envs/nccl/lib/libnccl.so.2\n",
        "7f90b9600000-7f90c5752000 r-xp 00000000 fe:00 16042399                   /other/libnccl.so.2\n",
    ]
    assert loaded_nccl(lines) == "/my envs/nccl/lib/libnccl.so.2"
    assert loaded_nccl(lines[:2]) is None


@pytest.mark.parametrize(
    ("code", "text"), [(23007, "2.30.7"), (21805, "2.18.5"), (20903, "2.9.3"), (2408, "2.4.8"), (2804, "2.8.4")]
)
def test_version_text(code, text):
    assert version_text(code) == text
