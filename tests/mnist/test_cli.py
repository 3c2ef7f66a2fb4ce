"""The command line: what it prints, what it writes, and how it refuses."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mgpu_core.mnist.checkpoint import Checkpoint
from mgpu_core.mnist.report import ConsoleReport
from mgpu_core.mnist.train import main

QUICK = ["--engine", "plain", "--device-ids", "cpu", "--epochs", "1"]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command in this process; returns exit status, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as stopped:
            status = int(str(stopped.code))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_a_line_per_epoch(run: Run, folder: Path) -> None:
    status, out, err = run("--device-ids", "cpu,cpu", "--epochs", 2, "--data", folder)
    assert (status, err) == (0, "")
    introduction, *epochs = out.splitlines()
    assert introduction.startswith("simplenet (101,770 parameters), step on 2 x cpu, batch 64, lr 0.01, seed 0; ")
    assert [line.split()[:2] for line in epochs] == [["epoch", "1/2"], ["epoch", "2/2"]]
    assert all(word in epochs[0] for word in ("loss 2.", "accuracy ", "%", " images/s"))


@pytest.mark.usefixtures("no_gpu")
def test_ranks_on_a_machine_without_a_gpu(run: Run, folder: Path) -> None:
    assert "step on 2 x cpu" in run("--data", folder, "--epochs", 1)[1]
    assert "drop-in on 4 x cpu" in run("--data", folder, "--epochs", 1, "--ranks", 4, "--engine", "drop-in")[1]
    assert "plain on cpu" in run("--data", folder, "--epochs", 1, "--engine", "plain")[1]


def test_accumulate_and_shares(run: Run, folder: Path) -> None:
    arguments = ["--ranks", 2, "--shares", "2,1.5", "--accumulate", 3, "--batch", 4, "--data", folder]
    status, out, _ = run(*arguments, "--device-ids", "cpu,cpu", "--epochs", 1, "--json", folder / "a.json")
    assert status == 0
    assert "step on 2 x cpu, shares 2:1.5, batch 4, accumulate 3, lr 0.01, seed 0; " in out
    settings = json.loads((folder / "a.json").read_text())["settings"]
    assert (settings["engine"], settings["shares"], settings["accumulate"]) == ("step", [2.0, 1.5], 3)


def test_amp(run: Run, folder: Path) -> None:
    arguments = ["--device-ids", "cpu,cpu", "--epochs", 1, "--data", folder, "--json", folder / "a.json"]
    status, out, _ = run(*arguments, "--amp", "bfloat16")
    assert status == 0
    assert "batch 64, bfloat16, lr 0.01" in out
    assert json.loads((folder / "a.json").read_text())["settings"]["amp"] == "bfloat16"


@pytest.mark.usefixtures("no_gpu")
def test_capture_without_a_gpu_says_why_not(run: Run, folder: Path) -> None:
    arguments = ["--device-ids", "cpu", "--epochs", 3, "--batch", 10, "--data", folder]
    with pytest.warns(UserWarning, match="this step is not captured: there are no CUDA graphs on cpu"):
        status, _, _ = run(*arguments, "--capture")
    assert status == 0


def test_json(run: Run, folder: Path) -> None:
    path = folder / "out.json"
    status, *_ = run("--device-ids", "cpu,cpu,cpu", "--epochs", 2, "--batch", 7, "--data", folder, "--json", path)
    assert status == 0
    content = json.loads(path.read_text())
    assert content["settings"]["device_ids"] == ["cpu"] * 3
    assert content["settings"]["batch"] == 7
    assert content["environment"]["devices"] == ["cpu"] * 3
    assert [len(epoch["step_losses"]) for epoch in content["epochs"]] == [5, 5]
    assert {record["rank"] for record in content["counters"]} == {0, 1, 2}
    assert set(content["counters"][0]) == {"operation", "algorithm", "rank", "calls", "nbytes"}


def test_plot(run: Run, folder: Path) -> None:
    pytest.importorskip("matplotlib")
    path = folder / "curves.png"
    status, out, _ = run(*QUICK, "--data", folder, "--plot", path)
    assert status == 0
    assert f"plot: {path}" in out
    assert path.read_bytes().startswith(b"\x89PNG\r\n")


def test_save_and_resume(run: Run, folder: Path) -> None:
    for name, epochs, more in (("a", 3, []), ("b", 1, []), ("b", 3, ["--resume", folder / "b.pt"])):
        files = ["--save", folder / f"{name}.pt", "--json", folder / f"{name}.json"]
        status, *_ = run(*QUICK, "--data", folder, *more, *files, "--epochs", epochs)
        assert status == 0
    first, second = (json.loads((folder / f"{name}.json").read_text()) for name in "ab")
    losses = [[epoch["step_losses"] for epoch in content["epochs"]] for content in (first, second)]
    assert losses[0] == losses[1]
    assert second["resumed_after"] == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--ranks", "0"], "ranks: wanted at least 1, got 0"),
        (["--batch", "0"], "batch: wanted at least 1, got 0"),
        (["--accumulate", "0"], "accumulate: wanted at least 1, got 0"),
        (["--amp", "float16", "--engine", "plain"], "amp: the plain engine trains in full precision"),
        (["--capture", "--engine", "drop-in"], "capture: the drop-in engine has no graphs"),
        (["--shares", "2,x"], "shares: wanted one number per rank, like 2,1, got '2,x'"),
        (["--shares", ""], "shares: wanted one number per rank, like 2,1, got ''"),
        (["--shares", "2,0"], "shares: wanted finite numbers above 0, got 0"),
        (["--shares", "inf,1"], "shares: wanted finite numbers above 0, got inf"),
        (["--shares", "nan,1"], "shares: wanted finite numbers above 0, got nan"),
        (["--shares", "1,2,3", "--device-ids", "cpu,cpu"], "one number per rank: 2 ranks, 3 shares"),
        (["--shares", "1", "--engine", "plain"], "shares: the plain engine trains on one device"),
        (["--epochs", "-1"], "epochs: wanted at least 1, got -1"),
        (["--lr", "nan"], "lr: wanted a finite number above 0, got nan"),
        (["--lr", "-1"], "lr: wanted a finite number above 0, got -1.0"),
        (["--seed", "-1"], "seed: wanted"),
        (["--device-ids", "cuda:99"], "device-ids: there is no device 'cuda:99' here, only cpu"),
        (["--device-ids", "99"], "no device '99' here"),
        (["--device-ids", ""], "no device '' here"),
        (["--device-ids", "cpu,cpu", "--ranks", "3"], "disagree: 3 ranks, 2 devices"),
        (["--device-ids", "cpu,cpu", "--engine", "plain"], "the plain engine trains on one device, got 2: 2 x cpu"),
        (["--data", "{folder}/missing"], "missing: no such folder"),
        (["--data", "{folder}"], "wanted train-images-idx3-ubyte or"),
        (["--save", "{folder}"], "wanted the name of a file"),
        (["--save", "{folder}/missing/a.pt"], "cannot write into its folder (No such file or directory)"),
        (["--json", "{folder}/missing/a.json"], "cannot write into its folder"),
        (["--plot", "{folder}/missing/a.png"], "cannot write into its folder"),
        (["--plot", "{folder}/a.jpeg"], "plot: wanted a name that ends in .png"),
        (["--save", "{folder}/a", "--json", "{folder}/a"], "json and save name the same file"),
        (["--json", "{folder}/a", "--resume", "{folder}/a"], "json and resume name the same file"),
        (["--resume", "{folder}/a.pt"], "a.pt: No such file or directory"),
        (["--resume", "{folder}"], "Is a directory"),
        (["--resume", "{folder}/noise"], "noise is damaged, or not a checkpoint of mgpu mnist"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_refused_in_one_line(run: Run, tmp_path: Path, arguments: list[str], told: str) -> None:
    (tmp_path / "noise").write_bytes(b"PK\3\4" + bytes(range(256)))
    status, out, err = run(*(argument.format(folder=tmp_path) for argument in arguments))
    assert status == 2
    assert told in err
    assert out == ""
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["noise"]


@pytest.mark.parametrize("arguments", [["--model", "resnet"], ["--lr", "x"], ["--batch", "1.5"], ["--engine", "ddp"]])
def test_what_argparse_refuses(run: Run, arguments: list[str]) -> None:
    status, _, err = run(*arguments)
    assert status == 2
    assert f"argument {arguments[0]}: invalid" in err


def test_a_missing_extra_is_told_before_the_training(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, err = run(*QUICK, "--data", folder, "--plot", folder / "a.png", "--save", folder / "a.pt")
    assert (status, out) == (2, "")
    assert "mgpu mnist: error: a picture needs matplotlib: pip install 'mgpu-core[mnist]'" in err
    assert not (folder / "a.pt").exists()


def test_damaged_digits_are_refused(run: Run, folder: Path) -> None:
    images = folder / "train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:-1])
    status, _, err = run(*QUICK, "--data", folder)
    assert status == 2
    assert f"{images}: wanted 23520 bytes of values for 30 x 28 x 28, 23519 came" in err


@pytest.mark.parametrize("engine", [["--engine", "plain"], ["--device-ids", "cpu,cpu"]], ids=["plain", "step"])
def test_a_loss_that_is_not_finite(run: Run, folder: Path, engine: list[str]) -> None:
    path = folder / "a.pt"
    files = ["--save", path, "--json", folder / "a"]
    status, _, err = run(*engine, "--epochs", 1, "--data", folder, "--lr", "1e30", "--batch", 5, *files)
    assert status == 1
    assert "a smaller lr than 1e+30 may help; nothing was saved" in err
    assert not path.exists()
    assert not (folder / "a").exists()


def test_interrupted_after_an_epoch(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ConsoleReport, "epoch", interrupt)
    status, _, err = run(*QUICK, "--data", folder, "--save", folder / "a.pt", "--json", folder / "a.json")
    assert status == 130
    assert err == f"mgpu mnist: error: interrupted; {folder / 'a.pt'} holds the training after epoch 1\n"
    assert len(Checkpoint.read(folder / "a.pt").epochs) == 1
    assert not (folder / "a.json").exists()


@pytest.mark.parametrize(
    "engine",
    [["--engine", "plain"], ["--device-ids", "cpu,cpu"], ["--engine", "drop-in", "--device-ids", "cpu,cpu"]],
    ids=["plain", "step", "drop-in"],
)
def test_ctrl_c(tmp_path: Path, engine: list[str]) -> None:
    path = tmp_path / "a.pt"
    command = [sys.executable, "-P", "-m", "mgpu_core.mnist", *engine, "--epochs", "100000", "--save", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("epoch 2/"):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.startswith("mgpu mnist: error: interrupted; ")
    assert err.count("\n") == 1
    assert len(Checkpoint.read(path).epochs) >= 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.pt"]


def test_a_reader_that_leaves(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "mgpu_core.mnist", "--engine", "plain", "--epochs", "100000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 1
        assert process.stderr.read() == "mgpu mnist: error: the reader of the output has left; nothing was saved\n"
