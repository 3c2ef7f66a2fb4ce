"""Which lessons there are, and where their files lie.

A lesson is a page `05_reduce.md` with files of the same stem next to it: exercises, solutions, picture.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Lesson", "find_lesson", "find_lessons", "folder"]

_STEM = re.compile(r"(\d\d)_\w+")


@dataclass(frozen=True, slots=True)
class Lesson:
    """One lesson: its number and its page."""

    number: int
    page: Path

    @property
    def title(self) -> str:
        """The page's first line."""
        return self.text.partition("\n")[0].strip("# ")

    @property
    def text(self) -> str:
        """The page."""
        return self.page.read_text(encoding="utf-8")

    @property
    def stub(self) -> Path:
        """The exercises as the learner gets them."""
        return self.page.parent / "exercises" / f"{self.page.stem}.py"

    @property
    def solution(self) -> Path:
        """The exercises solved."""
        return self.page.parent / "solutions" / f"{self.page.stem}.py"

    @property
    def picture(self) -> Path:
        """The picture on the page; not in an installed package, where the lesson draws it."""
        return self.page.parent / "pictures" / f"{self.page.stem}.png"

    @property
    def checks(self) -> str:
        """The module that checks its exercises."""
        return f"mgpu_core.tools.lessons.checks.{self.file_stem}"

    @property
    def file_stem(self) -> str:
        """The name of the learner's own files: `lesson_05`."""
        return f"lesson_{self.number:02}"


def folder() -> Path:
    """Return the folder of the pages: in the package, or in a checkout next to it.

    Raises:
        FileNotFoundError: in neither.
    """
    here = Path(__file__).resolve().parent
    for pages in (here / "pages", here.parents[2] / "docs" / "lessons"):
        if pages.is_dir():
            return pages
    raise FileNotFoundError(f"the pages of the lessons are not in {here / 'pages'}: install mgpu_core again")


def find_lessons() -> list[Lesson]:
    """Return all of them, by number."""
    pages = sorted(folder().glob("*.md"))
    return [Lesson(int(page.stem[:2]), page) for page in pages if _STEM.fullmatch(page.stem)]


def find_lesson(number: int) -> Lesson:
    """Return the lesson of this number.

    Raises:
        ValueError: there is none.
    """
    lessons = find_lessons()
    for lesson in lessons:
        if lesson.number == number:
            return lesson
    raise ValueError(f"there is no lesson {number}; there are {', '.join(str(each.number) for each in lessons)}")
