"""`mgpu run script.py`: unchanged scripts, their own output and status, and a report on stderr."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

WRAPS = """
import sys
import torch
from torch.nn import DataParallel
net = torch.nn.Linear(3, 2)
with torch.no_grad():
    net.weight.fill_(0.5), net.bias.zero_()
model = DataParallel(net).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
for _ in range(int(sys.argv[1])):
    loss = model(torch.ones(8, 3).cuda()).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
print(sys.argv[1:], f"{loss.item():.4f}", __name__)
{last}
"""
PLAIN = WRAPS.replace("DataParallel(net).cuda()", "net")


def mgpu(folder, *words, text=WRAPS, last="", steps="2"):
    (folder / "script.py").write_text(text.replace("{last}", last))
    command = [sys.executable, "-P", "-m", "mgpu_core", "run", *words, "script.py", steps, "--own"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(("words", "text"), [((), WRAPS), (("--wrap", "auto"), PLAIN)])
def test_a_script_as_it_is(tmp_path, words, text):
    done = mgpu(tmp_path, "--ranks", "4", *words, text=text, last="sys.exit(7)")
    assert done.returncode == 7
    assert done.stdout == "['2', '--own'] 0.5625 __main__\n"
    lines = done.stderr.splitlines()
    assert all(line.startswith("mgpu run: ") for line in lines)
    assert "mgpu run: wrapped: Linear over 4 ranks (cpu, cpu, cpu, cpu)" in lines
    assert not any("replaced: " in line for line in lines)


def test_without_a_wrapper_or_wrap_nothing_is_wrapped(tmp_path):
    done = mgpu(tmp_path, "--ranks", "4", text=PLAIN)
    assert (done.returncode, done.stdout) == (0, "['2', '--own'] 0.5625 __main__\n")
    assert done.stderr.splitlines() == [
        "mgpu run: ran as python runs it, on one device, the CPU: nothing was wrapped",
        "mgpu run: note: --wrap auto wraps the net of the first optimizer",
    ]


def test_without_an_accelerator_and_without_options_it_says_what_it_did(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert mgpu(tmp_path, text=PLAIN.replace(".cuda()", "")).stderr.splitlines() == [
        "mgpu run: ran as python runs it, on one device, the CPU: nothing was wrapped",
        "mgpu run: note: --ranks N --wrap auto wraps the net of the first optimizer",
    ]


def test_a_wrapper_without_an_accelerator_ran_on_one_device(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert mgpu(tmp_path, text=WRAPS.replace(".cuda()", "")).stderr.splitlines() == [
        "mgpu run: wrapped: Linear as the plain module",
        "mgpu run: note: there is no accelerator, so it ran on one device: --ranks N makes N CPU ranks",
    ]


def test_a_trainer_of_transformers_is_told_of_ours(tmp_path):
    fake = "import types; sys.modules['transformers.trainer'] = types.ModuleType('transformers.trainer')"
    done = mgpu(tmp_path, "--ranks", "4", text=PLAIN, last=fake)
    assert done.stderr.splitlines()[1:] == [
        "mgpu run: note: a Trainer of transformers uses all devices as "
        "mgpu_core.integrations.transformers.MultiGPUTrainer"
    ]


def test_a_script_for_several_processes_is_sent_to_torchrun(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    done = mgpu(tmp_path, "--ranks", "2", text="import torch.distributed as d\nd.init_process_group('gloo')")
    assert done.returncode == 1
    assert "environment variable RANK expected" in done.stderr
    assert "note: this script wants a process per device (init_process_group), which torchrun" in done.stderr


def test_a_script_that_cannot_begin_is_told_nothing_else(tmp_path):
    done = mgpu(tmp_path, "--ranks", "2", text="def (")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "SyntaxError: invalid syntax"


def test_a_net_that_returns_its_loss(tmp_path):
    """Torch's own error does not say that there is one loss for each rank."""
    text = """
import torch
class Net(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).square().mean()
net = Net(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net(torch.ones(8, 4)){mean}.backward()
"""
    done = mgpu(tmp_path, "--ranks", "2", "--wrap", "auto", text=text.replace("{mean}", ""))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-3:] == [
        "RuntimeError: grad can be implicitly created only for scalar outputs",
        "mgpu run: wrapped: Net over 2 ranks (cpu, cpu)",
        "mgpu run: note: Net returns a number, and over ranks one for each: backward() needs its .mean(), which is one "
        "device's where all ranks have as many rows and labels",
    ]
    done = mgpu(tmp_path, "--ranks", "2", "--wrap", "auto", text=text.replace("{mean}", ".mean()"))
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1] == "mgpu run: wrapped: Net over 2 ranks (cpu, cpu)"


