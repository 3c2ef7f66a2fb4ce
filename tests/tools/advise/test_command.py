"""`mgpu advise script.py`: the script's names, its own mistakes, the files."""

import argparse
import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from mgpu_core.tools.advise import command
from mgpu_core.tools.advise.result import Advice
from mgpu_core.tools.advise.script import Chosen, found_in, run_script
from mgpu_core.tools.cli import main

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
import torch
from beside import ROWS
net = torch.nn.Linear(3, 2)
criterion = torch.nn.MSELoss()
sample = torch.ones(ROWS, 3), torch.ones(ROWS, 2)
print("arguments:", sys.argv[1:], __name__)
if __name__ == "__main__":
    raise AssertionError("the training must not start")
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Writes a script into the current folder."""
    monkeypatch.chdir(tmp_path)

    def write(text=SCRIPT):
        (tmp_path / "beside.py").write_text("ROWS = 8\n")
        (tmp_path / "script.py").write_text(text)
        return "script.py"

    return write


FAST = ["--devices", "cpu,cpu", "--repeats", "1", "--batches", "8"]


def test_a_script_and_its_files(script, tmp_path):
    words = [script(), *FAST, "--json", "a.json", "--plot", "a.png", "--", "--epochs", "3"]
    command_line = [sys.executable, "-P", "-m", "mgpu_core", "advise", *words]
    done = subprocess.run(command_line, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    told = [line for line in done.stderr.splitlines() if "mgpu advise: 8 rows" not in line]  # where it takes long
    assert (done.returncode, told) == (0, [])
    lines = done.stdout.splitlines()
    assert lines[0] == "arguments: ['--epochs', '3'] __mgpu_advise__"
    assert lines[1].startswith("script.py: one device against 2 ranks (cpu, cpu)")
    assert lines[-2:] == ["written: a.json", "written: a.png"]
    found = Advice.from_json((tmp_path / "a.json").read_text())
    assert (found.rows, found.batches, len(found.measurements)) == (8, [8], 3)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def planned(monkeypatch):
    """Plans that would have been measured."""
    plans = []
    advice = argparse.Namespace(recommendation=argparse.Namespace(way="one device"), lines=["advice"])
    monkeypatch.setattr(command, "advised", lambda plan, *_: plans.append(plan) or advice)
    return plans


def test_options_before_and_after_the_script(script, planned, capsys):
    after = ["--seconds", "9", "--devices", "cpu, cpu,cpu", "--batches", "4,16"]
    assert main(["advise", "--repeats", "3", script(), *after, "--", "--net"]) == 0
    (plan,) = planned
    assert (plan.repeats, plan.seconds, len(plan.devices), plan.batches) == (3, 9, 3, (4, 8, 16))
    assert "arguments: ['--net']" in capsys.readouterr().out


def test_ranks_before_the_script_are_cpu_ranks_for_which_gpus_are_the_cpu(script, planned, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    text = SCRIPT + "net = net.to('cuda:3')\nimport os\nassert os.environ['CUDA_VISIBLE_DEVICES'] == ''\n"
    assert main(["advise", "--ranks", "4", script(text)]) == 0
    (plan,) = planned
    assert plan.devices == (torch.device("cpu"),) * 4


@pytest.mark.parametrize("options", [[], ["--inference", "--seconds", "1", "--callers", "1"]])
def test_cuda_is_the_cpu_also_where_the_net_is_measured(script, options, tmp_path):
    text = """
import torch

