"""The command line: what it prints, what it writes, and how it refuses."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mgpu_core.tools.cli import main

pytestmark = pytest.mark.slow

QUICK = ["--engine", "plain", "--device-ids", "cpu", "--epochs", "1"]
COMMAND = [sys.executable, "-P", "-m", "mgpu_core", "mnist"]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command in this process; returns exit status, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            status = main(["mnist", *map(str, arguments)])
        except SystemExit as stopped:
            status = int(str(stopped.code))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def curve(out: str) -> list[str]:
    """Return the lines of the epochs, without their speed."""
    return [line.rpartition("  ")[0] for line in out.splitlines() if line.startswith("epoch ")]


def epochs_in(path: Path) -> int:
    return len(torch.load(path, weights_only=True)["epochs"])


def test_a_line_per_epoch(run: Run, folder: Path) -> None:
    status, out, err = run("--device-ids", "cpu, cpu", "--epochs", 2, "--data", folder)
    assert (status, err) == (0, "")
    introduction, first, second = out.splitlines()
    assert introduction == "simplenet, step on cpu, cpu, batch 64, accumulate 1, float32, lr 0.01, seed 0"
    assert re.fullmatch(r"epoch 1/2  loss 2\.\d{4}  accuracy \d+\.00%  [\d,]+ images/s", first)
    assert second.startswith("epoch 2/2  loss 2.")


@pytest.mark.parametrize("engine", ["step", "drop-in", "plain"])
def test_the_figures_of_the_first_epoch(run: Run, engine: str) -> None:
    devices = "cpu" if engine == "plain" else "cpu,cpu"
    status, out, _ = run("--engine", engine, "--device-ids", devices, "--epochs", 1)
    assert status == 0
    words = curve(out)[0].split()
    assert float(words[3]) == pytest.approx(1.7885, abs=2e-4)
    assert float(words[5].rstrip("%")) == pytest.approx(76.0, abs=0.3)


def test_settings_are_those_of_the_options(run: Run, folder: Path) -> None:
    arguments = ["--model", "cnn", "--accumulate", 3, "--batch", 4, "--amp", "bfloat16", "--lr", 0.1, "--seed", 5]
    status, out, _ = run(*arguments, "--data", folder, "--device-ids", "cpu", "--epochs", 1)
    assert status == 0
    assert out.startswith("cnn, step on cpu, batch 4, accumulate 3, bfloat16, lr 0.1, seed 5\n")


@pytest.mark.usefixtures("no_gpu")
def test_ranks_on_a_machine_without_a_gpu(run: Run, folder: Path) -> None:
    quick = ["--data", folder, "--epochs", 1]
    assert "step on cpu, cpu, batch" in run(*quick)[1]
    assert "drop-in on cpu, cpu, cpu, batch" in run(*quick, "--ranks", 3, "--engine", "drop-in")[1]
    assert "plain on cpu, batch" in run(*quick, "--engine", "plain")[1]


def test_the_outputs_do_not_change_the_training(run: Run, folder: Path) -> None:
    pytest.importorskip("matplotlib")
    files = [folder / "a.pt", folder / "a.png", folder / "a.html"]
    arguments = ["--device-ids", "cpu,cpu", "--epochs", 2, "--batch", 8, "--data", folder]
    status, out, _ = run(*arguments, "--save", files[0], "--plot", files[1], "--explain", files[2])
    assert status == 0
    assert out.splitlines()[-3:] == [f"written: {path}" for path in files]
    assert epochs_in(files[0]) == 2
    assert files[1].read_bytes().startswith(b"\x89PNG\r\n")
    assert files[2].read_text().startswith("<!")
    assert curve(out) == curve(run(*arguments)[1])


def test_save_and_resume(run: Run, folder: Path) -> None:
    path = folder / "a.pt"
    whole = run(*QUICK, "--data", folder, "--epochs", 3)[1]
    first = run(*QUICK, "--data", folder, "--save", path)[1]
    status, then, _ = run(*QUICK, "--data", folder, "--resume", path, "--save", path, "--epochs", 3)
    assert status == 0
    assert f"resumed {path} after epoch 1\n" in then
    assert curve(whole)[1:] == curve(then)
    assert curve(first) == [curve(whole)[0].replace("1/3", "1/1")]
    assert epochs_in(path) == 3


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--ranks", "0"], "ranks: wanted a number from 1 to"),
        (["--batch", "0"], "batch: wanted a number from 1 to"),
        (["--amp", "float16", "--engine", "plain"], "amp: the plain engine trains in full precision"),
        (["--explain", "a.html", "--engine", "plain"], "explain: the plain engine has one device"),
        (["--lr", "nan"], "lr: wanted a finite number above 0, got nan"),
        (["--seed", "-1"], "seed: wanted"),
        (["--device-ids", "cuda:99"], "device cuda:99 does not exist"),
        (["--device-ids", "99"], "device cuda:99 does not exist"),
        (["--device-ids", ""], "'' is not a device"),
        (["--device-ids", "cpu,cpu", "--ranks", "3"], "ranks: wanted 3, there are 2 devices"),
        (["--device-ids", "cpu,cpu", "--engine", "plain"], "the plain engine trains on one device, got 2"),
        (["--data", "{folder}/missing"], "{folder}/missing/train-images-idx3-ubyte"),
        (["--data", "{folder}"], "{folder}/train-images-idx3-ubyte"),
        (["--save", "{folder}"], "wanted the name of a file"),
        (["--save", "{folder}/missing/a.pt"], "cannot write into its folder (No such file or directory)"),
        (["--plot", "{folder}/missing/a.png"], "cannot write into its folder"),
        (["--plot", "{folder}/a.jpeg"], "wanted a name that ends in .png"),
        (["--save", "{folder}/a", "--explain", "{folder}/a"], "two of these are the same file"),
        (["--resume", "{folder}/noise", "--explain", "{folder}/noise"], "two of these are the same file"),
        (["--resume", "{folder}/a.pt"], "No such file or directory: '{folder}/a.pt'"),
        (["--resume", "{folder}"], "Is a directory: '{folder}'"),
        (["--resume", "{folder}/noise"], "{folder}/noise is damaged, or not a checkpoint of mgpu mnist"),
        (["--model", "resnet"], "model: wanted one of simplenet, cnn, got 'resnet'"),
        (["--engine", "ddp"], "engine: wanted one of step, drop-in, plain, got 'ddp'"),
        (["--amp", "float64"], "amp: wanted one of "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_refused_in_one_line(run: Run, tmp_path: Path, arguments: list[str], told: str) -> None:
    if "--data" in arguments:
        pytest.importorskip("torchvision")
    (tmp_path / "noise").write_bytes(b"PK\3\4" + bytes(range(256)))
    status, out, err = run(*(argument.format(folder=tmp_path) for argument in arguments))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("mgpu mnist: error: ")
    assert told.format(folder=tmp_path) in err
    assert [path.name for path in tmp_path.iterdir()] == ["noise"]


@pytest.mark.parametrize("arguments", [["--lr", "x"], ["--batch", "1.5"]])
def test_what_argparse_refuses(run: Run, arguments: list[str]) -> None:
    status, _, err = run(*arguments)
    assert status == 2
    assert f"argument {arguments[0]}: invalid" in err


@pytest.mark.parametrize("option", ["--json", "--shares", "--capture"])
def test_options_that_are_no_more(run: Run, option: str) -> None:
    status, _, err = run(option)
    assert status == 2
    assert f"unrecognized arguments: {option}" in err


def test_a_missing_extra_is_told_before_the_training(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, err = run(*QUICK, "--plot", tmp_path / "a.png", "--save", tmp_path / "a.pt")
    assert (status, out) == (2, "")
    assert "mgpu mnist: error: a picture needs matplotlib: pip install 'mgpu-core[mnist]'" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("engine", [["--engine", "plain"], ["--device-ids", "cpu,cpu"]], ids=["plain", "step"])
def test_a_loss_that_is_not_finite(run: Run, tmp_path: Path, engine: list[str]) -> None:
    status, _, err = run(*engine, "--epochs", 1, "--lr", "1e30", "--save", tmp_path / "a.pt")
    assert status == 1
    assert err == "mgpu mnist: error: epoch 1: the loss is nan; a smaller lr than 1e+30 may help; epochs done: 0\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "engine",
    [["--engine", "plain"], ["--device-ids", "cpu,cpu"], ["--engine", "drop-in", "--device-ids", "cpu,cpu"]],
    ids=["plain", "step", "drop-in"],
)
def test_ctrl_c(tmp_path: Path, engine: list[str]) -> None:
    path = tmp_path / "a.pt"
    command = [*COMMAND, *engine, "--epochs", "100000", "--save", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("epoch 2/"):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert re.fullmatch(r"mgpu mnist: error: interrupted; epochs done: \d+\n", err)
    assert epochs_in(path) >= 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.pt"]


def test_a_reader_that_leaves() -> None:
    command = [*COMMAND, "--engine", "plain", "--epochs", "100000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 1
        assert process.stderr.read() == "mgpu mnist: error: [Errno 32] Broken pipe; epochs done: 1\n"
