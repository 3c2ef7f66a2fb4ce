"""The ladder's command: what it refuses, what it prints, and a whole measurement on a stand-in for the GPU."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.ladder import cuda_library, languages, measure, page, run
from benchmarks.ladder.rungs import CHANGED, KERNELS, RUNGS, Unavailable
from mgpu_core.tools.bench.report import report_machine
from mgpu_core.tools.bench.result import Result

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(languages, "device", lambda: None)


@pytest.fixture
def stand_in(monkeypatch):
    """Use the CPU instead of a GPU; every rung is the shipped kernel."""
    monkeypatch.setattr("mgpu_core.tools.bench.timing.QUIET_SECONDS", 0.0)
    monkeypatch.setattr("mgpu_core.tools.bench.timing._cache_nbytes", lambda: 1024)
    monkeypatch.setattr(measure, "IMAGES", 3)
    monkeypatch.setattr(measure, "peak_of", lambda _: 1000)
    monkeypatch.setattr(languages, "device", lambda: CPU)
    rungs = dict.fromkeys(("cuda", "numba"), lambda problem, rung: problem.shipped())
    monkeypatch.setattr(languages, "usable", lambda wanted, _: rungs | {"cupy": Unavailable("no cupy: none")})
    return rungs


def test_without_a_gpu_there_are_no_times(no_gpu, capsys):
    assert run.main(["pack"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "run.py: error: torch sees no GPU to measure on; `--check` compares the numba rungs in its simulator\n"
    )


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--check", "--languages", "cuda"], "without a GPU only numba's rungs run, in its simulator"),
        (["sgd"], "invalid choice: 'sgd'"),
        (["--languages", "triton"], "'triton' is not one of cuda, cupy, numba"),
        (["--size", "64Q"], "'64Q' is not a size"),
    ],
)
def test_what_cannot_be_served_is_2(no_gpu, capsys, arguments, reason):
    try:
        status = run.main(arguments)
    except SystemExit as end:
        status = end.code
    assert status == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("run.py: error: ")
    assert err.count("\n") == 1
    assert reason in err


@pytest.mark.parametrize("code", [0, 1])
def test_a_check_without_a_gpu_has_a_process_with_the_simulator(no_gpu, monkeypatch, capsys, code):
    started = []

    def start(command, env):
        started.append((command[1:], env[run.SIMULATOR]))
        return SimpleNamespace(returncode=code)

    monkeypatch.delenv(run.SIMULATOR, raising=False)
    monkeypatch.setattr(run.subprocess, "run", start)
    assert run.main(["pack", "--check"]) == code
    assert started == [(["-P", str(Path(run.__file__).resolve()), "pack", "--check", "--languages", "numba"], "1")]
    assert capsys.readouterr().err == "no GPU: numba's rungs in its simulator\n"


def test_a_measurement(stand_in, tmp_path, capsys):
    path = tmp_path / "ladder.json"
    assert run.main(["--size", "16K", "--repeats", "2", "--json", str(path)]) == 0
    out, err = capsys.readouterr()
    assert err.splitlines() == ["without cupy: no cupy: none", *(f"{kernel} ..." for kernel in KERNELS)]
    result = Result.read(path)
    assert [row.labels["kernel"] for row in result.rows] == list(KERNELS)
    contestants = ["ours", *(f"{rung} {language}" for rung in RUNGS for language in stand_in), "copy"]
    assert all(list(row.seconds) == contestants for row in result.rows)
    assert {len(times) for row in result.rows for times in row.seconds.values()} == {2}
    assert [row.nbytes for row in result.rows] == [2 * 16384, 5 * 16384, 5 * (8 + 784 * 5)]
    assert [row.labels["moved"] for row in result.rows] == ["2.00", "2.20", "1.40"]
    assert out.endswith(page.render(result) + "\n")


def test_the_results_of_the_other_benchmarks_know_it(stand_in, tmp_path):
    """The file lies among theirs, so `benchmarks/run.py report` must be able to draw it."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: mnist)")
    assert run.main(["--size", "16K", "--repeats", "1", "--json", str(tmp_path / "ladder.json")]) == 0
    text = report_machine(tmp_path).read_text()
    assert all(f"| {kernel} " in text for kernel in KERNELS)
    assert (tmp_path / "ladder.png").stat().st_size > 0


