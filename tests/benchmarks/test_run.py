"""The command: tables, files, reports and exit statuses, on tiny sizes."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import run
from benchmarks.run import main
from mgpu_core.support.tables import text_of
from mgpu_core.tools.bench import cases, plot
from mgpu_core.tools.bench.case import Row, Ruling
from mgpu_core.tools.bench.report import _section, bound_line, lines_of, report_machine, table
from mgpu_core.tools.bench.result import Result
from mgpu_core.tools.bench.titles import TITLES

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--peers", "torch", "--ranks", "2,3", "--sizes", "1K", "--repeats", "2"]

RESULT = Result(
    case="all_reduce",
    summary="a summary",
    unit="us",
    formula="a formula",
    environment={"CPU": "a CPU", "GPU": "none", "torch": "2"},
    rows=[
        Row({"ranks": ranks, "size": size, "count": size // 4}, {"ours": [1e-6], "gloo": [6e-6]}, size, 1.5)
        for ranks in (2, 4)
        for size in (1000, 2000)
    ],
    verdicts=[Ruling("ranks 2: gloo / ours >= 6", 6.0, True), Ruling("ranks 8: ...", None, None)],
)


def test_a_table_is_markdown_with_ratios() -> None:
    titles, rule, ours, gloo, *_ = str(table(RESULT)).splitlines()
    assert [cell.strip() for cell in titles.strip("|").split("|")] == [
        *("ranks", "size", "count", "who", "time (us)", "p90", "algbw", "busbw", "peer/ours")
    ]
    assert set(rule) == set("|-: ")
    assert [cell.strip() for cell in ours.strip("|").split("|")] == [
        *("2", "1000 B", "250", "ours", "1.000", "1.000", "1.00", "1.50", "1.00")
    ]
    assert [cell.strip() for cell in gloo.strip("|").split("|")][3:] == [
        *("gloo", "6.000", "6.000", "0.17", "0.25", "6.00")
    ]
    assert len({len(line) for line in str(table(RESULT)).splitlines()}) == 1


def test_columns_of_one_value_are_a_line_above_the_table() -> None:
    rows = [Row({"size": 64 << 20, "type": "float32", "ranks": ranks}, {"ours": [1e-6]}) for ranks in (2, 4)]
    first, _, titles = text_of(lines_of(dataclasses.replace(RESULT, rows=rows))).splitlines()[:3]
    assert first == "In all rows: size 64 MiB, type float32"
    assert [cell.strip() for cell in titles.strip("|").split("|")][:2] == ["ranks", "who"]


def test_bounds_name_sizes_with_their_unit() -> None:
    assert bound_line(Ruling("ranks 8, size 67108864: gloo / ours >= 13", 11.644, False)) == (
        "* MISSED: ranks 8, size 64 MiB: gloo / ours >= 13 (11.64)"
    )


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    RESULT.write(tmp_path / "x.json")
    assert Result.read(tmp_path / "x.json") == RESULT


def test_report_draws_from_the_files_alone(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "box"
    folder.mkdir()
    for stem in ("another", "sgd", "train_step"):
        RESULT.write(folder / f"{stem}.json")
    (folder / "notes.toml").write_text('summary = """\nAll is well.\n"""\n')
    assert main(["report", "--results", str(tmp_path)]) == 0
    text = (folder / "README.md").read_text()
    assert text.startswith("# box\n\nAll is well.\n\n* CPU: a CPU\n")
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings == ["## A training step with TrainStep", "## The SGD kernel", "## another"]
    assert text.count("* CPU: a CPU") == 1
    assert "![sgd](sgd.png)" in text
    assert "* held: ranks 2: gloo / ours >= 6 (6.000)" in text
    assert "* not measured: ranks 8: ..." in text
    assert (folder / "sgd.png").read_bytes().startswith(b"\x89PNG")
    report_machine(folder)
    assert (folder / "README.md").read_text() == text


@pytest.mark.parametrize(("rows", "folded"), [(6, False), (7, True)])
def test_long_tables_are_folded(rows: int, folded: bool) -> None:
    many = [Row({"ranks": ranks}, {"ours": [1e-6], "gloo": [2e-6]}) for ranks in range(rows)]
    section = _section(dataclasses.replace(RESULT, rows=many), "all_reduce", {})
    assert ("<summary>14 rows</summary>" in section) == folded
    assert section.count("<details>") == section.count("</details>") == int(folded)


def test_facts_of_one_case_are_in_its_section(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for stem, commit in (("sgd", "abc"), ("adamw", "def")):
        dataclasses.replace(RESULT, environment=RESULT.environment | {"commit": commit}).write(
            tmp_path / f"{stem}.json"
        )
    top, sgd, adamw = report_machine(tmp_path).read_text().split("\n## ")
    assert "* GPU: none" in top
    assert [part.rstrip().splitlines()[-1] for part in (sgd, adamw)] == ["* commit: abc", "* commit: def"]


def test_every_case_has_a_title_and_every_title_a_case() -> None:
    folders = Path(cases.__file__).parent, Path(run.__file__).parent / "studies"
    files = {path.stem for folder in folders for path in folder.glob("[a-z]*.py")} - {"collectives", "kernels"}
    assert set(TITLES) == {*files, *cases.COLLECTIVES, *cases.KERNELS}
    assert [cases.load(name).name for name in TITLES] == list(TITLES)


def bars_of(rows: list[Row]) -> dict[str, list[float]]:
    """Draw the rows; return the heights of the bars by their label in the legend."""
    figure = pytest.importorskip("matplotlib.figure")
    axis = figure.Figure().subplots()
    plot._draw_bars(axis, rows, "us")
    assert axis.get_yscale() == "linear"
    groups = [group for group in axis.containers if hasattr(group, "patches")]  # the others are whiskers
    return {group.get_label(): [bar.get_height() for bar in group] for group in groups}


def test_bars_are_ratios_of_rows_with_other_contestants() -> None:
    rows = [
        Row({"ranks": 1}, {"ours": [1e-6], "bare": [2e-6]}),
        Row({"ranks": 2}, {"ours": [1e-6], "ddp": [6e-6]}),
    ]
    assert bars_of(rows) == {"ours": [1.0, 1.0], "bare": [2.0], "ddp": [pytest.approx(6)]}


def test_bars_are_percent_where_a_peer_takes_far_longer() -> None:
    rows = [
        Row({"what": "span"}, {"ours": [8e-8], "limit": [1e-7]}),
        Row({"what": "off"}, {"ours": [1e-6], "step": [400e-6]}),
    ]
    assert bars_of(rows) == {"ours / limit": [pytest.approx(80)], "ours / step": [pytest.approx(0.25)]}


def test_sizes_on_the_axis_have_units() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axis = figure.subplots()
    rows = [Row({"size": size}, {"ours": [1e-6]}, size, 1.0) for size in (65536, 131072)]
    plot._draw_rates(axis, rows)
    assert [label.get_text() for label in axis.get_xticklabels()] == ["64 KiB", "128 KiB"]
    assert axis.yaxis.get_major_formatter()(6.0) == "6"


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"format": "mgpu_core benchmark 1", "rows": []}'])
def test_a_foreign_file_is_refused(tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "box").mkdir()
    (tmp_path / "box" / "x.json").write_text(content)
    assert main(["report", "--results", str(tmp_path)]) == 2
    assert "x.json: wanted a file of the format" in capsys.readouterr().err


def test_a_run_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    files = ["--json", str(tmp_path / "x.json"), "--plot", str(tmp_path / "x.png")]
    assert main(["all_reduce", *TINY, *files, "--op", "avg", "--algorithm", "ring"]) == 0
    output = capsys.readouterr().out
    assert "* torch: " in output
    assert "not measured" not in output
    assert "peer/ours" in output
    content = json.loads((tmp_path / "x.json").read_text())
    assert [row["labels"]["ranks"] for row in content["rows"]] == [2, 3]
    assert content["rows"][0]["labels"]["algorithm"] == "ring"
    assert {who: len(times) for who, times in content["rows"][0]["seconds"].items()} == {"ours": 2, "torch": 2}
    assert str(Path.home()) not in (tmp_path / "x.json").read_text()
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_wrong_value_ends_with_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("mgpu_core.comm.all_reduce", lambda tensors, op, *, algorithm: None)
    assert main(["all_reduce", *TINY]) == 1
    captured = capsys.readouterr()
    assert "run.py: error: device cpu, ranks 2, size 1 KiB" in captured.err
    assert "wrong values" in captured.err
    assert "peer/ours" not in captured.out


def test_a_check_that_saw_no_bound_does_not_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["all_reduce", *TINY, "--check"]) == 1
    assert "no row of this run has a bound" in capsys.readouterr().err


@pytest.mark.parametrize(("limit", "status"), [(0.0, 0), (1e9, 1)])
def test_check_compares_with_the_bounds(monkeypatch: pytest.MonkeyPatch, limit: float, status: int) -> None:
    monkeypatch.setattr("mgpu_core.tools.bench.case.Bound.judge", lambda *_: Ruling("x", 1.0, limit <= 1.0))
    assert main(["all_reduce", *TINY, "--check"]) == status


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["all_reduce", "--sizes", "4Q"],
        ["all_reduce", "--peers", "nccl"],
        ["all_reduce", "--ranks", "1"],
        ["all_gather", "--ranks", "8", "--sizes", "16"],
        ["broadcast", "--op", "sum"],
        ["replicate", "--sizes", "1K"],
        ["forward_backward", "--peers", "torch"],
        ["gather_rows", "--plot", "x.pdf"],
        ["scatter", "--json", "no/such/folder/x.json"],
        ["report", "no-such-machine"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_served_is_2_in_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: object = main(arguments)
    except SystemExit as end:
        status = end.code
    captured = capsys.readouterr()
    assert (status, captured.err.count("\n"), captured.out) == (2, 1, "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["broadcast", "--dtype", "int64", *TINY],
        ["gather_rows", "--images", "50", "--batches", "1,8", "--repeats", "1"],
        ["replicate", "--models", "cnn", "--ranks", "2", "--repeats", "1"],
        ["forward_backward", "--batch", "6", "--repeats", "1"],
        ["mnist_epoch", "--images", "100", "--repeats", "1", "--peers", "tensors"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_every_kind_of_case_runs(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert "| ours " in capsys.readouterr().out


def test_the_data_loader_peers_run(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchvision")
    assert main(["mnist_epoch", "--images", "100", "--repeats", "1"]) == 0
    assert main(["gather_rows", "--images", "50", "--batches", "8", "--repeats", "1", "--peers", "dataloader"]) == 0
    assert capsys.readouterr().out.count("| dataloader ") == 2


def test_a_replica_that_computes_something_else_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from mgpu_core.tools.bench.cases import replicate

    spoiled = lambda groups, ranks: lambda *_, **__: [[each + 1 for each in groups[0]] for _ in range(ranks)]  # noqa: E731
    monkeypatch.setattr(replicate, "prepared", spoiled)
    assert main(["replicate", "--models", "cnn", "--ranks", "2", "--repeats", "1"]) == 1


def test_the_drop_in_has_a_row_per_model(tmp_path: Path) -> None:
    from mgpu_core.tools.bench.cases import forward_backward

    assert main(["forward_backward", "--batch", "6", "--repeats", "1", "--json", str(tmp_path / "x.json")]) == 0
    rows = [row["labels"] for row in json.loads((tmp_path / "x.json").read_text())["rows"]]
    assert [(row["model"], row["workers"], row["ranks"]) for row in rows] == [
        ("simplenet", "auto", 2),
        ("cnn", "threads", 2),
    ]
    for bound, row in zip(forward_backward.CASE.bounds, rows, strict=True):
        assert bound.where.items() <= (row | {"batch": forward_backward.BATCH[row["model"]]}).items()


def test_gradients_that_differ_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mgpu_core.DataParallel.forward", lambda self, images: self.module(images.flip(0)))
    assert main(["forward_backward", "--batch", "6", "--repeats", "1"]) == 1


def test_it_runs_as_a_script_from_anywhere(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), "--list"]
    asked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert asked.returncode == 0, asked.stderr
    assert [line.split()[0] for line in asked.stdout.splitlines()][:2] == ["train_step", "forward_backward"]
