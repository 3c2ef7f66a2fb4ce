"""`mgpu lesson` apart from the usual way: wrong words, missing files, and what learners' files may do."""

import functools
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mgpu_core.tools.lessons import catalogue, find_lesson, find_lessons
from mgpu_core.tools.lessons.answers import asked_for
from mgpu_core.tools.lessons.blocks import blocks_of
from mgpu_core.tools.lessons.judge import checks_of, judge, load
from mgpu_core.tools.lessons.runner import run_lesson

pytestmark = pytest.mark.slow

RIGHT = find_lesson(1).solution.read_text()
each_lesson = pytest.mark.parametrize("lesson", find_lessons(), ids=lambda lesson: lesson.page.stem)
SCATTER_ROWS = "def scatter_rows(tensor: torch.Tensor, ranks: int, dim: int = 0) -> list[torch.Tensor]:\n"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def check(mgpu, text, *options):
    """The status, and the lines on the exercises of lesson 1."""
    Path("lesson_01.py").write_text(text)
    status, out, _ = mgpu("check", 1, *options)
    return status, out.splitlines()


def test_list_has_all_titles(mgpu):
    status, out, _ = mgpu("list")
    assert status == 0
    assert out.splitlines()[: len(find_lessons())] == [lesson.title for lesson in find_lessons()]


def test_show_prints_the_page(mgpu):
    status, out, err = mgpu("show", 1)
    assert (status, err) == (0, "")
    assert "\nThe code that draws it:\n" in out
    assert not any(tag in out for tag in ("<details>", "</details>", "<summary>"))
    assert out.splitlines()[:20] == find_lesson(1).text.splitlines()[:20]


@pytest.mark.parametrize("word", ["show", "run", "start", "check"])
def test_unknown_number_is_told_in_a_line(mgpu, word):
    status, out, err = mgpu(word, 99)
    assert (status, out) == (2, "")
    assert err.startswith("mgpu lesson: error: there is no lesson 99; there are 1, 2, 3")


def test_ranks_are_cpu_ranks(mgpu, monkeypatch):
    variables = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    run = "mgpu_core.tools.lessons.command.run_lesson"
    monkeypatch.setattr(run, lambda *_: variables.append(dict(os.environ)) or True)
    assert mgpu("run", 8, "--ranks", 3)[0] == 0
    assert (variables[0]["MGPU_CORE_CPU_RANKS"], variables[0]["CUDA_VISIBLE_DEVICES"]) == ("3", "")
    assert mgpu("check", 1, "--ranks", 0)[0] == 2


def test_lesson_8_runs_whatever_the_ids_of_gpus_mean(mgpu):
    assert mgpu("run", 8, "--ranks", 2)[0] == 0


@pytest.mark.parametrize(
    "words", [["nonsense"], ["run"], ["run", "five"], ["check", 1, "--limit", 0], ["check", 1, "--limit", "x"]]
)
def test_wrong_words_are_usage_errors(mgpu, words):
    status, out, err = mgpu(*words)
    assert (status, out) == (2, "")
    assert "usage: mgpu lesson" in err


def test_start_writes_the_stub_and_never_overwrites(mgpu):
    status, out, _ = mgpu("start", 1)
    assert (status, "mgpu lesson check 1" in out) == (0, True)
    assert Path("lesson_01.py").read_text() == find_lesson(1).stub.read_text()
    Path("lesson_01.py").write_text("my work")
    assert mgpu("start", 1) == (
        2,
        "",
        "mgpu lesson: error: lesson_01.py is there already, and is not overwritten\n",
    )
    assert Path("lesson_01.py").read_text() == "my work"


def test_check_of_a_file_that_is_not_there(mgpu):
    status, _, err = mgpu("check", 1)
    assert (status, "lesson_01.py does not exist; `mgpu lesson start 1`" in err) == (2, True)
    Path("answers.txt").write_text("")
    assert mgpu("check", 1, "answers.txt")[0] == 2


def test_check_takes_any_file(mgpu):
    Path("mine.py").write_text(RIGHT)
    status, out, _ = mgpu("check", 1, "mine.py")
    assert (status, out.count(": right\n")) == (0, 3)


