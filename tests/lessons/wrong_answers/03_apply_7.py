# Exercise 1 is wrong: a thread's join gives None, not what the function returned.
# The checker says: apply_all, 1 functions that return their input: expected [0], got [None]

import threading
from collections.abc import Callable, Sequence
from typing import Any


def apply_all(functions: Sequence[Callable[[Any], Any]], inputs: Sequence[Any]) -> list[Any]:
    threads = [threading.Thread(target=each, args=(x,)) for each, x in zip(functions, inputs, strict=True)]
    for thread in threads:
        thread.start()
    return [thread.join() for thread in threads]
