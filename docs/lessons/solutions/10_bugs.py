"""Lesson 10, the gallery of bugs: the solution."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch


def batch_loss(losses: Sequence[float], rows: Sequence[int]) -> float:
    """Each rank by its rows."""
    return sum(
        loss * count for loss, count in zip(losses, rows, strict=True) if count
    ) / sum(rows)


def sum_gradients(
    columns: Sequence[Sequence[torch.Tensor | None]],
) -> list[torch.Tensor | None]:
    """A clone of the first that is there, and the others on top."""
    sums: list[torch.Tensor | None] = []
    for row in zip(*columns, strict=True):
        present = [gradient for gradient in row if gradient is not None]
        total = present[0].clone() if present else None
        for gradient in present[1:]:
            total += gradient
        sums.append(total)
    return sums


def call_in_thread(function: Callable[[], Any]) -> Any:
    """The modes are read here and entered there; the outcome travels back in a dictionary."""
    on, dtype, grad = (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_grad_enabled(),
    )
    outcome: dict[str, Any] = {}

    def work() -> None:
        try:
            with (
                torch.autocast("cpu", dtype=dtype, enabled=on),
                torch.set_grad_enabled(grad),
            ):
                outcome["value"] = function()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]
