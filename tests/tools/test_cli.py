"""The command line: its words, its exit statuses, its one line for a mistake, and what it does not import."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import warnings
from types import ModuleType

import pytest

from mgpu_core.errors import Error
from mgpu_core.tools.bench.titles import TITLES
from mgpu_core.tools.cli import COMMANDS, main, warnings_without_line
from mgpu_core.tools.explain.step_profile import StepProfile

pytestmark = pytest.mark.slow


@pytest.fixture
def mnist(monkeypatch):
    """Replace mnist's training by one that ends as the test wants."""

    def set_ending(ending: BaseException | int) -> None:
        def run(args: argparse.Namespace) -> int:
            if isinstance(ending, BaseException):
                raise ending
            return ending + args.epochs

        module = ModuleType("mgpu_core.tools.mnist.train")
        module.run = run
        monkeypatch.setitem(sys.modules, "mgpu_core.tools.mnist.train", module)

    return set_ending


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-P", *arguments], capture_output=True, text=True, timeout=110)


def test_doctor_prints_the_report(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    titles = ["Versions", "Backends of the core", "Devices", "CPU", "Environment", "What will happen"]
    assert [line for line in out.splitlines() if line in titles] == titles
    assert out.endswith("\n")
    assert not out.endswith("\n\n")


@pytest.mark.parametrize(
    ("words", "found"), [([], "train the MNIST reference"), (["lesson"], "run the code of a lesson")]
)
def test_no_command_prints_the_help(capsys, words, found):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    assert found in capsys.readouterr().out


def test_doctor_prints_json_and_nothing_else(capsys):
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mgpu_core"] == importlib.metadata.version("mgpu-core")


def test_warnings_do_not_change_the_status(capsys, monkeypatch):
    monkeypatch.setenv("MGPU_CORE_NCCL", "/no/such/file")
    assert main(["doctor"]) == 0
    assert "warning: MGPU_CORE_NCCL=/no/such/file cannot be used" in capsys.readouterr().out


def test_warnings_of_our_own_calls_have_no_source_line():
    before = warnings.formatwarning
    with warnings_without_line("mnist"):
        own = warnings.formatwarning("no graphs", UserWarning, "<frozen runpy>", 88)
        users = warnings.formatwarning("no graphs", UserWarning, "script.py", 3, "step(x)")
    assert own == "mgpu mnist: warning: no graphs\n"
    assert users == "script.py:3: UserWarning: no graphs\n  step(x)\n"
    assert warnings.formatwarning is before


def test_python_m_is_the_command_and_doctor_imports_no_training():
    code = "import sys; from mgpu_core.tools.cli import main; main(['doctor'])\n"
    code += "print('mgpu_core.tools.doctor' in sys.modules, 'mgpu_core.tools.mnist.train' in sys.modules)"
    done = run_python("-c", code)
    assert done.stdout.endswith("\nTrue False\n"), done.stderr
    done = run_python("-m", "mgpu_core", "--version")
    assert (done.returncode, done.stdout) == (0, f"mgpu_core {importlib.metadata.version('mgpu-core')}\n")


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "doctor" in out
    assert "mnist" in out


@pytest.mark.parametrize("words", [["nonsense"], ["doctor", "--nonsense"]])
def test_wrong_words_end_with_usage_and_status_2(capsys, words):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert "usage: mgpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        (["doctor", "x"], "usage: mgpu doctor "),
        (["simulate", "a.json", "b.json"], "usage: mgpu simulate "),
        (["--nonsense", "doctor"], "usage: mgpu [-h]"),
    ],
)
def test_a_word_too_many_shows_the_usage_of_its_command(capsys, words, usage):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(usage)
    assert "error: unrecognized arguments: " in err


