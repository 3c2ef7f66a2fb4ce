"""The figures of GPUs in docs/gpu.md: the rows, the sentence where there are none, and that the page holds today's."""

import importlib.util
from pathlib import Path

import pytest

_SPEC = importlib.util.spec_from_file_location("gpu_table", Path(__file__).parent.parent / "tools" / "gpu_table.py")
tool = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tool)

from mgpu_core.tools.bench.case import Row, Ruling  # noqa: E402 (the tool makes them findable)
from mgpu_core.tools.bench.result import Result  # noqa: E402

FACTS = {"CPU": "a CPU", "GPU": "1 x Fake GPU", "driver": "580.1", "torch": "2.11.0", "CUDA": "13.0", "commit": "abc"}
COPY = {"ours": [2e-4, 1e-4, 3e-4], "cat": [3e-4] * 3, "copy": [1.9e-4] * 3}


def result(case="pack", labels=None, seconds=COPY, verdicts=()):
    labels = {"device": "cuda", "size": 256 << 20, "tensors": 64, "clock": "device"} | (labels or {})
    row = Row(labels, seconds, 2 * 256 << 20)
    return Result(case, "a summary", "us", "a formula", FACTS, [row], list(verdicts))


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A page with markers and a folder of results with one machine that has no GPU."""
    (tmp_path / "gpu.md").write_text(f"before\n{tool.BEGIN}old\n{tool.END}behind\n")
    folder = tmp_path / "results"
    (folder / "a-cpu").mkdir(parents=True)
    (folder / "README.md").touch()
    result(labels={"device": "cpu"}).write(folder / "a-cpu" / "pack.json")
    Result("all_reduce", "", "us", "", FACTS, [Row({"ranks": 2, "size": 4}, {"ours": [1.0]})], []).write(
        folder / "a-cpu" / "all_reduce.json"
    )
    monkeypatch.setattr(tool, "PAGE", tmp_path / "gpu.md")
    monkeypatch.setattr(tool, "RESULTS", folder)
    return folder


def test_without_a_gpu_it_says_so(results):
    assert tool.main([]) == 0
    assert tool.PAGE.read_text() == f"before\n{tool.BEGIN}Not yet measured on a GPU.\n{tool.END}behind\n"


def test_a_table(results):
    (results / "a-gpu").mkdir()
    verdicts = [Ruling("x: copy / ours >= 0.9", 0.95, True), Ruling("y: cat / ours >= 2", 1.5, False)]
    result(verdicts=verdicts).write(results / "a-gpu" / "pack.json")
    result("sum_ranks", {"tensors": 1}, {"ours": [2e-4]}).write(results / "a-gpu" / "sum_ranks.json")
    wall = {"tensors": 10000, "clock": "wall"}
    result("unpack", wall, verdicts=[Ruling("z", None, None)]).write(results / "a-gpu" / "unpack.json")
    assert tool.main([]) == 0
    assert tool.PAGE.read_text().splitlines()[2:-2] == [
        "1 x Fake GPU; driver 580.1, torch 2.11.0, CUDA 13.0, commit abc:",
        "",
        "| kernel | time (us) | GB/s | of a copy's | times as long as ours |",
        "|---|--:|--:|--:|---|",
        "| `pack`, 256 MiB in 64 tensors | 200.0 | 2684 | 0.95 | cat 1.50 |",
        "| `sum_ranks`, 256 MiB | 200.0 | 2684 |  |  |",
        "| `unpack`, 256 MiB in 10,000 tensors, with the host's time | 200.0 | 2684 | 0.95 | cat 1.50 |",
        "",
        "1 of 3 bounds held.",
        "",
        "* missed: y: cat / ours >= 2 (1.50)",
    ]


def test_check_compares_and_writes_nothing(results, capsys):
    stale = tool.PAGE.read_text()
    assert tool.main(["--check"]) == 1
    assert tool.PAGE.read_text() == stale
    assert "docs/gpu.md is stale" in capsys.readouterr().err
    assert tool.main([]) == 0
    assert tool.main(["--check"]) == 0


@pytest.mark.parametrize(
    "text", ["", f"{tool.BEGIN}", f"{tool.END}{tool.BEGIN}", f"{tool.BEGIN}{tool.BEGIN}{tool.END}"]
)
def test_a_page_without_markers_is_2(results, text, capsys):
    tool.PAGE.write_text(text)
    assert tool.main([]) == 2
    assert tool.PAGE.read_text() == text
    assert "wanted one <!-- gpu-table -->" in capsys.readouterr().err


def test_the_page_is_that_of_today():
    assert tool.main(["--check"]) == 0, "run `python tools/gpu_table.py`"
