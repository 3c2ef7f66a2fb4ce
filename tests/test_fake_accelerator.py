"""The package on a fake accelerator, in processes of their own: registering one makes it that of the process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import accelerator, native_build, ptx
from fakes.accelerator.cpu_only import CPU_ONLY

TESTS = Path(__file__).parent

ON_THE_FAKE = [
    "accelerator",
    "conformance",
    "kernels/test_flat_optimizers.py",
    "kernels/test_reference_optimizers.py",
    "train/test_amp.py",
    "train/test_any_order.py",
    "train/test_optimizer_state.py",
    "train/test_train_step.py",
    "train/test_trained_module.py",
    "parallel/test_replicate.py",
    "parallel/test_scatter.py",
    "inference",
    "soak/test_soak_inference.py",
    "pipeline",
    "tensor_parallel",
    "wrapper",
    "sync_batchnorm/test_sync_batchnorm.py",
    "comm/test_torch_expectations.py",
    "parallel/test_torch_expectations.py",
]


BY_THE_CUDA_BACKEND = [
    "accelerator/test_explain.py",
    "accelerator/test_graphs.py",
    "accelerator/test_models.py",
    "accelerator/test_pipelines.py",
    "accelerator/test_pointer_looks.py",
    "accelerator/test_shards.py",
    "accelerator/test_streams.py",
    "accelerator/test_train_step.py",
    "accelerator/test_warm_graphs.py",
    "conformance",
    "train/test_any_order.py",
    "train/test_optimizer_state.py",
    "train/test_train_step.py",
    "train/test_trained_module.py",
    "kernels/test_flat.py",
    "kernels/test_flat_optimizers.py",
    "kernels/test_gather_rows.py",
    "kernels/test_reference_optimizers.py",
    "parallel/test_replicate.py",
    "parallel/test_scatter.py",
    "pipeline/test_pipeline.py",
    "pipeline/test_bad_input.py",
    "pipeline/test_place.py",
    "tensor_parallel",
    "wrapper",
]


@pytest.mark.skipif(accelerator.is_wanted(), reason="this is the process with the fake already")
@pytest.mark.timeout(900)  # the first run compiles
def test_the_package_on_the_fake_accelerator():
    if reason := accelerator.what_is_missing():
        pytest.skip(reason)
    run_tests(ON_THE_FAKE, "1")


@pytest.mark.skipif(accelerator.is_wanted(), reason="this is the process with the fake already")
@pytest.mark.timeout(900)  # the first run compiles
def test_the_package_through_the_cuda_backend():
    """The devices are the same fakes, served by the core's CUDA backend on a fake CUDA runtime.

    With MGPU_TEST_PTX=75 its kernels run from nvcc's PTX for that architecture.
    """
    reason = accelerator.what_is_missing() or native_build.what_is_missing()
    if reason := reason or (ptx.wanted_architecture() and ptx.what_is_missing()):
        pytest.skip(reason)
    run_tests(BY_THE_CUDA_BACKEND, "cuda")


def run_tests(paths, wanted):
    """A test that hangs says after 110 s where its threads are; by then all waits of the package have given up."""
    options = ["-q", "-p", "no:cacheprovider", "-m", "", "-o", "faulthandler_timeout=110"]
    try:
        ran = subprocess.run(
            [sys.executable, "-P", "-m", "pytest", *options, *paths],
            cwd=TESTS,
            env={"MGPU_CORE_TIMEOUT": "100"} | os.environ | {accelerator.WANTED: wanted},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=840,
        )
    except subprocess.TimeoutExpired as late:
        pytest.fail(f"still at work after 840 s:\n{(late.stdout or b'').decode()}")
    assert ran.returncode == 0, ran.stdout.decode()


def test_every_test_that_is_left_out_exists():
    names = {*ON_THE_FAKE, *BY_THE_CUDA_BACKEND}
    files = [path for name in names for path in ([TESTS / name] if "." in name else (TESTS / name).glob("*.py"))]
    text = "".join(path.read_text() for path in files)
    assert [name for name in CPU_ONLY if f"def {name}(" not in text] == []
