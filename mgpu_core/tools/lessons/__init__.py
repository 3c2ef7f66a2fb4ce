"""The lessons: pages whose code runs, a picture that each draws from its own data, and exercises with a checker.

`mgpu lesson` lists, shows, runs, starts and checks them.  The pages lie in docs/lessons, and in an installed package in
the folder `pages` next to this file.
"""

from mgpu_core.tools.lessons.answers import WrongAnswer
from mgpu_core.tools.lessons.catalogue import Lesson, find_lesson, find_lessons

__all__ = ["Lesson", "WrongAnswer", "find_lesson", "find_lessons"]
