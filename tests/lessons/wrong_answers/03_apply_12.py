# Exercise 2 is wrong: it only switches gradients off and autocast on; a thread that has them so already keeps them.
# The checker says: carry: the same in a thread whose own settings are the opposite: [0]: expected True, got False

import contextlib
import contextvars
from collections.abc import Callable
from typing import Any

import torch


def carry(function: Callable[..., Any]) -> Callable[..., Any]:
    grad, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    dtype, variables = torch.get_autocast_dtype("cpu"), contextvars.copy_context()

    def call(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as settings:
            if not grad:
                settings.enter_context(torch.no_grad())
            if autocast:
                settings.enter_context(torch.autocast("cpu", dtype))
            return variables.run(function, *args, **kwargs)

    return call
