"""Runs tests again on a fake accelerator: `python tests/fakes/on_the_fake.py plain|zoo|cuda|tpu [OPTION...]`.

Each test of the first three lists runs on one of two.  The plain fake, which the torch backend serves, has those of
streams, inference, pipelines and synchronised layers, and in a list of its own the zoo, which needs other packages.
The fake CUDA runtime, and with MGPU_TEST_PTX=90 the kernels' PTX, have all others.  On the CPU all of them run.  Some
run once more on the plain fake with the rules of a TPU, where ranks share the one device of their process.  Options go
to pytest.  The first run compiles; processes that do so at once wait for each other.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
SECONDS = 1500  # of one run; both lists take some minutes on two cores

LISTS = {
    "plain": (
        "accelerator/test_as_cuda.py",
        "accelerator/test_bench_collectives.py",
        "accelerator/test_collectives.py",
        "accelerator/test_data_parallel.py",
        "accelerator/test_device_loader.py",
        "accelerator/test_fake.py",
        "accelerator/test_mnist.py",
        "accelerator/test_noticed.py",
        "accelerator/test_pipelines.py",
        "accelerator/test_predictor.py",
        "accelerator/test_steps.py",
        "accelerator/test_streams.py",
        "accelerator/test_transfer.py",
        "comm/test_torch_expectations.py",
        "inference",
        "parallel/test_torch_expectations.py",
        "pipeline",
        "ranks/test_draws.py",
        "soak/test_soak_inference.py",
        "parallel/sync_batchnorm/test_sync_batchnorm.py",
    ),
    "zoo": ("integrations/test_zoo.py", "integrations/test_sharded_models.py"),
    "cuda": (
        "accelerator/test_explain.py",
        "accelerator/test_graphs.py",
        "accelerator/test_graphs_of_devices.py",
        "accelerator/test_host_waits.py",
        "accelerator/test_models.py",
        "accelerator/test_pointer_looks.py",
        "accelerator/test_push.py",
        "accelerator/test_sharded_parameters.py",
        "accelerator/test_shards.py",
        "accelerator/test_train_step.py",
        "accelerator/test_warm_graphs.py",
        "changes",
        "conformance",
        "kernels/test_ops.py",
        "kernels/test_flat_optimizers.py",
        "kernels/test_gather_rows.py",
        "kernels/test_reference.py",
        "parallel/test_replicate_modules.py",
        "parallel/test_scatter.py",
        "tensor_parallel",
        "step/test_grad_scaler.py",
        "step/test_any_order.py",
        "step/test_around_a_step.py",
        "step/test_exchanged.py",
        "step/test_losses.py",
        "step/test_param_hooks.py",
        "step/test_optimizer_step.py",
        "step/test_train_step.py",
        "step/test_trained_module.py",
        "data_parallel",
    ),
    "tpu": (
        "accelerator/test_mnist.py",
        "accelerator/test_one_per_process.py",
        "data_parallel/test_call.py",
        "data_parallel/test_complete_replicas.py",
        "data_parallel/test_cut_and_joined.py",
        "data_parallel/test_equality.py",
        "data_parallel/test_gradients.py",
        "data_parallel/test_hooks.py",
        "data_parallel/test_inputs.py",
        "data_parallel/test_interface.py",
        "data_parallel/test_modules.py",
        "data_parallel/test_next_forward.py",
        "data_parallel/test_parameters.py",
        "data_parallel/test_saving.py",
        "data_parallel/test_threads.py",
        "data_parallel/test_torch_expectations.py",
        "step/test_losses.py",
        "step/test_optimizer_step.py",
        "step/test_train_step.py",
    ),
}
VARIABLE_OF = {"plain": "1", "zoo": "1", "cuda": "cuda", "tpu": "tpu"}  # the values of accelerator.WANTED


def fake_of(test: str) -> str:
    """Return the value of the variable for the fake that a test, or its folder, runs on.

    Raises:
        ValueError: it is in neither list.
    """
    path = Path(test.partition("::")[0])
    for name, tests in LISTS.items():
        if {str(path), *map(str, path.parents)} & set(tests):
            return VARIABLE_OF[name]
    raise ValueError(f"{test} runs on neither fake: see {__name__}")


def main(arguments: Sequence[str]) -> int:
    """Run a list; return pytest's exit status.

    A test that hangs says after 110 s where its threads are; by then all waits of the package have given up.
    """
    name, *options = arguments
    limits = ["-p", "no:cacheprovider", "-m", "", "-o", "faulthandler_timeout=110"]
    command = [sys.executable, "-P", "-m", "pytest", *limits, *options, *LISTS[name]]
    environment = {"MGPU_CORE_TIMEOUT": "100"} | os.environ | {"MGPU_TEST_FAKE": VARIABLE_OF[name]}
    return subprocess.run(command, cwd=TESTS, env=environment, timeout=SECONDS).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
