"""The checks for GPUs without one: their mechanism with stages of the test's own, and the case-by-case runner."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from fakes.gpu_check import ROOT, Machine

from benchmarks.gpu_check import bench, cases, measure, variants
from mgpu_core.tools.bench import cases as bench_cases
from mgpu_core.tools.bench.titles import TITLES

pytestmark = pytest.mark.slow

PASSED = dict.fromkeys(["facts", "one", "two", "beside"], "passed")
FILES = ["logs.tgz", "summary.md"]


def test_all_stages_pass(machine: Machine) -> None:
    assert machine.run("out") == (0, "")
    assert machine.status == PASSED
    assert machine.summary.startswith("# GPU check: passed\n")
    for line in ("* GPU, driver: Fake GPU, 580.1", "* torch: 2.11.0"):
        assert line in machine.summary.splitlines()
    assert re.search(r"^\* commit: abc123, \d{4}-\d\d-\d\d$", machine.summary, re.MULTILINE)
    assert "the end of its log" not in machine.summary
    assert sorted(path.name for path in machine.out.iterdir()) == FILES
    assert {"logs/facts.log", "logs/one.log", "status"} <= set(machine.logs())
    assert sorted(machine.calls) == ["beside 20 abc123", "facts 10 abc123", "one 20 abc123", "two 20 abc123"]


def test_figures_and_counts_of_tests_are_in_the_summary(machine: Machine) -> None:
    two = 'echo "figure: copy: 4 GB/s"; echo "== 3 passed, 1 skipped in 0.1s =="; echo "FAILED tests/x.py::y - no"'
    assert machine.run("out", one="echo 'ERROR SUMMARY: 0 errors'", two=two) == (0, "")
    for line in (
        "* two: copy: 4 GB/s",
        "* two: == 3 passed, 1 skipped in 0.1s ==",
        "* two: tests/x.py::y - no",
        "* one: ERROR SUMMARY: 0 errors",
    ):
        assert line in machine.summary.splitlines(), line


def test_two_lanes_run_at_the_same_time(machine: Machine) -> None:
    meet = "for i in $(seq 100); do [[ -e $HOME/one && -e $HOME/beside ]] && exit 0; sleep 0.1; done; exit 1"
    together = f'touch "$HOME/$1"; {meet}'
    assert machine.run("out", one=together, beside=together) == (0, "")


def test_what_failed_is_named_and_stops_nothing(machine: Machine) -> None:
    assert machine.run("out", one="echo why it failed; exit 1", beside="exit 5") == (1, "")
    assert machine.status == PASSED | {"one": "failed", "beside": "missing"}
    assert machine.summary.startswith("# GPU check: NOT passed (2 of 4 stages)\n")
    assert "## one: the end of its log\n\n```\nwhy it failed\n```" in machine.summary


def test_a_stage_that_needs_a_gpu_fails_no_dry_run(machine: Machine) -> None:
    assert machine.run("out", GPU_CHECK_DEVICE="cpu", FAKE_GPUS="0", two="echo needs a GPU; exit 6") == (0, "")
    assert machine.status == PASSED | {"two": "needs a GPU"}
    assert "* GPU, driver: none: a dry run on the CPU" in machine.summary


def test_chosen_stages_run_in_their_order(machine: Machine) -> None:
    assert machine.run("out", "two", "facts") == (0, "")
    assert list(machine.status) == ["facts", "two"]


def test_a_stage_has_a_limit_and_the_next_one_runs(machine: Machine) -> None:
    sleeps = 'echo $BASHPID > "$HOME/sleeper"; exec sleep 50'
    assert machine.run("out", one=sleeps, GPU_CHECK_SECONDS="one=5 two=30") == (1, "")
    assert machine.status == PASSED | {"one": "timed out"}
    assert "two 30 abc123" in machine.calls
    eventually(lambda: sleeper_is_gone(machine))


def test_all_together_have_a_limit(machine: Machine) -> None:
    assert machine.run("out", one="exec sleep 50", GPU_CHECK_TOTAL="12") == (1, "")
    assert machine.status == PASSED | {"one": "timed out", "two": "not run"}


@pytest.mark.parametrize("stage", ["one", "beside"])
def test_a_signal_leaves_a_summary_and_no_process(machine: Machine, stage: str) -> None:
    child = machine.start("out", **{stage: 'echo $BASHPID > "$HOME/sleeper"; exec sleep 50'})
    sleeper = machine.folder / "sleeper"
    eventually(lambda: sleeper.exists() and sleeper.read_text())
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=30)
    assert child.returncode == 143
    assert machine.status[stage] == "stopped"
    assert machine.summary.startswith("# GPU check: NOT passed (")
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
    "line", ["", "--help", "out three", "out one all", "out LIMITS=one", "out LIMITS=one=0", "out LIMITS=three=5"]
)
def test_a_wrong_argument_is_2_with_the_usage(machine: Machine, line: str) -> None:
    arguments, _, limits = line.partition("LIMITS=")
    status, errors = machine.run(*arguments.split(), GPU_CHECK_SECONDS=limits)
    assert status == 2
    assert errors.startswith("usage: bash benchmarks/check.sh OUTDIR [facts] [one]")
    assert not machine.out.exists()


def test_without_a_gpu_it_says_so(machine: Machine) -> None:
    status, errors = machine.run("out", FAKE_GPUS="0")
    assert (status, machine.out.exists()) == (3, False)
    assert errors.startswith("check.sh: 1 GPU(s) needed here: ")


def test_the_commit_is_that_of_the_kit(machine: Machine) -> None:
    (machine.clone / ".gpu_check").mkdir()
    (machine.clone / ".gpu_check" / "commit").write_text("def456\n")
    assert machine.run("out", "facts") == (0, "")
    assert "* commit: def456, " in machine.summary


@pytest.mark.parametrize("script", ["gpu_check.sh", "gpu_check_many.sh"])
def test_every_stage_has_a_limit_a_text_and_work(script: str) -> None:
    text = (ROOT / "benchmarks" / script).read_text()
    (stages,) = re.findall(r"STAGES=\((.*?)\)", text)
    limits = dict(re.findall(r"\[(\w+)]=(\d+)", text))
    works = set(
        re.findall(r"^stage_(\w+)\(\)", (ROOT / "benchmarks" / "gpu_check" / "stages.sh").read_text(), re.MULTILINE)
    )
    assert set(stages.split()) == set(limits) == set(re.findall(r'\[(\w+)]="', text))
    assert set(stages.split()) <= works


def dry(out: Path, *stages: str, **variables: str) -> subprocess.CompletedProcess[str]:
    own = {"GPU_CHECK_DEVICE": "cpu", "GPU_CHECK_WORK": str(out.parent / "work"), "MGPU_WHEEL": "installed"}
    command = ["bash", str(ROOT / "benchmarks" / "gpu_check.sh"), str(out), *stages]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=os.environ | own | variables)


def test_the_check_for_one_gpu_takes_the_installed_package(tmp_path: Path) -> None:
    done = dry(tmp_path / "out", "facts", "package", "cpp", "memcheck", "bench", "twins")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = (tmp_path / "out" / "summary.md").read_text()
    assert summary.startswith("# GPU check: passed\n")
    assert summary.count("| needs a GPU |") == 4


def test_a_wheel_that_is_not_there(tmp_path: Path) -> None:
    done = dry(tmp_path / "out", "package", "cases", MGPU_WHEEL="no.whl")
    assert done.returncode == 1
    summary = (tmp_path / "out" / "summary.md").read_text()
    assert "| package | the package is there, and has code for the GPU | missing |" in summary
    assert "| not run |" in summary


CASES = """
import os, time

