"""The result of :func:`mgpu_core.advise`, and the forms in which to have it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mgpu_core.support.tables import Lines, html_of, text_of
from mgpu_core.tools.advise.data import AdviceData
from mgpu_core.tools.advise.from_json import FORMAT, read
from mgpu_core.tools.advise.picture import draw
from mgpu_core.tools.advise.text import lines_of

__all__ = ["Advice"]


class Advice(AdviceData):
    """One device against many ranks, on one model; ``print`` it, or see :meth:`plot` and :meth:`to_json`."""

    @property
    def lines(self) -> Lines:
        """The text, with its table."""
        return lines_of(self)

    def __str__(self) -> str:
        return text_of(self.lines)

    def _repr_html_(self) -> str:
        return html_of(self.lines)

    def plot(self, path: str | Path) -> None:
        """Draw speed-up against batch, with the break-even, as a PNG.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
            OSError: the file cannot be written; one before it is kept.
        """
        draw(self, Path(path))

    def to_json(self) -> str:
        """Return all numbers, indented for people; medians and speed-ups next to the samples."""
        content: dict[str, Any] = {"format": FORMAT} | asdict(self)
        content["environment"] = dict(self.environment)
        for measurement, told in zip(self.measurements, content["measurements"], strict=True):
            told |= {"median_s": measurement.median_s, "speedup": self.speedup(measurement.way, measurement.batch)}
        return json.dumps(content, indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Advice:
        """Read the text that :meth:`to_json` wrote.

        Raises:
            ValueError: it is not JSON, or not of this format.
        """
        return cls(**read(text))
