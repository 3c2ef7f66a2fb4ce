# Exercise 2 is wrong: in the maker's own thread nothing is carried, but the maker may have left the settings since.
# The checker says: carry: the same in the calling thread, later: [3]: expected 'set by the caller', got 'the default'

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import torch


def carry(function: Callable[..., Any]) -> Callable[..., Any]:
    maker = threading.get_ident()
    grad = torch.is_grad_enabled()
    autocast, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    variables = contextvars.copy_context()

    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == maker:
            return function(*args, **kwargs)
        with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype, enabled=autocast):
            return variables.run(function, *args, **kwargs)

    return call
