"""`mgpu bench`: baselines, the table of several machines, and requests that cannot be served."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mgpu_core.support.tables import text_of
from mgpu_core.tools.bench.baseline import compared
from mgpu_core.tools.bench.case import Row, UsageError
from mgpu_core.tools.bench.environment import environment
from mgpu_core.tools.bench.report import compare
from mgpu_core.tools.bench.result import Result
from mgpu_core.tools.cli import main

pytestmark = pytest.mark.slow

FACTS = {"CPU": "a CPU", "GPU": "none", "torch": "2.14"}


def result(seconds, *, case="all_reduce", cpu="a CPU", ranks=(2,)):
    rows = [Row({"type": "float32", "ranks": count}, {"ours": [seconds] * 3, "torch": [3.0] * 3}) for count in ranks]
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


def test_a_baseline_does_not_judge_what_ran_next_to_other_work(tmp_path, capsys, others):
    file = tmp_path / "old.json"
    two = [*TINY[:3], "64,128", *TINY[4:]]
    assert main(["bench", "all_reduce", *two, "--json", str(file)]) == 0
    old = json.loads(file.read_text())
    for row, was in zip(old["rows"], (1e-9, 1e9), strict=True):  # far slower in the first, which will be marked
        row["seconds"]["ours"] = [was]
    file.write_text(json.dumps(old))
    capsys.readouterr()
    others.looks = [0.0, 1.0, 0.0, 0.0]  # at the start, then before and after each row
    assert main(["bench", "all_reduce", *two, "--baseline", str(file)]) == 0
    told = capsys.readouterr()
    assert "mgpu bench: note: 1 of 2 rows were not judged: the machine was busy" in told.err
    assert [line.split("|")[1].strip() for line in told.out.splitlines() if "| ours " in line] == ["64 B *", "128 B"]
    others.looks = [1.0]
    assert main(["bench", "all_reduce", *two, "--baseline", str(file)]) == 1
    told = capsys.readouterr()
    assert "mgpu bench: note: other programs keep 1.0 of " in told.err
    assert told.err.endswith(f"mgpu bench: error: --baseline {file}: no row was judged\n")


def test_a_check_does_not_judge_what_ran_next_to_other_work(capsys, others):
    others.looks = [1.0]
    words = ["--ranks", "2", "--peers", "torch", "--repeats", "1", "--sizes", "64M", "--check"]
    assert main(["bench", "all_reduce", *words]) == 1
    told = capsys.readouterr()
    assert "* not judged: busy: ranks 2, size 64 MiB" in told.out
    assert "every row with a bound was measured on a busy machine" in told.err


class Running:
    """`mgpu bench` as a process group of its own, which Ctrl-C reaches as from a terminal."""

    def __init__(self, folder: Path, *words: str) -> None:
        command = [sys.executable, "-P", "-m", "mgpu_core", "bench", *words]
        self.out, self.err = folder / "out", folder / "err"
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=err, start_new_session=True)

    def wait_until(self, happened):
        end = time.monotonic() + 90
        while not happened():
            assert (self.process.poll(), time.monotonic() < end) == (None, True), self.err.read_text()
            time.sleep(0.01)

    def children(self) -> int:
        return len(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split())

    def interrupted(self) -> tuple[int, str]:
        """Send Ctrl-C to all processes of the group; return the status, and what stderr has."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait(timeout=60), self.err.read_text()


@pytest.mark.parametrize("processes", [0, 1, 2, 3])
def test_ctrl_c_while_processes_start_shows_no_traceback(tmp_path, processes):
    """While torch is imported, and with the tracker of resources and none, one and two of the ranks' processes."""
    running = Running(tmp_path, "all_reduce", "--ranks", "2", "--sizes", "64", "--peers", "gloo")
    running.wait_until(lambda: running.children() >= processes)
    if not processes:
        time.sleep(0.7)
    status, err = running.interrupted()
    assert (status, [line for line in err.splitlines() if not line.startswith("mgpu bench: note: ")]) == (130, [])


