# Exercise 3 is wrong: the dtype is carried over, but not whether autocast is on: it always is.
# The checker says: without autocast, a product: expected torch.float32, got torch.bfloat16
import threading
from collections.abc import Callable
from typing import Any

import torch


def call_in_thread(function: Callable[[], Any]) -> Any:
    dtype, grad = torch.get_autocast_dtype("cpu"), torch.is_grad_enabled()
    outcome: dict[str, Any] = {}

    def work() -> None:
        try:
            with torch.autocast("cpu", dtype=dtype), torch.set_grad_enabled(grad):
                outcome["value"] = function()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]