def test_a_command_gets_its_own_options_and_gives_the_status(mnist):
    mnist(3)
    assert main(["mnist", "--epochs", "4"]) == 7


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("ranks must be 1 or more"), "mgpu mnist: error: ranks must be 1 or more\n"),
        (FileNotFoundError(2, "No such file", "x.gz"), "mgpu mnist: error: [Errno 2] No such file: 'x.gz'\n"),
        (Error("CUDA says no"), "mgpu mnist: error: CUDA says no\n"),
        (ValueError("one\n\n  two\nthree"), "mgpu mnist: error: one\ntwo\n"),
        (ValueError(), "mgpu mnist: error: ValueError\n"),
    ],
)
def test_the_callers_mistakes_and_the_machines_failures_are_short(mnist, capsys, error, line):
    mnist(error)
    assert main(["mnist"]) == 2
    assert capsys.readouterr() == ("", line)


def test_our_own_defects_show_their_traceback(mnist):
    mnist(AssertionError("a defect"))
    with pytest.raises(AssertionError, match="a defect"):
        main(["mnist"])


def test_an_interrupt_ends_with_130(mnist, capsys):
    mnist(KeyboardInterrupt())
    assert main(["mnist"]) == 130
    assert capsys.readouterr() == ("", "")


def test_an_interrupt_of_a_commands_import_ends_with_130():
    """Of real modules, some of which swallow the exception; so the command's own is interrupted here."""
    code = "import signal, sys; from mgpu_core.tools.cli import main; "
    code += "sys.meta_path.insert(0, type('Finder', (), {'find_spec': staticmethod(lambda name, *_: "
    code += "signal.raise_signal(signal.SIGINT) if name == 'torch' else None)})); sys.exit(main(['mnist']))"
    done = run_python("-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("words", [[], *([name] for name in COMMANDS), ["lesson", "run"], ["bench", "table"]])
def test_help_needs_no_torch(words):
    code = "import sys; from mgpu_core.tools.cli import main\ntry: main([*sys.argv[1:], '--help'])\n"
    done = run_python("-c", code + "except SystemExit: print('torch' in sys.modules)", *words)
    assert done.stdout.startswith(f"usage: {' '.join(['mgpu', *words])}"), done.stderr
    assert done.stdout.endswith("\nFalse\n")


def test_a_wrong_word_needs_no_torch():
    code = "import sys; from mgpu_core.tools.cli import main\ntry: main(['mnist', '--epochs', 'many'])\n"
    done = run_python("-c", code + "except SystemExit as end: print(end, 'torch' in sys.modules)")
    assert (done.stdout, "invalid int value: 'many'" in done.stderr) == ("2 False\n", True)


def test_the_help_of_bench_names_all_cases(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    out = capsys.readouterr().out
    first_words = [line.split()[0] for line in out.splitlines() if line.startswith("    ")]
    assert [word for word in first_words if word in {*TITLES, "table"}] == [*TITLES, "table"]


def test_a_reader_that_has_left_is_no_error():
    command = [sys.executable, "-P", "-m", "mgpu_core", "doctor"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert "BrokenPipe" not in process.stderr.read()
        assert process.wait(timeout=110) == 0


@pytest.mark.parametrize(("command", "status"), [("doctor", 0), ("lesson list", 1)])
def test_where_nobody_reads_to_the_end(command, status):
    """What prints alone has done its work; a lesson has not."""
    code = f"import os, sys; from mgpu_core.tools.cli import main; os.close(r); sys.exit(main({command.split()!r}))"
    code = f"import os; r, w = os.pipe(); os.dup2(w, 1); os.close(w); {code}"
    done = run_python("-c", code)
    assert (done.returncode, done.stderr) == (status, "")


def test_without_a_stdout():
    code = "import sys; sys.stdout = None; from mgpu_core.tools.cli import main; sys.exit(main(['lesson', 'list']))"
    done = run_python("-c", code)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_name_that_the_terminal_cannot_show(tmp_path):
    step = StepProfile("图", 2, 64, 10.0, 20.0, 3.0, 80, 8, (), 2.0)
    (tmp_path / "step.json").write_text(step.to_json())
    code = "import sys; sys.stdout.reconfigure(encoding='ascii'); from mgpu_core.tools.cli import main; "
    done = run_python("-c", code + f"sys.exit(main(['simulate', {str(tmp_path / 'step.json')!r}]))")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("\\u56fe, 64 rows on 2 ranks")
