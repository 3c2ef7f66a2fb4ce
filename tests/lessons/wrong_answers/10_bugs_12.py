# Exercise 3 is wrong: the pool keeps its thread for the next call, and for ever.
# The checker says: call_in_thread: a thread is still there when it has returned
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

pool = ThreadPoolExecutor(max_workers=1)


def call_in_thread(function: Callable[[], Any]) -> Any:
    on, dtype, grad = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_grad_enabled()

    def work() -> Any:
        with torch.autocast("cpu", dtype=dtype, enabled=on), torch.set_grad_enabled(grad):
            return function()

    return pool.submit(work).result()
