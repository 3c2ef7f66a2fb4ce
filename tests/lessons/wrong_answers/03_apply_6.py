# Exercise 2 is wrong: grad mode and autocast are carried, but autocast's dtype is not.
# The checker says: in a thread: [2]: expected torch.float16, got torch.bfloat16

import contextvars
from collections.abc import Callable
from typing import Any

import torch


def carry(function: Callable[..., Any]) -> Callable[..., Any]:
    grad, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    variables = contextvars.copy_context()

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(grad), torch.autocast("cpu", enabled=autocast):
            return variables.run(function, *args, **kwargs)

    return call
