"""Lesson 14, shards: parts, fills and updates in whole numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from mgpu_core.tools.lessons.answers import WrongAnswer, asks_for, expect, expect_raises

__all__ = ["exercise_1", "exercise_2", "exercise_3"]

_DEVICES = (1, 2, 3, 8)


def _parts_of(flat: torch.Tensor, devices: int) -> list[torch.Tensor]:
    size = -(-len(flat) // devices)
    parts = torch.zeros(devices, size, dtype=flat.dtype)
    parts.view(-1)[: len(flat)] = flat
    return [part.clone() for part in parts]


@asks_for("cut")
def exercise_1(answer: Callable[..., Any]) -> None:
    """Check: even and uneven counts, parts of padding alone, and the memory behind each part."""
    for shapes in ([(2, 3), (4,)], [(4, 4)], [(1,), (1, 1)]):
        tensors = [torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape) for shape in shapes]
        for devices in _DEVICES:
            call = f"cut(tensors of shapes {shapes}, {devices})"
            parts = answer(list(tensors), devices)
            expect(call, parts, _parts_of(torch.cat([each.flatten() for each in tensors]), devices))
            kept = [part.untyped_storage().nbytes() for part in parts]
            expect(f"{call}, the bytes behind each part", kept, [part.nbytes for part in parts])


class _Allocator:
    """Room for one tensor, whose numbers are spoilt when it is given back."""

    def __init__(self) -> None:
        self.taken: list[torch.Tensor] = []

    def take(self, count: int) -> torch.Tensor:
        if self.taken:
            raise WrongAnswer("forward fills a layer before it has freed the one before")
        self.taken.append(torch.full((count,), torch.nan, dtype=torch.float64))
        return self.taken[0]

    def free(self, tensor: torch.Tensor) -> None:
        if not any(tensor is each for each in self.taken):
            raise WrongAnswer("forward: memory.free wants the tensor that memory.take gave, once")
        self.taken.pop().fill_(torch.nan)


@asks_for("forward")
def exercise_2(answer: Callable[..., Any]) -> None:
    """Check: each block gets all of its layer, one layer at a time; nothing is left, also after a failure."""
    flats = [torch.arange(5.0 + i).double() + 10 * i for i in range(3)]
    x = torch.arange(5.0).double()
    for devices in _DEVICES:
        call, memory = f"forward(layers of 5, 6 and 7 numbers in {devices} parts, memory, x)", _Allocator()
        layers = [(_parts_of(flat, devices), _block) for flat in flats]
        expect(call, answer(layers, memory, x), 27 * x + 9 * flats[0] + 3 * flats[1][:5] + flats[2][:5])
        expect(f"{call}, tensors that are not freed", len(memory.taken), 0)
        layers[1] = (layers[1][0], _failing)
        expect_raises(f"{call}, whose second block raises", ArithmeticError, partial(answer, layers, memory, x))
        expect(f"{call}, whose second block raises, tensors that are not freed", len(memory.taken), 0)


def _block(whole: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x * 3 + whole[:5]


def _failing(whole: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    raise ArithmeticError


@asks_for("update")
def exercise_3(answer: Callable[..., Any]) -> None:
    """Check: two steps in place, with padding, and gradients as they were."""
    for devices in _DEVICES:
        for count in (9, 16):
            call = f"update({devices} parts of {count} numbers, moments, gradients, 0.5, 0.25)"
            value, moment = torch.arange(float(count)), torch.zeros(count)
            parts, moments = _parts_of(value, devices), _parts_of(moment, devices)
            for turn in range(2):
                gradients = [4 * torch.arange(float(count)) + 8 * rank + turn for rank in range(devices)]
                moment = 0.25 * moment + torch.stack(gradients).sum(dim=0)
                value = value - 0.5 * moment
                before = [each.clone() for each in gradients]
                answer(list(parts), list(moments), gradients, 0.5, 0.25)
                expect(f"{call}, the parts after {turn + 1} calls", parts, _parts_of(value, devices))
                expect(f"{call}, the moments after {turn + 1} calls", moments, _parts_of(moment, devices))
                expect(f"{call}, the gradients", gradients, before)
