"""gpu_check.sh without a GPU: in a clone that holds nothing else, on fakes of what it starts."""

import contextlib
import io
import re
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from fakes.gpu_check import ROOT, SYSTEM, Machine

from benchmarks.gpu_check import bench
from mgpu_core.bench import cases

STAGES = ["build", "sanitize", "test", "nccl", "bench"]


def test_all_stages_pass(machine: Machine) -> None:
    assert machine.run("out") == (0, "")
    assert machine.status == dict.fromkeys(STAGES, "passed")
    assert machine.summary.startswith("# GPU check: passed\n")
    for line in (
        "* commit: abc123",
        "* GPU, driver: Fake GPU, 580.1",
        "* nccl: 2.28.9",
        "* test: 3 passed, 1 skipped in 0.1s",
        "* sanitize: 12 checks passed",
        "* sanitize: == ERROR SUMMARY: 0 errors",
        "  * device cuda, size 4: 0.170 ms, 0.95 x copy",
        "  * held: device cuda: copy / ours >= 0.9 (0.95)",
        "  * MISSED: device cuda: copy / ours >= 0.9 (0.80)",
        "* bounds: 1 held, 1 missed (figures to look at; they fail nothing)",
    ):
        assert line in machine.summary.splitlines(), line
    assert "the end of its log" not in machine.summary
    assert (machine.out / "doctor.json").read_text().startswith('{"torch"')
    calls = machine.calls
    order = (
        "pip install",
        "--target test_cuda_kernels_gpu",
        "--target test_cuda_kernel_edges_gpu",
        "memcheck --error-exitcode 9 ",
        "racecheck",
        "tests/cuda/test_kernels.py tests/cuda/test_collectives.py tests/cuda/test_train_step.py tests/cuda --ignore",
        "tests/kernels tests/ladder -k gpu",
        "test-nccl.xml",
        "test-nccl-warn.xml",
        f"bench.py {machine.out}/results --seconds 90",
    )
    indices = [calls.index(word) for word in order]
    assert indices == sorted(indices)
    assert "-k captured" not in calls
    sanitized = [line for line in calls.splitlines() if line.startswith("compute-sanitizer")]
    assert len(sanitized) == 2
    assert all(line.endswith("/test_cuda_kernels_gpu") for line in sanitized)


def test_chosen_stages_run_in_their_order(machine: Machine) -> None:
    assert machine.run("out", "bench", "test") == (0, "")
    assert list(machine.status) == ["test", "bench"]
    assert "pip install" not in machine.calls


@pytest.mark.parametrize(
    ("fakes", "failed"),
    [
        ({"FAKE_PYTEST": "1"}, ["test", "nccl"]),
        ({"FAKE_TESTS": "4 skipped in 0.1s"}, ["test", "nccl"]),
        ({"FAKE_BENCH": "1"}, ["bench"]),
        ({"FAKE_CMAKE": "1"}, ["sanitize"]),
        ({"FAKE_PROGRAM": "test_cuda_kernels_gpu"}, ["sanitize"]),
        ({"FAKE_PROGRAM": "test_cuda_kernel_edges_gpu"}, ["sanitize"]),
        ({"FAKE_SANITIZER": "9"}, ["sanitize"]),
    ],
    ids=str,
)
def test_a_stage_that_fails_fails_the_run(machine: Machine, fakes: dict[str, str], failed: list[str]) -> None:
    assert machine.run("out", **fakes) == (1, "")
    assert machine.status == {stage: "failed" if stage in failed else "passed" for stage in STAGES}
    assert machine.summary.startswith(f"# GPU check: NOT passed ({5 - len(failed)} of 5 stages)\n")
    assert machine.summary.count("the end of its log") == len(failed)
    assert ("-k captured" in machine.calls) == ("test" in failed)


@pytest.mark.parametrize("fakes", [{"FAKE_PIP": "1"}, {"FAKE_IMPORT": "1"}], ids=str)
def test_without_a_package_only_the_sanitizer_runs(machine: Machine, fakes: dict[str, str]) -> None:
    assert machine.run("out", **fakes) == (1, "")
    assert machine.status == dict.fromkeys(STAGES, "not run") | {"build": "failed", "sanitize": "passed"}
    assert "-m pytest" not in machine.calls


def test_a_wheel_is_installed_instead_of_building(machine: Machine) -> None:
    wheel = machine.folder / "x.whl"
    wheel.touch()
    assert machine.run("out", "build", MGPU_WHEEL="x.whl") == (0, "")
    assert f"{machine.folder}/work/site {wheel}\n" in machine.calls
    assert machine.run("out", "build", MGPU_WHEEL="y.whl") == (1, "")
    assert machine.status == {"build": "missing"}


def test_what_is_missing_is_named(machine: Machine) -> None:
    shutil.rmtree(machine.clone / "tests" / "cuda")
    assert machine.run("out", "test", "nccl", "bench") == (1, "")
    assert machine.status == {"test": "missing", "nccl": "missing", "bench": "passed"}
    assert "missing: tests/cuda/test_nccl.py" in machine.summary