def test_a_rung_that_does_not_compile_is_left_out(stand_in, monkeypatch, tmp_path, capsys):
    """The others have their times, and the file is written."""

    def refuses(problem, rung):
        if rung == "fused":
            raise TypeError("Signature mismatch")
        return problem.shipped()

    monkeypatch.setitem(stand_in, "numba", refuses)
    path = tmp_path / "ladder.json"
    assert run.main(["pack", "--size", "16K", "--repeats", "1", "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert {"fused cuda", "naive numba"} <= set(row["seconds"])
    assert "fused numba" not in row["seconds"]
    assert "without fused numba: TypeError: Signature mismatch" in capsys.readouterr().err


def test_a_language_is_used_only_if_it_launches(monkeypatch):
    def no_driver(problem, rung):
        raise RuntimeError("no driver")

    def refuses(problem, rung):
        return lambda: (_ for _ in ()).throw(OSError("refused"))

    found = {"cuda": lambda problem, rung: lambda: None, "cupy": no_driver, "numba": refuses}
    monkeypatch.setattr(languages, "load", found.get)
    usable = languages.usable(("numba", "cuda", "cupy"), None)
    assert usable["cuda"] is found["cuda"]
    assert [str(usable[name]) for name in ("cupy", "numba")] == ["RuntimeError: no driver", "OSError: refused"]
    assert list(languages.usable(("numba",), None)) == ["numba"]


def test_one_kernel_alone(stand_in, capsys):
    assert run.main(["gather_rows", "--size", "16K", "--repeats", "1"]) == 0
    assert "### gather_rows, " in capsys.readouterr().out


def test_a_wrong_rung_is_not_timed(stand_in, capsys):
    stand_in["numba"] = lambda problem, rung: problem.shipped() if rung != "fused" else lambda: None
    assert run.main(["sum_ranks", "--size", "1K", "--repeats", "1"]) == 1
    out, err = capsys.readouterr()
    assert "run.py: error: kernel sum_ranks, size 1 KiB, peak 1000, moved 2.20: fused numba: 256 wrong" in err
    assert "| naive" not in out


def test_too_small_a_size(stand_in, capsys):
    for kernel, reason in (("pack", "less than 16 for each of 64 tensors"), ("gather_rows", "less than one row")):
        assert run.main([kernel, "--size", "512"]) == 2
        assert reason in capsys.readouterr().err


def test_a_language_that_was_asked_for_must_be_there(stand_in, capsys):
    assert run.main(["pack", "--languages", "cupy"]) == 2
    assert capsys.readouterr().err == "run.py: error: no cupy: none\n"


def test_build_names_the_libraries(monkeypatch, capsys):
    monkeypatch.setattr(cuda_library, "build", lambda kernel, arch: Path(f"{kernel}-{arch}.so"))
    assert run.main(["build", "--arch", "sm_80"]) == 0
    assert capsys.readouterr().out.split() == [f"{kernel}-sm_80.so" for kernel in KERNELS]


def row(kernel="pack", peak=4000, **more):
    seconds = {"ours": [1e-3] * 3, "naive cuda": [8e-3, 9e-3, 8e-3], "fused cuda": [1e-3] * 3, "copy": [0.5e-3] * 3}
    labels = {"kernel": kernel, "size": 64 << 20, "peak": peak, "moved": "2.00"}
    return {"labels": labels, "seconds": seconds | more, "nbytes": 2_000_000_000, "bus_factor": None}


def stored(folder, *rows):
    """A result as the command would have left it."""
    facts = {"GPU": "1 x Fake GPU", "driver": "580.1", "torch": "2.11.0", "CUDA": "13.0", "commit": "abc"}
    content = {"format": "mgpu_core benchmark 1", "case": "ladder", "summary": "", "unit": "us", "formula": ""}
    folder.mkdir()
    content |= {"environment": facts, "rows": list(rows), "verdicts": []}
    (folder / "ladder.json").write_text(json.dumps(content))


def cells(text, first):
    """The cells of the line that begins with this one."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {first} ")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_counts_what_the_work_needs(tmp_path):
    stored(tmp_path / "gpu", row())
    text = page.readme(tmp_path)
    assert cells(text, "naive") == ["naive", "cuda", "8000", "8800", "250", "6%", "2.00", CHANGED["pack"]["naive"]]
    assert cells(text, "fused")[2:7] == ["1000", "1000", "2000", "50%", "1.00"]
    assert cells(text, "shipped")[4:6] == ["2000", "50%"]
    assert cells(text, "copy")[4:6] == ["4000", "100%"]
    assert "coalesced" not in text
    assert "**1 x Fake GPU**; driver 580.1, torch 2.11.0, CUDA 13.0, commit abc" in text
    assert "peak: 4000 GB/s, the memory's clock x 2 x the width of its bus" in text
    assert "### pack, 64 MiB in 64 tensors" in text


def test_where_the_peak_is_not_known_the_copy_is_it(tmp_path):
    stored(tmp_path / "gpu", row(peak=0))
    text = page.readme(tmp_path)
    assert cells(text, "shipped")[5] == "50%"
    assert "peak: what the copy reached" in text


def test_the_peak_is_clock_times_bus(monkeypatch):
    facts = SimpleNamespace(memory_clock_rate=2_619_000, memory_bus_width=5120)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    assert measure.peak_of(CPU) == 3352
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace())
    assert measure.peak_of(CPU) == 0


def test_the_readme_is_written_between_its_markers(tmp_path, monkeypatch):
    readme, results = tmp_path / "README.md", tmp_path / "results"
    monkeypatch.setattr(page, "README", readme)
    readme.write_text(f"before\n{page.BEGIN}old\n{page.END}behind\n")
    results.mkdir()
    assert run.main(["readme", "--results", str(results)]) == 0
    assert readme.read_text() == f"before\n{page.BEGIN}{page.NO_FIGURES}{page.END}behind\n"
    stored(results / "gpu", row())
    assert run.main(["readme", "--results", str(results)]) == 0
    assert readme.read_text() == f"before\n{page.BEGIN}{page.readme(results)}{page.END}behind\n"
    readme.write_text("no markers")
    assert run.main(["readme", "--results", str(results)]) == 2
    assert readme.read_text() == "no markers"


def test_results_of_something_else_are_refused(tmp_path, capsys):
    stored(tmp_path / "gpu", row(kernel="sgd"))
    assert run.main(["readme", "--results", str(tmp_path)]) == 2
    assert "ladder.json" in capsys.readouterr().err


def test_the_readme_holds_todays_figures():
    text = page.README.read_text()
    assert page.filled(text, page.readme(run.RESULTS)) == text, "run `python benchmarks/ladder/run.py readme`"


def test_every_rung_has_its_words_and_its_index_in_the_readme():
    assert {kernel: tuple(rungs) for kernel, rungs in CHANGED.items()} == dict.fromkeys(KERNELS, RUNGS)
    text = page.README.read_text()
    for kernel in KERNELS:
        assert f"## {kernel}\n" in text
    for rung in RUNGS:
        assert text.lower().count(f"| {rung} |") >= len(KERNELS)
