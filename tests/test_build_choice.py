"""What MGPU_CUDA means: what pip is asked for, and what CMake does when the compiler it finds does not work."""

import importlib.util
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NVCC = "cuda-toolkit[nvcc,cccl]==13.0.*"


@pytest.fixture
def backend(monkeypatch):
    """The build backend, over a stand-in for scikit-build-core: that one is there only while pip builds."""
    build = types.ModuleType("scikit_build_core.build")
    build.get_requires_for_build_wheel = build.get_requires_for_build_editable = lambda settings: ["cmake"]
    package = types.ModuleType("scikit_build_core")
    package.build = build
    monkeypatch.setitem(sys.modules, "scikit_build_core", package)
    monkeypatch.setitem(sys.modules, "scikit_build_core.build", build)
    spec = importlib.util.spec_from_file_location("mgpu_build", ROOT / "build_backend" / "mgpu_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(module.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(module.platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.delenv("MGPU_CUDA", raising=False)
    return module


@pytest.mark.parametrize(
    ("mode", "has_nvcc", "wants_nvcc"),
    [
        (None, True, False),
        (None, False, True),
        ("auto", False, True),
        ("on", False, True),
        ("on", True, False),
        ("pypi", True, True),
        ("system", False, False),
        ("off", False, False),
        ("OFF", False, False),
    ],
)
def test_nvcc_is_asked_for_where_the_machine_has_none(backend, monkeypatch, mode, has_nvcc, wants_nvcc):
    monkeypatch.setattr(backend, "_system_nvcc", lambda: "/usr/bin/nvcc" if has_nvcc else None)
    if mode is not None:
        monkeypatch.setenv("MGPU_CUDA", mode)
    for asked in (backend.get_requires_for_build_wheel(), backend.get_requires_for_build_editable()):
        assert asked == (["cmake", NVCC] if wants_nvcc else ["cmake"])


def test_a_config_setting_wins_over_the_variable(backend, monkeypatch):
    monkeypatch.setattr(backend, "_system_nvcc", lambda: None)
    monkeypatch.setenv("MGPU_CUDA", "on")
    assert backend.get_requires_for_build_wheel({"cmake.define.MGPU_CUDA": "off"}) == ["cmake"]


def test_nvidia_has_no_wheels_for_other_platforms(backend, monkeypatch):
    monkeypatch.setattr(backend, "_system_nvcc", lambda: None)
    monkeypatch.setattr(backend.platform, "machine", lambda: "riscv64")
    assert backend.get_requires_for_build_wheel() == ["cmake"]


def test_a_compiler_that_does_not_work_is_none(backend, tmp_path):
    broken = tmp_path / "nvcc"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    assert not backend._works(str(broken))


@pytest.mark.parametrize(("release", "asked"), [("11.5", [NVCC]), ("11.8", []), ("13.1", []), ("?", [NVCC])])
def test_a_compiler_that_cmake_would_pass_over_is_none(backend, monkeypatch, tmp_path, release, asked):
    old = tmp_path / "nvcc"
    old.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V1'\n")
    old.chmod(0o755)
    for variable in ("CUDAToolkit_ROOT", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("CUDACXX", str(old))
    which = shutil.which
    monkeypatch.setattr(backend.shutil, "which", lambda name: which(name) if name == str(old) else None)
    assert backend.get_requires_for_build_wheel() == ["cmake", *asked]
    cmake = (ROOT / "cmake" / "MgpuCuda.cmake").read_text()
    assert "VERSION_LESS {}.{})".format(*backend.OLDEST_CUDA) in cmake


@pytest.mark.skipif(not (shutil.which("cmake") and shutil.which("ninja")), reason="needs cmake and ninja")
@pytest.mark.parametrize("mode", ["auto", "on", "off"])
def test_cmake_falls_back_or_says_that_it_cannot(tmp_path, mode):
    broken = tmp_path / "nvcc"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    command = ["cmake", "-S", str(ROOT), "-B", str(tmp_path / "build"), "-G", "Ninja", "-DMGPU_PYTHON=OFF"]
    done = subprocess.run(
        [*command, f"-DMGPU_CUDA={mode}", f"-DPython_EXECUTABLE={sys.executable}"],
        env={**os.environ, "CUDACXX": str(broken)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    if mode == "on":
        assert done.returncode != 0
        assert "MGPU_CUDA=on, and no working nvcc was found" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert "CUDA: OFF (CPU-only build)" in done.stdout
