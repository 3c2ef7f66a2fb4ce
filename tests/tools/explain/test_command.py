"""`mgpu explain script.py`: the script runs as it is, and its trace follows."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
import torch, mgpu_core
from beside import ROWS
model = mgpu_core.DataParallel(torch.nn.Linear(3, 2), ["cpu"] * 2)
for _ in range(int(sys.argv[1])):
    model(torch.ones(ROWS, 3)).square().sum().backward()
print("arguments:", sys.argv[1:], __name__)
{last}
"""


def explain(folder, *words, last="", steps="8"):
    (folder / "beside.py").write_text("ROWS = 5\n")
    (folder / "script.py").write_text(SCRIPT.replace("{last}", last))
    command = [sys.executable, "-P", "-m", "mgpu_core", "explain", *words, "script.py", steps, "--own", "word"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)


def test_a_script_and_its_files(tmp_path):
    done = explain(tmp_path, "--html", "a.html", "--trace", "b.json", "--profile", "c.json", last="sys.exit(0)")
    assert (done.returncode, done.stderr) == (0, "")
    assert "arguments: ['8', '--own', 'word'] __main__" in done.stdout
    assert "step 4: data_parallel, 2 ranks (cpu, cpu)" in done.stdout
    assert done.stdout.splitlines()[-3:] == ["written: a.html", "written: b.json", "written: c.json"]
    assert json.loads((tmp_path / "c.json").read_text())["rows"] == 5
    assert json.loads((tmp_path / "b.json").read_text())["traceEvents"]
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")


def test_the_shown_step_says_how_its_ranks_ran(tmp_path):
    (tmp_path / "script.py").write_text(TRAINING)
    command = [sys.executable, "-P", "-m", "mgpu_core", "explain", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert f"workers: {lines[0]} (" in done.stdout
    assert lines[2].startswith("recorded step 5: train_step, 2 ranks (cpu, cpu)")


TRAINING = """
import torch, mgpu_core
net = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
step = mgpu_core.TrainStep(net, torch.nn.functional.mse_loss, optimizer, ["cpu"] * 2)
for _ in range(12):
    step(torch.ones(6, 3), torch.ones(6, 2))
print(step.plan()[0].workers)
"""


@pytest.mark.parametrize(
    ("last", "status", "text"),
    [
        ("sys.exit(3)", 3, ""),
        ("sys.exit('enough')", 1, "enough\n"),
        ("{}['a key']", 1, "KeyError: 'a key'"),
        ("raise ValueError('the script said so')", 1, "ValueError: the script said so"),
    ],
)
def test_the_scripts_own_end(tmp_path, last, status, text):
    done = explain(tmp_path, "--skip", "1", "--steps", "2", last=last)
    assert done.returncode == status
    assert text in done.stderr
    assert "user_script" not in done.stderr
    assert "mgpu explain: error" not in done.stderr
    assert "step 1: data_parallel" in done.stdout


def test_nothing_of_a_script_that_failed(tmp_path):
    done = explain(tmp_path, steps="2", last="1 / 0")
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert done.stderr.endswith("\nmgpu explain: error: nothing was recorded\n")


def test_nothing_to_record(tmp_path):
    done = explain(tmp_path, steps="2")
    assert done.returncode == 1
    assert "nothing was recorded" in done.stderr
    assert "first 3 steps" in done.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["nowhere.py"], "there is no such script"),
        (["--steps", "0", "script.py"], "steps at least 1"),
        (["--html", "no/folder/page.html", "script.py"], "cannot write"),
    ],
)
def test_bad_requests(tmp_path, words, text):
    (tmp_path / "script.py").write_text("raise SystemExit('must not run')\n")
    command = [sys.executable, "-P", "-m", "mgpu_core", "explain", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert done.stderr.startswith("mgpu explain: error: ")
    assert text in done.stderr
    assert len(done.stderr.splitlines()) <= 2


def test_what_stands_behind_the_script_is_its_own(tmp_path):
    (tmp_path / "script.py").write_text("import sys; print(sys.argv)\n")
    command = [sys.executable, "-P", "-m", "mgpu_core", "explain", "script.py", "--html", "page.html"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert "['script.py', '--html', 'page.html']" in done.stdout
    assert "note: --html comes after the script" in done.stderr
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("words", [["--own"], ["--", "--own"]])
def test_words_may_follow_two_dashes(tmp_path, words):
    (tmp_path / "script.py").write_text("import sys; print(sys.argv)\n")
    command = [sys.executable, "-P", "-m", "mgpu_core", "explain", "script.py", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert "['script.py', '--own']" in done.stdout


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("import torch; torch.nn.DataParallel(torch.nn.Linear(2, 1))", 1),
        ("from torch import nn; nn.DataParallel(nn.Linear(2, 1))", 1),
        ("from torch.nn import DataParallel as Wrapper; Wrapper", 1),
        ("import torch.nn.parallel as p; p.data_parallel", 1),
        ("import mgpu_core; mgpu_core.DataParallel", 0),
        ("from mgpu_core import DataParallel; DataParallel", 0),
    ],
)
def test_torchs_wrapper_is_said_not_to_be_recorded(tmp_path, monkeypatch, line, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(f"{line}\n")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "mgpu_core", "explain", "script.py"], capture_output=True, text=True, timeout=100
    )
    assert done.stderr.count("script.py uses torch.nn.DataParallel, which is not recorded") == told
    assert done.returncode == 1


def test_the_story_of_an_interrupted_script(tmp_path):
    done = explain(tmp_path, "--html", "a.html", last="raise KeyboardInterrupt")
    assert done.returncode == 130
    assert "step 4: data_parallel" in done.stdout
    assert (tmp_path / "a.html").exists()


