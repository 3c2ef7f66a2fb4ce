"""gpu_check.sh without a GPU: on fakes of all that it starts, in a clone that holds nothing but the script."""

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import cases

ROOT = Path(__file__).resolve().parents[2]
STAGES = ["build", "test", "sanitize", "nccl", "bench"]
SYSTEM = "/usr/bin:/bin"

FAKES = {
    "nvidia-smi": 'echo "Fake GPU, 580.1"; exit ${FAKE_GPU:-0}',
    "cmake": """
[[ $1 != --build ]] || { mkdir -p "$2/tests/cpp"; cp "$(dirname "$0")/program" "$2/tests/cpp/test_cuda_kernels_gpu"; }
exit ${FAKE_CMAKE:-0}""",
    "program": 'echo "12 checks passed"; exit ${FAKE_PROGRAM:-0}',
    "compute-sanitizer": 'echo "== ERROR SUMMARY: ${FAKE_SANITIZER:-0} errors"; exit ${FAKE_SANITIZER:-0}',
    "python3": f"""
case $* in
  *"pip install"*) exit ${{FAKE_PIP:-0}} ;;
  *"-m pytest"*)
    [[ -z ${{FAKE_SLEEP:-}} ]] || {{ echo $$ > "$FAKE_FOLDER/sleeper"; exec sleep "$FAKE_SLEEP"; }}
    echo "${{FAKE_TESTS:-3 passed, 1 skipped in 0.1s}}"
    exit ${{FAKE_PYTEST:-0}} ;;
  *doctor*)
    echo '{{"torch": {{"version": "2.11.0", "cuda": "13.0"}}, "nccl": {{"version": "2.28.9"}}, '
    echo '"python": {{"version": "3.12"}}, "mgpu_core": "0.1.0"}}' ;;
  *run.py*)
    echo "device cuda, size 4: 0.170 ms, 0.95 x copy"
    echo "* held: device cuda: copy / ours >= 0.9 (0.95)"
    [[ $* != *"${{FAKE_SLOW:-no such case}}"* ]] ;;
  *"import json"*) exec {sys.executable} "$@" ;;
  *) exit ${{FAKE_IMPORT:-0}} ;;
esac""",
}


class Machine:
    """A folder with a clone, fakes, and what came of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out, self.clone = folder, folder / "out", folder / "clone"
        shutil.copytree(ROOT / "benchmarks" / "gpu_check", self.clone / "benchmarks" / "gpu_check")
        shutil.copy(ROOT / "benchmarks" / "gpu_check.sh", self.clone / "benchmarks")
        (self.clone / "tests" / "cuda").mkdir(parents=True)
        (self.clone / "tests" / "cuda" / "test_nccl.py").touch()
        (folder / "bin").mkdir()
        for name, body in FAKES.items():
            path = folder / "bin" / name
            path.write_text(f'#!/bin/bash\necho "{name} $*" >> "$FAKE_FOLDER/calls"\n{body}\n')
            path.chmod(0o755)

    def start(self, *arguments: str, **fakes: str) -> subprocess.Popen[str]:
        own = {"PATH": f"{self.folder / 'bin'}:{SYSTEM}", "FAKE_FOLDER": str(self.folder), "HOME": str(self.folder)}
        own |= {"GPU_CHECK_WORK": str(self.folder / "work"), "GPU_CHECK_COMMIT": "abc123"}
        command = ["bash", str(self.clone / "benchmarks" / "gpu_check.sh"), *arguments]
        environment, pipe = {**own, **fakes}, subprocess.PIPE
        return subprocess.Popen(command, cwd=self.folder, env=environment, stdout=pipe, stderr=pipe, text=True)

    def run(self, *arguments: str, **fakes: str) -> tuple[int, str]:
        """Exit status and stderr."""
        child = self.start(*arguments, **fakes)
        _, errors = child.communicate(timeout=60)
        return child.returncode, errors

    @property
    def calls(self) -> str:
        return (self.folder / "calls").read_text()

    @property
    def summary(self) -> str:
        return (self.out / "summary.md").read_text()

    @property
    def status(self) -> dict[str, str]:
        """What the summary's table says of each stage."""
        rows = [line.strip("| ").split(" | ") for line in self.summary.splitlines() if line.startswith("| ")]
        return {stage: status for stage, status, *_ in rows[1:]}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


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
    ):
        assert line in machine.summary.splitlines(), line
    assert "the end of its log" not in machine.summary
    assert (machine.out / "doctor.json").read_text().startswith('{"torch"')
    calls = machine.calls
    order = (
        "pip install",
        "tests/cuda --ignore",
        "tests/kernels tests/ladder -k gpu",
        "--build",
        "memcheck",
        "racecheck",
    )
    places = [
        calls.index(word) for word in (*order, "test-nccl.xml", "run.py train_step", "run.py pack", "run.py adamw")
    ]
    assert places == sorted(places)
    assert f"run.py pack --device cuda --check --json {machine.out}/results/pack.json" in calls


