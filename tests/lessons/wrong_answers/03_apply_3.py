# Exercise 1 is wrong: failures stay in their threads, and the caller gets None.
# The checker says: 1 ranks of which [0] fail: expected a KeyError, got [None]

import threading
from collections.abc import Callable, Sequence
from typing import Any


def apply_all(functions: Sequence[Callable[[Any], Any]], inputs: Sequence[Any]) -> list[Any]:
    results: list[Any] = [None] * len(functions)

    def run(rank: int) -> None:
        try:
            results[rank] = functions[rank](inputs[rank])
        except Exception as error:
            print(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