def test_the_page_names_what_failed_though_other_tools_ran_later(machine: Machine) -> None:
    machine.run("out", "sanitize", FAKE_PROGRAM="test_cuda_kernel_edges_gpu")
    assert "\nfailed: test_cuda_kernel_edges_gpu\n" in machine.summary


def test_without_pytest_the_stages_that_use_it_are_missing(machine: Machine) -> None:
    assert machine.run("out", FAKE_NO_PYTEST="1") == (1, "")
    assert machine.status == dict.fromkeys(STAGES, "passed") | {"test": "missing", "nccl": "missing"}
    assert "missing: pytest" in machine.summary


@pytest.mark.skipif(shutil.which("compute-sanitizer", path=SYSTEM) is not None, reason="this machine has the tool")
def test_without_the_sanitizer_the_program_runs_at_least(machine: Machine) -> None:
    (machine.folder / "bin" / "compute-sanitizer").unlink()
    for program, status in (("", "missing"), ("test_cuda_kernel_edges_gpu", "failed")):
        assert machine.run("out", "sanitize", FAKE_PROGRAM=program) == (1, "")
        assert machine.status == {"sanitize": status}
        assert "* sanitize: 12 checks passed" in machine.summary


def test_a_stage_has_a_limit_and_the_next_one_runs(machine: Machine) -> None:
    assert machine.run("out", "test", "bench", FAKE_SLEEP="50", GPU_CHECK_SECONDS="test=1 bench=30") == (1, "")
    assert machine.status == {"test": "timed out", "bench": "passed"}
    eventually(lambda: sleeper_is_gone(machine))


def test_a_signal_leaves_a_summary_and_no_process(machine: Machine) -> None:
    child = machine.start("out", "build", "test", "bench", FAKE_SLEEP="50")
    sleeper = machine.folder / "sleeper"
    eventually(lambda: sleeper.exists() and sleeper.read_text())
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=30)
    assert child.returncode == 143
    assert machine.status == {"build": "passed", "test": "stopped"}
    assert machine.summary.startswith("# GPU check: NOT passed (1 of 3 stages)\n")
    eventually(lambda: sleeper_is_gone(machine))


def sleeper_is_gone(machine: Machine) -> bool:
    """Whether the child that slept has ended; it may still wait for whoever inherited it."""
    status = Path("/proc") / (machine.folder / "sleeper").read_text().strip() / "status"
    try:
        return "State:\tZ" in status.read_text()
    except OSError:
        return True


def eventually(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    "line", ["", "--help", "out tests", "out build all", "out LIMITS=test", "out LIMITS=test=0", "out LIMITS=tests=5"]
)
def test_a_wrong_argument_is_2_with_the_usage(machine: Machine, line: str) -> None:
    arguments, _, limits = line.partition("LIMITS=")
    status, errors = machine.run(*arguments.split(), GPU_CHECK_SECONDS=limits)
    assert status == 2
    assert errors.startswith("usage: bash benchmarks/gpu_check.sh OUTDIR [build] [sanitize]")
    assert not machine.out.exists()


def test_without_a_gpu_it_says_so(machine: Machine) -> None:
    status, errors = machine.run("out", FAKE_GPU="9")
    assert status == 3
    assert errors.startswith("gpu_check.sh: 1 GPU(s) needed here: ")
    assert machine.summary.startswith("# GPU check: NOT passed (0 of 5 stages)\n\ngpu_check.sh: 1 GPU(s) needed here: ")
    assert "python3" not in machine.calls


def line_of(script: str, start: str) -> str:
    lines = (ROOT / "benchmarks" / script).read_text().splitlines()
    (line,) = [line.strip() for line in lines if line.strip().startswith(start)]
    return line


def test_the_limits_are_nine_minutes_together() -> None:
    limits = re.findall(r"]=(\d+)", line_of("gpu_check.sh", "declare -A LIMIT="))
    facts = line_of("gpu_check/common.sh", "readonly FACTS_SECONDS=").partition("=")[2]
    assert len(limits) == len(STAGES)
    assert sum(map(int, [*limits, facts])) == 9 * 60


def test_every_kernel_case_is_measured() -> None:
    assert set(bench.KERNELS) == {name for name in cases.NAMES if "copy" in cases.load(name).peers}


def test_every_command_of_the_bench_is_one_that_its_case_takes(tmp_path: Path) -> None:
    """Here, where there is no GPU, the cases say that and nothing else."""
    for name, (main, arguments) in bench.commands(tmp_path).items():
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            assert main(arguments) == 2, name
        assert "torch sees no GPU" in errors.getvalue()


def test_a_case_that_fails_leaves_the_others_their_turn(capsys: pytest.CaptureFixture[str]) -> None:
    ran, times = [], iter([0.0, 1.0, 2.0, 3.0, 5.1])

    def failing() -> int:
        raise RuntimeError("it has no such kernel")

    def right(name: str) -> int:
        ran.append(name)
        return 0

    runs = {"wrong": failing, "one": partial(right, "one"), "two": partial(right, "two"), "late": failing}
    assert bench.run_all(runs, 5.0, lambda: next(times)) == 1
    assert ran == ["one", "two"]
    assert capsys.readouterr().out.splitlines()[-2:] == ["== late", "not run: no time was left"]