def test_chosen_stages_run_in_their_order(machine: Machine) -> None:
    assert machine.run("out", "bench", "test") == (0, "")
    assert list(machine.status) == ["test", "bench"]
    assert "pip install" not in machine.calls


@pytest.mark.parametrize(
    ("fakes", "failed"),
    [
        ({"FAKE_PYTEST": "1"}, ["test", "nccl"]),
        ({"FAKE_TESTS": "4 skipped in 0.1s"}, ["test", "nccl"]),
        ({"FAKE_SLOW": "sgd"}, ["bench"]),
        ({"FAKE_CMAKE": "1"}, ["sanitize"]),
        ({"FAKE_PROGRAM": "1"}, ["sanitize"]),
        ({"FAKE_SANITIZER": "9"}, ["sanitize"]),
    ],
    ids=str,
)
def test_a_stage_that_fails_fails_the_run(machine: Machine, fakes: dict[str, str], failed: list[str]) -> None:
    assert machine.run("out", **fakes) == (1, "")
    assert machine.status == {stage: "failed" if stage in failed else "passed" for stage in STAGES}
    assert machine.summary.startswith(f"# GPU check: NOT passed ({5 - len(failed)} of 5 stages)\n")
    assert machine.summary.count("the end of its log") == len(failed)


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


@pytest.mark.skipif(shutil.which("compute-sanitizer", path=SYSTEM) is not None, reason="this machine has the tool")
def test_without_the_sanitizer_the_program_runs_at_least(machine: Machine) -> None:
    (machine.folder / "bin" / "compute-sanitizer").unlink()
    assert machine.run("out", "sanitize") == (1, "")
    assert machine.status == {"sanitize": "missing"}
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
    assert errors.startswith("usage: bash benchmarks/gpu_check.sh OUTDIR [build] [test]")
    assert not machine.out.exists()


def test_without_a_gpu_it_says_so(machine: Machine) -> None:
    status, errors = machine.run("out", FAKE_GPU="9")
    assert status == 3
    assert errors.startswith("gpu_check.sh: no GPU here: ")
    assert machine.summary.startswith("# GPU check: NOT passed (0 of 5 stages)\n\ngpu_check.sh: no GPU here: ")
    assert "python3" not in machine.calls


def line_of(script: str, start: str) -> str:
    lines = (ROOT / "benchmarks" / script).read_text().splitlines()
    (line,) = [line.strip() for line in lines if line.strip().startswith(start)]
    return line


def test_the_limits_are_nine_minutes_together() -> None:
    limits = re.findall(r"]=(\d+)", line_of("gpu_check.sh", "declare -A LIMIT="))
    facts = line_of("gpu_check.sh", "readonly FACTS_SECONDS=").partition("=")[2]
    assert len(limits) == len(STAGES)
    assert sum(map(int, [*limits, facts])) == 9 * 60


def test_every_kernel_case_is_measured() -> None:
    measured = line_of("gpu_check/stage.sh", "for name in ").partition(";")[0].split()[3:]
    assert measured == [name for name in cases.NAMES if "copy" in cases.load(name).peers]
