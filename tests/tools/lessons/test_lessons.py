"""Every lesson runs by the command that it prints, and its solution is right.

The lessons are those of the package, which may be an installed one; pictures are in the repository alone.
"""

import ast
import re
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from mgpu_core.tools.lessons import catalogue, find_lessons
from mgpu_core.tools.lessons.blocks import blocks_of
from mgpu_core.tools.lessons.judge import NOT_BEGUN, checks_of, judge, load

pytestmark = pytest.mark.slow

LESSONS = find_lessons()
DOCS = Path(__file__).parents[3] / "docs" / "lessons"


def here(lesson):
    """The same lesson in the repository."""
    return replace(lesson, page=DOCS / lesson.page.name)


each_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.page.stem)


def size_of(png):
    """Width and height, from the header."""
    head = png.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


def functions_of(path):
    return [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]


def test_numbers_count_from_1_and_the_index_has_all():
    assert [lesson.number for lesson in LESSONS] == list(range(1, len(LESSONS) + 1))
    index = (catalogue.folder() / "README.md").read_text()
    for lesson in LESSONS:
        assert f"[{lesson.title}]({lesson.page.name})" in index


@each_lesson
def test_page_has_its_parts(lesson):
    text = lesson.text
    assert text.startswith(f"# {lesson.number}. ")
    assert f"```sh\nmgpu lesson run {lesson.number}\n```" in text[:400]
    assert re.search(rf"!\[[^\]]{{40,}}\]\(pictures/{lesson.picture.name}\)", text), "a picture with a real alt text"
    exercises = text.split("\n## Exercises\n")[1]
    assert f"mgpu lesson start {lesson.number}" in exercises
    assert f"mgpu lesson check {lesson.number}" in exercises
    for number, name in enumerate(functions_of(lesson.stub), 1):
        assert f"\n{number}. `{name}(" in exercises
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)#:]+)\)", prose):
        assert (DOCS / link).exists()


def test_the_package_has_what_the_repository_has():
    assert [lesson.page.name for lesson in LESSONS] == sorted(path.name for path in DOCS.glob("[01]*.md"))
    for lesson in LESSONS:
        for one, other in ((lesson.page, here(lesson).page), (lesson.stub, here(lesson).stub)):
            assert one.read_text() == other.read_text(), "install the package again"
        assert lesson.solution.read_text() == here(lesson).solution.read_text()


@each_lesson
def test_lesson_runs_by_its_command(lesson, mgpu, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = mgpu("run", lesson.number)
    assert (status, err) == (0, ""), out + err
    blocks = blocks_of(lesson.text)
    assert f"[{len(blocks)}/{len(blocks)}]" in out
    made = tmp_path / f"lesson_{lesson.number:02}.png"
    assert out.endswith(f"The picture is in {made.name}.\n")
    assert size_of(made) == size_of(here(lesson).picture), "draw it again: mgpu lesson run N --picture"
    assert 900 <= size_of(made)[0] <= 1200
    assert here(lesson).picture.stat().st_size < 60_000


@each_lesson
def test_stub_solution_and_checks_are_for_the_same_functions(lesson):
    names = [check.asks_for for check in checks_of(lesson).values()]
    assert functions_of(lesson.stub) == names
    assert [name for name in functions_of(lesson.solution) if name in names] == names
    assert 2 <= len(names) <= 3
    assert list(checks_of(lesson)) == list(range(1, len(names) + 1))


@each_lesson
def test_command_accepts_the_solution(lesson, mgpu, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(lesson.solution, f"lesson_{lesson.number:02}.py")
    status, out, err = mgpu("check", lesson.number)
    names = [check.asks_for for check in checks_of(lesson).values()]
    told = "".join(f"exercise {number}, {name}: right\n" for number, name in enumerate(names, 1))
    assert out == f"{told}{len(names)} of {len(names)} right\n"
    assert (status, err) == (0, "")


@each_lesson
def test_stub_is_not_begun(lesson):
    answers = load(lesson.stub)
    for number, check in checks_of(lesson).items():
        assert judge(number, check, answers, lesson.stub)[2:] == (NOT_BEGUN, "")