def test_outputs_of_one_name(tmp_path):
    done = explain(tmp_path, "--html", "a", "--trace", "a")
    assert done.returncode == 2
    assert "two of these are the same file: script.py, a, a" in done.stderr
    done = explain(tmp_path, "--html", "script.py")
    assert done.returncode == 2
    assert "two of these are the same file" in done.stderr


@pytest.mark.parametrize(
    ("text", "last"),
    [("def f(:\n", "SyntaxError: "), ("1 / 0\n", "ZeroDivisionError: "), ("import broken\n", "SyntaxError: ")],
)
def test_errors_are_told_without_our_frames(tmp_path, text, last):
    (tmp_path / "script.py").write_text(text)
    (tmp_path / "broken.py").write_text("x = (\n")
    command = [sys.executable, "-P", "-m", "mgpu_core", "explain", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "user_script" not in done.stderr
    assert "mgpu_core/" not in done.stderr
    assert last in done.stderr
    assert f'File "{tmp_path}/script.py", line 1' in done.stderr


def test_the_script_lives_on_to_the_end_of_the_process(tmp_path):
    """Its file has its whole name, and what it leaves for the end finds its own module."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "script.py").write_text(
        "import atexit, os, pickle\n"
        "class Own:\n"
        "    pass\n"
        "os.chdir('elsewhere')\n"
        "print(open(__file__).readline())\n"
        "atexit.register(lambda: print('pickled', type(pickle.loads(pickle.dumps(Own()))) is Own))\n"
        "atexit.register(lambda: print('found', __import__('later').NAME, __import__('sys').argv))\n"
    )
    (tmp_path / "later.py").write_text("NAME = 'later'\n")
    command = [sys.executable, "-P", "-m", "mgpu_core", "explain", "--skip", "0", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert "import atexit" in done.stdout
    assert "pickled True" in done.stdout
    assert "found later ['script.py']" in done.stdout
    assert "nothing was recorded: script.py makes no whole step with mgpu_core's DataParallel" in done.stderr
    assert "--skip 0" not in done.stderr


def test_a_script_that_records_itself(tmp_path):
    (tmp_path / "script.py").write_text("import mgpu_core\nwith mgpu_core.explain():\n    pass\n")
    command = [sys.executable, "-P", "-m", "mgpu_core", "explain", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "a recording is already on: there is one per process, and `mgpu explain` makes it of" in done.stderr


def test_a_child_of_the_script_tells_no_story(tmp_path):
    """It returns through us, with the files' names in its hands."""
    fork = "import os\nchild = os.fork()\nif child == 0:\n    sys.exit(0)\nos.waitpid(child, 0)"
    done = explain(tmp_path, "--html", "a.html", last=fork)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("step 4: data_parallel") == 1
    assert done.stdout.count("written: a.html") == 1


def test_files_go_where_the_command_was_given(tmp_path):
    (tmp_path / "sub").mkdir()
    done = explain(tmp_path, "--html", "a.html", "--profile", "c.json", last="import os; os.chdir('sub')")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "a.html").exists()
    assert (tmp_path / "c.json").exists()
    assert list((tmp_path / "sub").iterdir()) == []


ACCUMULATES = """
import torch, mgpu_core
net = torch.nn.Linear(3, 2)
step = mgpu_core.TrainStep(
    net, torch.nn.functional.mse_loss, torch.optim.SGD(net.parameters(), lr=0.1), ["cpu"] * 2, accumulate=3
)
for _ in range(8):
    step(torch.ones(6, 3), torch.ones(6, 2))
"""


def test_the_profile_is_of_a_step_that_updates(tmp_path):
    (tmp_path / "script.py").write_text(ACCUMULATES)
    command = [sys.executable, "-P", "-m", "mgpu_core", "explain", "--profile", "c.json", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    profile = json.loads((tmp_path / "c.json").read_text())
    assert profile["update_seconds"] > 0


def test_each_file_is_tried_whatever_became_of_the_others(tmp_path):
    """A page that is too large, and a trace whose folder is gone, cost nobody the profile."""
    last = "import os; os.rmdir('sub')\nfrom mgpu_core.tools.explain import page; page.MOST_NBYTES = 1000"
    (tmp_path / "sub").mkdir()
    done = explain(tmp_path, "--html", "a.html", "--trace", "sub/b.json", "--profile", "c.json", last=last)
    assert done.returncode == 2
    page, trace = done.stderr.splitlines()
    assert page.startswith(
        "mgpu explain: error: a.html: the last step alone makes a page of more than 1000 bytes: a trace"
    )
    assert trace.startswith("mgpu explain: error: sub/b.json: [Errno 2]")
    assert "step 4: data_parallel" in done.stdout
    assert done.stdout.splitlines()[-1] == "written: c.json"
    assert json.loads((tmp_path / "c.json").read_text())["rows"] == 5


def test_what_was_written_is_said_where_the_profile_fails(tmp_path):
    (tmp_path / "script.py").write_text(
        "import torch, mgpu_core\n"
        "model = mgpu_core.DataParallel(torch.nn.Linear(3, 2), ['cpu'] * 2)\n"
        "for _ in range(8):\n"
        "    model(torch.ones(4, 3))\n"
    )
    command = [sys.executable, "-P", "-m", "mgpu_core", "explain", "--html", "a.html", "--profile", "c.json"]
    done = subprocess.run([*command, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert done.stdout.splitlines()[-1] == "written: a.html"
    assert "no forward and backward" in done.stderr
    assert not (tmp_path / "c.json").exists()