def test_syntax_error_is_shown_with_its_line(mgpu):
    status, lines = check(mgpu, "import torch\n\ndef chunk_counts(rows ranks):\n    pass\n")
    assert status == 1
    assert len(lines) == 1
    assert lines[0].startswith("lesson_01.py cannot be checked: lesson_01.py, line 3: SyntaxError")


def test_error_while_importing_is_shown_with_its_line(mgpu):
    status, lines = check(mgpu, "import torch\nx = 1 / 0\n")
    assert (status, lines) == (
        1,
        ["lesson_01.py cannot be checked: lesson_01.py, line 2, 'x = 1 / 0': ZeroDivisionError: division by zero"],
    )


def test_exception_in_an_answer_is_shown_with_its_line(mgpu):
    text = RIGHT.replace(SCATTER_ROWS, SCATTER_ROWS + "    return [][ranks]\n")
    line = text.splitlines().index("    return [][ranks]") + 1
    status, lines = check(mgpu, text)
    assert status == 1
    told = f"lesson_01.py, line {line}, 'return [][ranks]': IndexError: list index out of range"
    assert lines[:2] == ["exercise 1, chunk_counts: right", f"exercise 2, scatter_rows: wrong: {told}"]


def test_useless_result_is_a_wrong_answer(mgpu):
    text = RIGHT.replace(SCATTER_ROWS, SCATTER_ROWS + "    return None\n")
    status, lines = check(mgpu, text)
    assert status == 1
    assert lines[1].startswith(
        "exercise 2, scatter_rows: wrong: scatter_rows(a (9, 3) tensor, 8, 0): expected [int64 tensor [[0, 1, 2], "
    )
    assert lines[1].endswith("..., got None")


def test_missing_function_is_not_begun(mgpu):
    status, lines = check(mgpu, RIGHT.replace("def chunk_counts", "def other").replace(" chunk_counts(", " other("))
    assert status == 1
    assert lines[0] == "exercise 1, chunk_counts: not begun: lesson_01.py has no function chunk_counts"


@pytest.mark.parametrize(
    ("answer", "what"),
    [("3", "3, of type int"), ("[1, 2]", "[1, 2], of type list"), ("torch", "<module 'torch' from '")],
)
def test_an_answer_that_is_no_function_is_named(mgpu, answer, what):
    status, lines = check(mgpu, f"{RIGHT}\nchunk_counts = {answer}\n")
    assert status == 1
    assert lines[0].startswith(f"exercise 1, chunk_counts: wrong: chunk_counts should be a function, and is {what}")


@each_lesson
def test_no_check_wants_more_than_what_can_be_called(lesson):
    """A partial function has no name, and is a function all the same."""
    answers = load(lesson.solution)
    for number, asked in checks_of(lesson).items():
        name = asked_for(asked)
        partial, number_3 = (SimpleNamespace(**{name: each}) for each in (functools.partial(vars(answers)[name]), 3))
        assert judge(number, asked, partial, lesson.solution).word == "right"
        verdict = judge(number, asked, number_3, lesson.solution)
        assert verdict[2:] == ("wrong", f"{name} should be a function, and is 3, of type int")


def test_endless_loop_is_ended_and_the_others_are_checked(mgpu):
    text = RIGHT.replace(SCATTER_ROWS, SCATTER_ROWS + "    while ranks == 3:\n        pass\n")
    begin = time.monotonic()
    status, lines = check(mgpu, text, "--limit", 3)
    assert status == 1
    assert lines[0] == "exercise 1, chunk_counts: right"
    assert lines[1].startswith("exercise 2, scatter_rows: wrong: it did not end within 3 s")
    assert lines[2].startswith("exercise 3, scatter_batch: ")
    assert time.monotonic() - begin < 100


def test_endless_import_is_ended(mgpu):
    status, lines = check(mgpu, "while True:\n    pass\n", "--limit", 1)
    assert (status, len(lines)) == (1, 1)
    assert "importing the file: it did not end within 1 s" in lines[0]


@pytest.mark.parametrize(("ending", "told"), [("raise SystemExit(0)", "SystemExit: 0"), ("os._exit(0)", "status 0")])
def test_an_answer_cannot_end_the_checker(mgpu, ending, told):
    text = RIGHT.replace(SCATTER_ROWS, SCATTER_ROWS + f"    import os\n    {ending}\n")
    status, lines = check(mgpu, text)
    assert status == 1
    assert told in lines[1]
    assert lines[3:] == ["1 of 3 right; mgpu lesson show 1 says what they should do"]


