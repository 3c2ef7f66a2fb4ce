"""The package through the core's CUDA backend, in a process of its own: on a fake CUDA runtime, over fake devices."""

import pytest
from fakes import accelerator, native_build, ptx
from fakes.on_the_fake import run_tests

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
def test_the_package_through_the_cuda_backend():
    """The devices are the same fakes, served by the core's CUDA backend on a fake CUDA runtime.

    With MGPU_TEST_PTX=75 its kernels run from nvcc's PTX for that architecture.
    """
    reason = accelerator.what_is_missing() or native_build.what_is_missing()
    if reason := reason or (ptx.wanted_architecture() and ptx.what_is_missing()):
        pytest.skip(reason)
    run_tests(BY_THE_CUDA_BACKEND, "cuda")