@pytest.mark.parametrize(
    ("last", "status", "text"),
    [("sys.exit('enough')", 1, "enough\n"), ("raise ValueError('said so')", 1, "ValueError: said so")],
)
def test_the_scripts_own_end(tmp_path, last, status, text):
    done = mgpu(tmp_path, "--ranks", "2", last=last)
    assert (done.returncode, text in done.stderr, "user_script" in done.stderr) == (status, True, False)
    assert "mgpu run: wrapped: Linear over 2 ranks (cpu, cpu)" in done.stderr.splitlines()


def test_the_page_of_a_step(tmp_path):
    done = mgpu(tmp_path, "--ranks", "2", "--explain", "step.html", steps="9")
    assert done.returncode == 0
    assert "data_parallel, 2 ranks (cpu, cpu)" in done.stdout
    assert done.stdout.splitlines()[-1] == "written: step.html"
    assert (tmp_path / "step.html").read_text().startswith("<!doctype html>")


def test_a_run_too_short_for_a_page(tmp_path):
    done = mgpu(tmp_path, "--ranks", "2", "--explain", "step.html")
    assert (done.returncode, (tmp_path / "step.html").exists()) == (1, False)
    assert "nothing was recorded: fewer than 4 steps" in done.stderr


def test_advice_on_the_net_that_was_trained(tmp_path):
    done = mgpu(tmp_path, "--ranks", "2", "--advise")
    assert done.returncode == 0
    assert "one device" in done.stdout
    assert "TrainStep" in done.stdout
    assert done.stdout.count("net: Linear, the one that was called most often; optimizer: SGD\n") == 1


ADAMW = PLAIN.replace(
    "SGD(model.parameters(), lr=0.125)", "AdamW([dict(params=[net.weight]), dict(params=[net.bias])])"
)


@pytest.mark.parametrize("options", [[], ["--wrap", "auto"]])
def test_advice_on_the_ranks_and_the_optimizer_of_the_run(tmp_path, options):
    done = mgpu(tmp_path, "--ranks", "4", *options, "--advise", text=ADAMW)
    assert done.returncode == 0, done.stderr
    assert "one device against 4 ranks (cpu, cpu, cpu, cpu)" in done.stdout
    assert "optimizer: AdamW\n" in done.stdout
    assert "gradients 32 B, optimizer 72 B," in done.stdout  # two moments of 8 numbers, and a count for each tensor


OWN = """Own = type('Own', (torch.optim.SGD,), {'__init__': lambda self, ps, rate: torch.optim.SGD.__init__(self, ps)})
optimizer = Own(model.parameters(), 1.0)"""
CLOSURE = "optimizer = torch.optim.LBFGS(model.parameters()); loss_of = lambda: model(torch.ones(8, 3)).sum()"


@pytest.mark.parametrize(
    ("name", "line", "step", "error"),
    [
        ("Own", OWN, "step()", "<lambda>() missing 1 required positional argument: 'rate'"),
        ("LBFGS", CLOSURE, "step(loss_of)", "LBFGS.step() missing 1 required positional argument: 'closure'"),
    ],
)
def test_advice_with_an_optimizer_that_cannot_be_made_again(tmp_path, name, line, step, error):
    text = PLAIN.replace("optimizer = torch.optim.SGD(model.parameters(), lr=0.125)", line)
    done = mgpu(tmp_path, "--ranks", "2", "--advise", text=text.replace("optimizer.step()", f"optimizer.{step}"))
    assert done.returncode == 0, done.stderr
    assert f"optimizer: SGD, since another {name} makes no step: TypeError: " in done.stdout
    assert error in done.stdout
    assert "failed" not in done.stdout


def test_advice_without_a_net(tmp_path):
    done = mgpu(tmp_path, "--ranks", "2", "--advise", text="pass")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("mgpu run: error: no net with parameters was called")


def test_advice_on_a_net_that_is_called_by_its_forward(tmp_path):
    text = "import torch\nnet = torch.nn.Linear(3, 3)\nnet.forward(torch.ones(4, 3)).sum().backward()"
    done = mgpu(tmp_path, "--ranks", "2", "--advise", text=text)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("net.forward(...) is seen with --wrap auto alone: call the net itself")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--ranks", "0", "script.py"], "ranks must be a whole number from 1 to 9999, not 0"),
        (["--ranks", "two", "script.py"], "invalid int value: 'two'"),
        (["--wrap", "all", "script.py"], "invalid choice: 'all'"),
        (["missing.py"], "missing.py: there is no such script"),
        (["--explain", "script.py", "script.py"], "script.py"),
        (["--explain", "no/such/folder.html", "script.py"], "no/such"),
        ([], "the following arguments are required: script\n"),
    ],
)
def test_what_cannot_be_done(tmp_path, words, text):
    (tmp_path / "script.py").write_text("print('ran')")
    command = [sys.executable, "-P", "-m", "mgpu_core", "run", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "script.py").read_text() == "print('ran')"