@pytest.mark.parametrize("peer", ["torch", "gloo"])
def test_ctrl_c_keeps_the_rows_that_were_measured(tmp_path, peer):
    pytest.importorskip("matplotlib")
    words = ["--ranks", "2", "--sizes", "64,128,1K", "--repeats", "100", "--peers", peer]
    running = Running(tmp_path, "all_reduce", *words, "--json", "some.json", "--plot", "some.png")
    running.wait_until(lambda: re.search("row [23] of 3", running.err.read_text()))
    status, err = running.interrupted()
    count = len(json.loads((tmp_path / "some.json").read_text())["rows"])
    assert (status, count in (1, 2)) == (130, True)
    assert running.out.read_text().count("| ours ") == count
    assert (tmp_path / "some.png").read_bytes().startswith(b"\x89PNG")
    assert [line for line in err.splitlines() if not line.startswith("mgpu bench: ")] == []
    assert err.endswith(f"mgpu bench: note: interrupted: {count} of 3 rows are measured\n")


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="only Linux tells what other programs use")
def test_rows_next_to_a_busy_program_are_marked(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        running = Running(tmp_path, "scatter", *TINY, "--json", "some.json")
        assert running.process.wait(timeout=60) == 0
        other.kill()
    assert [row["busy"] for row in json.loads((tmp_path / "some.json").read_text())["rows"]] == [True]
    assert "ours *" in running.out.read_text()
    assert "; rows are marked, and not judged\n" in running.err.read_text()


def test_how_much_slower_rows_are():
    two, four = "type float32, ranks 2", "type float32, ranks 4"
    both = compared(result(1.2, ranks=(2, 4)), result(1.0, ranks=(2, 4)))
    assert both == {two: pytest.approx(20), four: pytest.approx(20)}
    assert compared(result(0.5, ranks=(2, 8)), result(1.0)) == {two: pytest.approx(-50)}
    assert compared(result(1.2), marked(result(1.0))) == {two: None}
    assert compared(marked(result(1.2)), result(1.0)) == {two: None}


def marked(of):
    return dataclasses.replace(of, rows=[dataclasses.replace(row, busy=True) for row in of.rows])


@pytest.mark.parametrize(
    ("baseline", "text"), [(result(1.0, case="scatter"), "of the case scatter"), (result(1.0, ranks=(8,)), "no row")]
)
def test_a_baseline_of_something_else(baseline, text):
    with pytest.raises(UsageError, match=text):
        compared(result(1.0), baseline)


def test_the_table_of_several_machines():
    fast = dataclasses.replace(result(1.0), environment=FACTS | {"GPU": "2 x a GPU"})
    fast.rows[0].seconds["gloo"] = [4.0]
    text = text_of(compare([result(2.0, ranks=(2, 4)), fast, result(1.0, case="scatter")]))
    assert text.splitlines() == [
        "### All-reduce",
        "",
        "In all rows: type float32",
        "",
        "| machine               | ranks | ours (ms) | torch/ours | gloo/ours |",
        "| --------------------- | ----: | --------: | ---------: | --------: |",
        "| a CPU; torch 2.14     |     2 |      2000 |       1.50 |           |",
        "| a CPU; torch 2.14     |     4 |      2000 |       1.50 |           |",
        "| 2 x a GPU; torch 2.14 |     2 |      1000 |       3.00 |      4.00 |",
        "",
        "### Scatter",
        "",
        "In all rows: type float32, ranks 2",
        "",
        "| machine           | ours (ms) | torch/ours |",
        "| ----------------- | --------: | ---------: |",
        "| a CPU; torch 2.14 |      1000 |       3.00 |",
    ]


def test_several_algorithms_take_turns_with_the_peers(tmp_path, capsys):
    file = tmp_path / "rows.json"
    assert main(["bench", "all_reduce", *TINY, "--algorithms", "ring,tree,naive", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    who = [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("| ")][2:]
    assert who == ["ours ring", "ours tree", "ours naive", "torch"]
    assert "algorithm" not in next(line for line in out.splitlines() if line.startswith("In all rows: "))
    (row,) = json.loads(file.read_text())["rows"]
    assert row["labels"]["algorithm"] == "ring"
    assert {name: len(times) for name, times in row["seconds"].items()} == dict.fromkeys(
        ["ours", "ours tree", "ours naive", "torch"], 2
    )
    assert main(["bench", "table", str(file)]) == 0
    titles = capsys.readouterr().out.splitlines()[4].strip("| ").split("|")
    assert [each.strip() for each in titles] == [
        *("machine", "ours (us)", "ours tree/ours", "ours naive/ours", "torch/ours")
    ]


def test_an_older_run_of_one_algorithm_is_a_baseline_of_several(tmp_path, capsys):
    file = tmp_path / "old.json"
    assert main(["bench", "all_reduce", *TINY, "--algorithms", "tree", "--json", str(file)]) == 0
    old = json.loads(file.read_text())
    old["rows"][0]["seconds"]["ours"] = [1e-9]
    del old["rows"][0]["busy"], old["rows"][0]["without"]  # as they were before
    file.write_text(json.dumps(old))
    assert main(["bench", "all_reduce", *TINY, "--algorithms", "ring,tree", "--baseline", str(file)]) == 1
    assert "algorithm tree by " in capsys.readouterr().err


@pytest.mark.parametrize("words", [["all_reduce", "--op", "avg"], ["reduce_scatter", "--op", "avg"]])
def test_what_gloo_cannot_do_is_measured_without_it(words, tmp_path, capsys):
    file = tmp_path / "rows.json"
    sizes = ["--dtype", "int32", "--ranks", "2,4", "--sizes", "64", "--repeats", "1"]
    assert main(["bench", *words, *sizes, "--json", str(file)]) == 0
    told = capsys.readouterr()
    assert told.err == "mgpu bench: note: without gloo: it has no average of int32\n"
    assert told.out.count("without gloo: it has no average of int32") == 1
    rows = json.loads(file.read_text())["rows"]
    assert [(list(row["seconds"]), row["without"]) for row in rows] == [
        (["ours", "torch"], {"gloo": "it has no average of int32"})
    ] * 2
    assert main(["bench", *words, *sizes, "--peers", "gloo,torch"]) == 2
    assert capsys.readouterr() == ("", "mgpu bench: error: --peers gloo: it has no average of int32\n")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["all_reduce", "--algorithms", "nccl"], "nccl: it needs GPUs"),
        (["all_reduce", "--algorithms", "auto,push"], "push: it needs GPUs"),
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
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert main(["bench", "scatter", "--device", "cuda", "--peers", "gloo"]) == 2
    assert capsys.readouterr().err == "mgpu bench: error: --peers gloo: it is measured on the CPU only\n"


def test_an_installed_package_has_no_commit(monkeypatch, tmp_path):
    monkeypatch.setattr("mgpu_core.tools.bench.environment.__file__", str(tmp_path / "a" / "b" / "environment.py"))
    monkeypatch.delenv("MGPU_BENCH_COMMIT", raising=False)
    assert "commit" not in environment()
