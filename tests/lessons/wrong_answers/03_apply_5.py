# Exercise 2 is wrong: the settings are read in the other thread, which has none of them.
# The checker says: in a thread: [3]: expected 'set by the caller', got 'the default'

import contextvars
from collections.abc import Callable
from typing import Any

import torch


def carry(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        grad, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        variables = contextvars.copy_context()
        with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return variables.run(function, *args, **kwargs)

    return call
