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


def nvcc_of(folder, release):
    """A compiler that says its release and compiles nothing."""
    nvcc = folder / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V1'\n")
    nvcc.chmod(0o755)
    return nvcc


@pytest.mark.parametrize(("release", "asked"), [("12.0", [NVCC]), ("12.1", []), ("13.1", []), ("?", [NVCC])])
def test_a_compiler_that_cannot_compile_the_kernels_is_none(backend, monkeypatch, tmp_path, release, asked):
    nvcc = nvcc_of(tmp_path, release)
    for variable in ("CUDAToolkit_ROOT", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("CUDACXX", str(nvcc))
    which = shutil.which
    monkeypatch.setattr(backend.shutil, "which", lambda name: which(name) if name == str(nvcc) else None)
    assert backend.get_requires_for_build_wheel() == ["cmake", *asked]


def configured(folder, *choices, **environment):
    command = ["cmake", "-S", str(ROOT), "-B", str(folder / "build"), "-G", "Ninja", "-DMGPU_PYTHON=OFF"]
    return subprocess.run(
        [*command, *choices, f"-DPython_EXECUTABLE={sys.executable}"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )


needs_cmake = pytest.mark.skipif(not (shutil.which("cmake") and shutil.which("ninja")), reason="needs cmake and ninja")


@needs_cmake
@pytest.mark.parametrize(("release", "said"), [("12.0", "is older than 12.1"), ("12.1", "does not build a program")])
def test_cmake_and_the_backend_have_one_oldest_release(tmp_path, release, said):
    done = configured(tmp_path, "-DMGPU_CUDA=system", CUDACXX=str(nvcc_of(tmp_path, release)))
    assert said in done.stdout, done.stderr
    assert "CUDA: OFF (CPU-only build)" in done.stdout


@needs_cmake
@pytest.mark.parametrize("archs", ["60", "61;90", "90,52"])
def test_an_architecture_that_cannot_run_the_kernels_is_refused(tmp_path, archs):
    done = configured(tmp_path, f"-DMGPU_CUDA_ARCHS={archs}")
    assert done.returncode != 0
    assert "compute capability 7.0 (70) is the oldest" in " ".join(done.stderr.split())


@needs_cmake
@pytest.mark.parametrize(
    ("wanted", "made"),
    [
        ("75;80;90;120", "75-real;80-real;90-real;75-virtual;90-virtual"),  # this nvcc has no 120
        ("90;80", "80-real;90-real;80-virtual;90-virtual"),
        ("90", "90-real;90-virtual"),
        ("80;90a", "80-real;90a-real;80-virtual"),
        ("90a", "90a-real"),
        ("110", ""),
    ],
)
def test_code_of_each_architecture_and_ptx_of_the_oldest_and_the_newest(tmp_path, wanted, made):
    known = "".join(f"compute_{arch}\n" for arch in (75, 80, 90, 100))
    script = tmp_path / "archs.cmake"
    script.write_text(
        f'include("{ROOT}/cmake/MgpuCudaArchs.cmake")\nmgpu_cuda_archs(archs "{wanted}" "{known}")\n'
        f'message("${{archs}}")\n'
    )
    done = subprocess.run(["cmake", "-P", str(script)], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == made


@needs_cmake
@pytest.mark.parametrize("mode", ["auto", "on", "off"])
def test_cmake_falls_back_or_says_that_it_cannot(tmp_path, mode):
    broken = tmp_path / "nvcc"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    done = configured(tmp_path, f"-DMGPU_CUDA={mode}", CUDACXX=str(broken))
    if mode == "on":
        assert done.returncode != 0
        assert "MGPU_CUDA=on, and no working nvcc was found" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert "CUDA: OFF (CPU-only build)" in done.stdout
