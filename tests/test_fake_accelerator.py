"""The package on a fake accelerator, in processes of their own: registering one makes it that of the process."""

from pathlib import Path

import pytest
from fakes import accelerator
from fakes.accelerator.cpu_only import CPU_ONLY
from fakes.on_the_fake import run_tests

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


@pytest.mark.skipif(accelerator.is_wanted(), reason="this is the process with the fake already")
@pytest.mark.timeout(900)  # the first run compiles
def test_the_package_on_the_fake_accelerator():
    if reason := accelerator.what_is_missing():
        pytest.skip(reason)
    run_tests(ON_THE_FAKE, "1")


def test_every_test_that_is_left_out_exists():
    text = "".join(path.read_text() for path in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name in CPU_ONLY if f"def {name}(" not in text] == []