class Net(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * torch.ones(1, device="cuda")

net, criterion = Net(3, 2).cuda(), torch.nn.MSELoss()
sample = torch.ones(8, 3), torch.ones(8, 2)
with torch.no_grad():
    net(sample[0])
"""
    few = ["--batches", "8"] if options else ["--repeats", "1", "--batches", "8"]
    words = ["--ranks", "2", script(text), *few, *options]
    command_line = [sys.executable, "-P", "-m", "mgpu_core", "advise", *words]
    done = subprocess.run(command_line, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0
    assert "driver" not in done.stdout + done.stderr


def test_ranks_after_the_script_are_the_scripts_and_noted(script, planned, capsys):
    assert main(["advise", script(), *FAST, "--ranks", "4", "--", "--ranks=5"]) == 0
    (plan,) = planned
    assert len(plan.devices) == 2
    out, err = capsys.readouterr()
    assert out.startswith("arguments: ['--ranks', '4', '--ranks=5'] ")
    assert err == "mgpu advise: note: --ranks comes after the script, so it is passed to the script\n"


def test_the_first_batch_of_a_loader(script, planned):
    text = "\nimport torch\nmodel = torch.nn.DataParallel(torch.nn.Linear(3, 2))\nloss = None\n"
    loader = "train_loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(9, 3)), 4)\n"
    assert main(["advise", script(text + loader)]) == 0
    (plan,) = planned
    assert (type(plan.net), plan.loss_fn, plan.rows) == (nn.Linear, None, 4)
    assert len(plan.loader) == 3


def test_a_way_must_have_run(script, monkeypatch, capsys):
    advice = argparse.Namespace(recommendation=argparse.Namespace(way=""), lines=["none"])
    monkeypatch.setattr(command, "advised", lambda *_: advice)
    assert main(["advise", script()]) == 1


NAMES = {"net": "a net", "model": "another", "loss": "a loss", "batch": "a batch", "loader": ["first", "second"]}


def test_names_are_looked_for_in_order(tmp_path):
    found = found_in(NAMES, Chosen(), tmp_path)
    assert (found.net, found.loss_fn, found.sample, found.loader) == ("a net", "a loss", "a batch", ["first", "second"])
    found = found_in(NAMES | {"batch_2": "2"}, Chosen(net="model", sample="batch_2"), tmp_path)
    assert (found.net, found.sample) == ("another", "2")
    without = {name: value for name, value in NAMES.items() if name != "batch"}
    assert found_in(without, Chosen(), tmp_path).sample == "first"


@pytest.mark.parametrize(
    ("names", "chosen", "message"),
    [
        ({}, Chosen(), "a net, looked for as net or model (--net NAME); a loss, looked for as loss_fn or criterion or"),
        ({}, Chosen(), "a sample or a loader, looked for as sample or batch or loader or train_loader (--sample"),
        (NAMES, Chosen(net="nat"), "a net, looked for as nat (--net NAME)"),
        (NAMES, Chosen(sample="x"), "a sample or a loader, looked for as x (--sample, --loader NAME)"),
        (NAMES, Chosen(loader="x"), "a loader, looked for as x (--loader NAME)"),
    ],
)
def test_missing_names_are_listed(names, chosen, message, tmp_path):
    with pytest.raises(ValueError, match="lacks at its top level: ") as caught:
        found_in(names, chosen, tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no-such.py"], "no-such.py: there is no such script"),
        (["script.py", "--json", "no/such/a.json"], "no/such/a.json: cannot write into its folder"),
        (["script.py", "--plot", "no/such/a.png"], "no/such/a.png: cannot write into its folder"),
        (["script.py", "--json", "script.py"], "two of these are the same file: script.py, script.py"),
        (["script.py", "--json", "a.out", "--plot", "a.out"], "two of these are the same file: script.py, a.out"),
        (["script.py", "--batches", "8,x"], "--batches 8,x: wanted whole numbers above 0"),
        (["script.py", "--devices", "warp"], "'warp' is not a device"),
        (["script.py", "--devices", "cpu,"], "'' is not a device"),
        (["--ranks", "2", "script.py", "--devices", "cpu"], "--ranks and --devices both say which devices there are"),
        (["--ranks", "0", "script.py"], "ranks must be a whole number from 1 to 9999, not 0"),
        (["--ranks", "0", "--inference", "script.py"], "ranks must be a whole number from 1 to 9999, not 0"),
        (["script.py", "--net", "ROWS"], "net must be a torch.nn.Module, not int"),
        (["script.py", "--sample", "ROWS"], "sample must be a tuple of tensors"),
        (["script.py", "--net", "nat"], "lacks at its top level: a net, looked for as nat"),
        (["script.py", "--repeats", "0"], "repeats must be a whole number"),
    ],
)
def test_mistakes_are_one_line_and_status_2(script, planned, capsys, words, message):
    script()
    assert main(["advise", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("mgpu advise: error: ")
    assert message in err
    assert len(err.splitlines()) == 1
    assert not planned


def test_files_are_tried_before_the_script_runs(script, capsys):
    assert main(["advise", script(), "--json", "no/such/a.json"]) == 2
    assert "arguments:" not in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["--"]])
def test_wrong_words_end_with_usage_and_status_2(script, capsys, words):
    script()
    with pytest.raises(SystemExit) as stop:
        main(["advise", *words])
    assert stop.value.code == 2
    assert "usage: mgpu advise [options] script.py [options] [--] [arguments" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["--epochs", "3"], ["--epochs", "3"]),
        (["--batch", "3", "more"], ["--batch", "3", "more"]),  # no short form of --batches
        (["--epochs", "3", "--", "--json", "x"], ["--epochs", "3", "--json", "x"]),
        (["--", "--epochs"], ["--epochs"]),
    ],
)
def test_what_is_no_option_of_ours_is_the_scripts(script, planned, capsys, words, given):
    main(["advise", script(), *FAST, *words])
    assert f"arguments: {given} __mgpu_advise__" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "ran"),
    [
        ("net = loss = 1\n", False),
        ("net = loss = 1\nif __name__ == '__main__':\n    sample = 1\n", False),
        ("net = loss = 1\ndef f(sample):\n    batch = sample\n", False),
        ("net = loss = 1\ndef f():\n    global sample\n", True),
        ("net = loss = 1\nfor batch in ():\n    pass\n", True),
        ("net = loss = 1\nfrom torch.utils import data as loader\n", True),
        ("net = loss = 1\nfrom torch import *\n", True),
        ("net = loss = 1\nglobals()['sample'] = 1\n", True),
    ],
)
def test_a_missing_sample_is_told_before_the_script_runs(script, planned, capsys, text, ran):
    main(["advise", script('print("it ran")\n' + text)])
    out, err = capsys.readouterr()
    assert ("it ran" in out) == ran
    assert ran or "lacks at its top level: a sample or a loader" in err


def test_an_error_in_the_script_shows_its_own_traceback(script, tmp_path, capsys):
    assert main(["advise", script("def f():\n    return 1 / 0\nnet = loss = sample = 1\nf()\n")]) == 1
    err = capsys.readouterr().err
    assert "ZeroDivisionError: division by zero" in err
    assert f'File "{tmp_path}/script.py", line 4' in err
    assert "user_script" not in err


def test_a_script_that_ends_itself(script, capsys):
    begin = "import sys\nnet = loss = sample = 1\n"
    assert main(["advise", script(begin + "sys.exit(3)\n")]) == 3
    assert main(["advise", script(begin + "sys.exit('no data')\n")]) == 1
    assert capsys.readouterr().err == "no data\n"
    assert main(["advise", script(begin + "sys.exit()\n")]) == 2
    assert "ended itself by sys.exit(): its names are wanted" in capsys.readouterr().err


def test_functions_of_the_script_live_on(script, tmp_path):
    script("import torch\nFACTOR = 3\ndef loss(x):\n    return x * FACTOR * torch.ones(())\n")
    assert run_script(tmp_path / "script.py")["loss"](2) == 6


def test_neither_the_package_nor_the_help_imports_matplotlib():
    code = "import sys, mgpu_core; from mgpu_core.tools.cli import main\ntry: main(['advise', '--help'])\n"
    code += "finally: print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout.endswith("\nFalse\n"), done.stderr


def test_the_json_is_json(script, capsys):
    assert main(["advise", script(), *FAST, "--json", "a.json"]) == 0
    with open("a.json") as file:
        assert json.load(file)["format"] == "mgpu_core advice 1"
    assert torch.get_num_threads() >= 1
