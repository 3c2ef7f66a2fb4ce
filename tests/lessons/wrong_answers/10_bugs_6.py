# Exercise 3 is wrong: the function's exception dies with its thread.
# The checker says: expected a KeyError, got None
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch


def call_in_thread(function: Callable[[], Any]) -> Any:
    on, dtype, grad = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_grad_enabled()
    outcome: list[Any] = [None]

    def work() -> None:
        modes = torch.autocast("cpu", dtype=dtype, enabled=on), torch.set_grad_enabled(grad)
        with modes[0], modes[1], contextlib.suppress(Exception):
            outcome[0] = function()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return outcome[0]
