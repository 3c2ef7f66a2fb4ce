"""The checks refuse wrong answers: faults derived from the solutions, and some mistakes that people really make."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from faults import lessons
from faults.lessons import faults_in, function_of, words_on

from mgpu_core.tools.lessons import find_lessons
from mgpu_core.tools.lessons.answers import asked_for
from mgpu_core.tools.lessons.judge import NOT_BEGUN, RIGHT, WRONG, checks_of, judge, load

pytestmark = pytest.mark.slow

LESSONS = {lesson.page.stem: lesson for lesson in find_lessons()}
HUMAN = sorted((Path(__file__).parent / "wrong_answers").glob("*.py"))

# Faults that change nothing that can be seen, by lesson: function, operator and line, and why.
EQUIVALENT = {
    "02_replicate": {"bucket_positions number_off_by_one: filled = 0": "the first bucket sets it to zero"},
    "05_reduce": {
        "tree_all_reduce flipped_comparison: while distance < ranks:": "no rank is that far from another",
        "nbytes_sent swapped_arithmetic: listeners = [ranks - 1] + [0] * (ranks - 1)": "no rank reads the last entries",
    },
    "12_pipelines": {
        "best_cut number_off_by_one: best = {end: (sum(costs[:end]), []) for end in range(1, len(costs) + 1)}": (
            "an entry behind the last layer is not read"
        ),
        "best_cut number_off_by_one: for end in range(part, len(costs) + 1)": "as above, for several parts",
    },
}


def names_of_faults(lesson):
    lines = lesson.solution.read_text().splitlines()
    return [f"{each.function} {each.operator}: {lines[each.line - 1].strip()}" for each in faults_in(lesson)]


@pytest.mark.parametrize("stem", LESSONS)
def test_derived_faults_are_refused(stem):
    lesson = LESSONS[stem]
    assert {function_of(fault) for fault in faults_in(lesson)} == set(map(asked_for, checks_of(lesson).values()))
    words = zip(names_of_faults(lesson), words_on(lesson), strict=True)
    assert sorted(name for name, word in words if word != WRONG) == sorted(EQUIVALENT.get(stem, {}))


def test_a_fault_that_hangs_is_ended_and_the_others_are_judged(tmp_path, monkeypatch):
    monkeypatch.setattr(lessons, "SECONDS", 1.0)
    lesson = replace(LESSONS["01_scatter"], page=tmp_path / "01_scatter.md")
    lesson.solution.parent.mkdir()
    head = "def chunk_counts(rows: int, ranks: int) -> list[int]:\n"
    text = LESSONS["01_scatter"].solution.read_text()
    lesson.solution.write_text(text.replace(head, f"{head}    while rows < rows:\n        pass\n    unread = 3\n"))
    hangs, unread, *others = words_on(lesson)
    assert (hangs, unread, set(others)) == (WRONG, RIGHT, {WRONG})


@pytest.mark.parametrize("path", HUMAN, ids=lambda path: path.stem)
def test_a_human_error_is_refused_for_its_reason(path):
    first, second = path.read_text().splitlines()[:2]
    exercise = int(re.fullmatch(r"# Exercise (\d) is wrong: .+\.", first)[1])
    reason = re.fullmatch(r"# The checker says: (.+)", second)[1]
    lesson = next(each for stem, each in LESSONS.items() if path.stem.startswith(f"{stem}_"))
    answers = load(path)
    verdicts = [judge(number, check, answers, path) for number, check in checks_of(lesson).items()]
    assert {each.exercise for each in verdicts if each.word != NOT_BEGUN} == {exercise}
    verdict = verdicts[exercise - 1]
    assert verdict.word == WRONG
    assert reason in verdict.reason
