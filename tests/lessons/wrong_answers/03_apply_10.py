# Exercise 2 is wrong: grad mode is set without `with`, and stays so in the thread of whoever calls.
# The checker says: carry: it changes the settings of the thread that it is called in, and leaves them so

import contextvars
from collections.abc import Callable
from typing import Any

import torch


def carry(function: Callable[..., Any]) -> Callable[..., Any]:
    grad = torch.is_grad_enabled()
    autocast, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    variables = contextvars.copy_context()

    def call(*args: Any, **kwargs: Any) -> Any:
        torch.set_grad_enabled(grad)
        with torch.autocast("cpu", dtype, enabled=autocast):
            return variables.run(function, *args, **kwargs)

    return call
