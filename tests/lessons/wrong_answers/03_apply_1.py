# Exercise 1 is wrong: a loop; results are right, but nothing runs at once.
# The checker says: 2 functions that wait for each other: they were not all running at once

from collections.abc import Callable, Sequence
from typing import Any


def apply_all(functions: Sequence[Callable[[Any], Any]], inputs: Sequence[Any]) -> list[Any]:
    return [function(x) for function, x in zip(functions, inputs, strict=True)]
