# Exercise 1 is wrong: a new exception with the rank in its text; what the old one carried is gone.
# The checker says: expected the exception of rank 0 itself, got KeyError("rank 0: 'of rank 0'")

import threading
from collections.abc import Callable, Sequence
from typing import Any


def apply_all(functions: Sequence[Callable[[Any], Any]], inputs: Sequence[Any]) -> list[Any]:
    results: list[Any] = [None] * len(functions)
    failures: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = functions[rank](inputs[rank])
        except BaseException as error:
            failures[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank, error in sorted(failures.items()):
        raise type(error)(f"rank {rank}: {error}") from error
    return results