def test_right(): print("figure: speed: 3")
def test_wrong(): assert 1 == 2, "one is not two"
def test_crash(): os.abort()
def test_hang(): time.sleep(100)
def test_next(): pass
def test_skipped():
    import pytest
    pytest.skip("not here")
"""


@pytest.fixture
def some_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / cases.FOLDER
    folder.mkdir(parents=True)
    (folder / "test_some.py").write_text(CASES)
    monkeypatch.setattr(cases, "ROOT", tmp_path)
    monkeypatch.setattr(cases, "CASE_SECONDS", 8.0)
    monkeypatch.setattr(cases, "PYTEST", [*cases.PYTEST, "-s"])
    return tmp_path / "out.jsonl"


def test_a_hang_and_a_crash_cost_their_case_alone(some_cases: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cases.main([str(some_cases), "-j", "2"]) == 1
    found = {each["case"].rpartition("_")[2]: each for each in map(json.loads, some_cases.read_text().splitlines())}
    failed, others = dict.fromkeys(("wrong", "crash", "hang"), "FAILED"), {"skipped": "skipped"}
    wanted = dict.fromkeys(("right", "next"), "passed") | failed | others
    assert {name: each["status"] for name, each in found.items()} == wanted
    assert found["right"]["figures"] == ["figure: speed: 3"]
    assert "one is not two" in found["wrong"]["said"]
    assert "no end within 8 s" in found["hang"]["said"]
    assert "cases: 3 FAILED, 2 passed, 1 skipped" in capsys.readouterr().out


def test_cases_by_name_by_file_and_without_time(some_cases: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cases.main([str(some_cases), "-k", "right or next"]) == 0
    assert cases.main([str(some_cases), "-k", "right", "--by", "file"]) == 1
    assert cases.main([str(some_cases), "-k", "right", "--seconds", "0"]) == 1
    assert "cases: 1 not run" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="no case was found"):
        cases.main([str(some_cases), "-k", "nothing_of_this_name"])


def test_a_row_of_measurements_is_alone_and_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "LONGEST", 2.0)
    here = os.getpid()

    def tells(bench: measure.Bench) -> None:
        bench.tell("row", child=float(os.getpid() != here))

    def raises(bench: measure.Bench) -> None:
        tells(bench)
        raise ValueError("no more")

    def dies(_: measure.Bench) -> None:
        os._exit(3)

    def hangs(bench: measure.Bench) -> None:
        tells(bench)
        time.sleep(60)

    told = {"row": {"child": 1.0}}
    begin = time.monotonic()
    assert [measure.measured(row, "cpu") for row in (tells, raises, dies, hangs)] == [
        (told, True), (told, False), ({}, False), ({}, False)
    ]  # fmt: skip
    assert time.monotonic() - begin < 30


def test_every_kernel_case_is_measured() -> None:
    assert set(bench.KERNELS) == {name for name in TITLES if "copy" in bench_cases.load(name).peers}


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


LINES = """
say() {
  echo '{"kernel": "pack", "what": "64 tensors", "variant": "'$1'", "us": '$2', "p90": 31, "GBps": 2, "of_copy": '$3'}'
}
say "before: it" 30 0.5
say shipped 20 0.75
echo "variants with other bits: $WRONG"
exit $WRONG
"""


@pytest.mark.parametrize("wrong", [0, 1])
def test_the_variants_of_kernels_stand_beside_what_they_were(
    wrong: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program, out = tmp_path / "program", tmp_path / "out.json"
    program.write_text(f"#!/bin/bash\nWRONG={wrong}\n{LINES}")
    program.chmod(0o755)
    assert variants.main([str(out), "--program", str(program)]) == wrong
    said = capsys.readouterr().out
    assert "| shipped | 20 | 31 | 2 | 0.75 |" in said.splitlines()
    assert "figure: pack, 64 tensors: us 20  of_copy 0.75  times_before 1.500" in said.splitlines()
    assert f"variants with other bits: {wrong}" in said.splitlines()
    assert [row["us"] for row in json.loads(out.read_text())] == [30, 20]


def test_variants_without_a_program_say_who_builds_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert variants.main(["--program", str(tmp_path / "none")]) == 2
    assert "run benchmarks/gpu_check/prepare.sh" in capsys.readouterr().err
