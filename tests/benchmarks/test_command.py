"""`mgpu bench`: baselines, the table of several machines, and requests that cannot be served."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mgpu_core.tools.bench import cases, command
from mgpu_core.tools.bench.case import Row, UsageError
from mgpu_core.tools.bench.environment import environment
from mgpu_core.tools.bench.report import compare
from mgpu_core.tools.bench.result import Result
from mgpu_core.tools.cli import main

pytestmark = pytest.mark.slow

FACTS = {"CPU": "a CPU", "GPU": "none", "torch": "2.14"}


def result(seconds, *, case="all_reduce", cpu="a CPU", ranks=(2,)):
    rows = [Row({"ranks": count}, {"ours": [seconds] * 3, "torch": [3.0] * 3}) for count in ranks]
    return Result(case, "", "ms", "", FACTS | {"CPU": cpu}, rows, [])


TINY = ["--ranks", "2", "--sizes", "64", "--repeats", "2", "--peers", "torch"]


@pytest.mark.parametrize(("was", "status"), [(1e-9, 1), (1e9, 0)])
def test_a_run_against_a_baseline(tmp_path, capsys, was, status):
    file = tmp_path / "old.json"
    assert main(["bench", "all_reduce", *TINY, "--json", str(file)]) == 0
    old = json.loads(file.read_text())
    old["rows"][0]["seconds"]["ours"] = [was]
    file.write_text(json.dumps(old))
    capsys.readouterr()
    assert main(["bench", "all_reduce", *TINY, "--baseline", str(file)]) == status
    told = capsys.readouterr()
    assert "| ours " in told.out
    assert (f"mgpu bench: error: slower than {file} by more than 10 %: device cpu, ranks 2" in told.err) == bool(status)


def test_ctrl_c_keeps_the_rows_that_were_measured(tmp_path, capsys, monkeypatch):
    case = cases.load("all_reduce")

    def measure(args):
        rows = case.measure(args)
        yield next(rows)
        rows.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(command.cases, "load", lambda name: dataclasses.replace(case, measure=measure))
    monkeypatch.setattr(command.cases, "NAMES", ["all_reduce"])
    file = tmp_path / "some.json"
    assert main(["bench", "all_reduce", *TINY, "--sizes", "64,128", "--json", str(file)]) == 130
    assert len(json.loads(file.read_text())["rows"]) == 1
    assert "| ours " in capsys.readouterr().out


@pytest.mark.slow
def test_ctrl_c_while_processes_start_shows_no_traceback(tmp_path):
    """To all processes of the group, as a terminal sends it."""
    words = [
        sys.executable,
        "-P",
        "-m",
        "mgpu_core",
        "bench",
        "all_reduce",
        "--ranks",
        "2",
        "--sizes",
        "64",
        "--peers",
        "gloo",
    ]
    child = subprocess.Popen(
        words, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    end = time.monotonic() + 60
    while len(children_of(child.pid)) < 3 and time.monotonic() < end:  # two ranks, and the tracker of resources
        time.sleep(0.05)
    os.killpg(child.pid, signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    assert b"Traceback" not in errors


def children_of(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_slower_by_more_than_is_allowed():
    slower = command.slower_rows
    assert slower(result(1.2, ranks=(2, 4)), result(1.0, ranks=(2, 4)), 10) == ["ranks 2 by 20 %", "ranks 4 by 20 %"]
    assert slower(result(1.2), result(1.0), 21) == []
    assert slower(result(1.2, ranks=(2, 8)), result(1.0), 10) == ["ranks 2 by 20 %"]


@pytest.mark.parametrize(
    ("baseline", "text"), [(result(1.0, case="scatter"), "of the case scatter"), (result(1.0, ranks=(8,)), "no row")]
)
def test_a_baseline_of_something_else(baseline, text):
    with pytest.raises(UsageError, match=text):
        command.slower_rows(result(1.0), baseline, 10)


def test_the_table_of_several_machines():
    fast = dataclasses.replace(result(1.0), environment=FACTS | {"GPU": "2 x a GPU"})
    fast.rows[0].seconds["gloo"] = [4.0]
    text = compare([result(2.0, ranks=(2, 4)), fast, result(1.0, case="scatter")])
    assert text.splitlines() == [
        "### All-reduce",
        "",
        "| machine | row | ours (ms) | torch/ours | gloo/ours |",
        "| --- | --- | ---: | ---: | ---: |",
        "| a CPU; torch 2.14 | ranks 2 | 2000 | 1.50 |  |",
        "| a CPU; torch 2.14 | ranks 4 | 2000 | 1.50 |  |",
        "| 2 x a GPU; torch 2.14 | ranks 2 | 1000 | 3.00 | 4.00 |",
        "",
        "### Scatter",
        "",
        "| machine | row | ours (ms) | torch/ours |",
        "| --- | --- | ---: | ---: |",
        "| a CPU; torch 2.14 | ranks 2 | 1000 | 3.00 |",
    ]


def test_several_algorithms_are_rows(capsys):
    assert main(["bench", "all_reduce", *TINY, "--algorithms", "ring,tree"]) == 0
    out = capsys.readouterr().out
    assert [line.split("|")[1].strip() for line in out.splitlines() if "| ours " in line] == ["ring", "tree"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["all_reduce", "--algorithms", "nccl"], "NCCL needs GPUs"),
        (["all_reduce", "--ranks", "1"], "wanted 2 to 24, got 1"),
        (["all_reduce", "--baseline", "missing.json"], "missing.json"),
        (["all_reduce", "--json", "no/such/folder/x.json"], "no/such/folder"),
        (["table", "missing.json"], "missing.json"),
    ],
)
def test_what_cannot_be_served(words, text, capsys):
    assert main(["bench", *words]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("mgpu bench: error: ")
    assert (text in told.err, told.out) == (True, "")


def test_a_gpu_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", "scatter", "--device", "cuda"]) == 2
    assert "torch sees no GPU here" in capsys.readouterr().err
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert main(["bench", "scatter", "--device", "cuda"]) == 2
    assert "say --peers torch" in capsys.readouterr().err


def test_an_installed_package_has_no_commit(monkeypatch, tmp_path):
    monkeypatch.setattr("mgpu_core.tools.bench.environment.__file__", str(tmp_path / "a" / "b" / "environment.py"))
    assert environment()["commit"] == "none"
