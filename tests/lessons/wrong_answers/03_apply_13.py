# Exercise 1 is wrong: a pool has a limit, by default one that depends on the cores, and at most this one.
# The checker says: functions that wait for each other: they were not all running at once

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def apply_all(functions: Sequence[Callable[[Any], Any]], inputs: Sequence[Any]) -> list[Any]:
    with ThreadPoolExecutor(max_workers=32) as pool:
        futures = [pool.submit(function, x) for function, x in zip(functions, inputs, strict=True)]
    return [future.result() for future in futures]