def test_prints_of_a_learner_are_no_verdicts(mgpu):
    status, lines = check(mgpu, RIGHT + '\nprint("right")\nprint([1, "chunk_counts", "wrong", ""])\n')
    assert status == 0
    assert [line.split(": ")[-1] for line in lines] == ["right"] * 3 + ["3 of 3 right"]


def test_run_takes_a_file_for_the_picture(mgpu):
    status, out, _ = mgpu("run", 1, "--picture", "mine.png")
    assert (status, out.endswith("The picture is in mine.png.\n")) == (0, True)
    assert [path.name for path in Path().iterdir()] == ["mine.png"]


def test_run_into_a_folder_that_is_not_there(mgpu):
    status, out, err = mgpu("run", 1, "--picture", "no/such/folder/mine.png")
    assert (status, out) == (2, "")
    assert "cannot write into its folder" in err


def test_run_without_matplotlib_says_the_cure(mgpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, err = mgpu("run", 1)
    assert (status, out) == (2, "")
    assert err.startswith("mgpu lesson: error: a picture needs matplotlib: pip install 'mgpu-core[mnist]' (")


@pytest.fixture
def page(monkeypatch):
    """Replace all lessons by one of this text."""

    def write(text):
        Path("01_tiny.md").write_text(text)
        monkeypatch.setattr(catalogue, "folder", Path.cwd)

    return write


def test_failing_block_shows_the_line_of_the_page(mgpu, page):
    page("# 1. Tiny\n\n```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n")
    status, out, err = mgpu("run", 1)
    assert status == 1
    assert "[2/2] 1. Tiny (line 8)" in out
    assert '01_tiny.md", line 8' in err
    assert "assert x == 2" in err
    assert "runner.py" not in err


def test_a_reader_that_has_left_is_no_failure_of_the_page(page, capsys):
    """`mgpu lesson run 8 | head -1`: the command knows what to do, as for all that print."""
    page("# 1. Tiny\n\n```python\nraise BrokenPipeError  # as print does\n```\n")
    with pytest.raises(BrokenPipeError):
        run_lesson(find_lesson(1), Path("mine.png"))
    assert capsys.readouterr().err == ""


def test_other_output_than_the_page_says_is_shown(mgpu, page):
    page("# 1. Tiny\n\n```python\nprint('one')\n```\n```text\ntwo\n```\n")
    status, out, _ = mgpu("run", 1)
    assert status == 1
    assert "-two\n+one\n" in out


def test_text_block_needs_its_python_block():
    with pytest.raises(ValueError, match="line 2"):
        blocks_of("```text\nx\n```\n")


def test_block_knows_its_heading_even_after_comments_in_code():
    blocks = blocks_of("# 1. A\n```python\n# no heading\n```\n## B\ntext\n```python\npass\n```\n")
    assert [(block.heading, block.line) for block in blocks] == [("1. A", 3), ("B", 8)]


def test_a_picture_is_a_png(mgpu):
    for name in ("noext", "a.xyz"):
        status, out, err = mgpu("run", 1, "--picture", name)
        assert (status, out) == (2, "")
        assert "wanted a name that ends in .png" in err
    assert list(Path().iterdir()) == []


def test_exercises_are_not_written_through_a_link_that_leads_nowhere(mgpu):
    Path("lesson_01.py").symlink_to("nowhere")
    status, _, err = mgpu("start", 1)
    assert status == 2
    assert "is there already" in err
    assert not Path("nowhere").exists()


def test_a_limit_beyond_all_clocks(mgpu):
    status, _, err = mgpu("check", 1, "--limit", "1e300")
    assert status == 2
    assert "number of seconds that a clock can count, not 1e300" in err


def test_solution_is_printed(mgpu):
    assert mgpu("solution", 1) == (0, find_lesson(1).solution.read_text(), "")


def test_run_shows_the_code_above_its_output(mgpu, page):
    page("# 1. Tiny\n\n```python\nif True:\n    print('one')\n```\n")
    assert "(line 4)\n    if True:\n        print('one')\none\n" in mgpu("run", 1)[1]
