# Exercise 1 is wrong: it raises at the first failure that it sees, while other ranks still run.
# The checker says: it raised while other ranks were still running: join all of them first

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any


def apply_all(functions: Sequence[Callable[[Any], Any]], inputs: Sequence[Any]) -> list[Any]:
    ended: queue.Queue[tuple[int, Any, BaseException | None]] = queue.Queue()

    def run(rank: int) -> None:
        try:
            ended.put((rank, functions[rank](inputs[rank]), None))
        except BaseException as error:
            ended.put((rank, None, error))

    for rank in range(len(functions)):
        threading.Thread(target=run, args=(rank,)).start()
    results: list[Any] = [None] * len(functions)
    for _ in functions:
        rank, results_of_rank, error = ended.get()
        if error is not None:
            raise error
        results[rank] = results_of_rank
    return results
