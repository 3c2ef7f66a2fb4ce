# Exercise 3 is wrong: the thread knows nothing of autocast.
# The checker says: under autocast in torch.bfloat16, a product: expected torch.bfloat16, got torch.float32
import threading
from collections.abc import Callable
from typing import Any


def call_in_thread(function: Callable[[], Any]) -> Any:
    outcome: list[Any] = []
    thread = threading.Thread(target=lambda: outcome.append(function()))
    thread.start()
    thread.join()
    return outcome[0]
