"""One recorded step in the few numbers from which other sizes are predicted, and its JSON.

Values are validated at construction, so every profile has sensible numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import TypeVar

__all__ = ["BucketProfile", "StepProfile"]

FORMAT = "mgpu_core step 1"
_MOST = 2**63
"""No number of a step is larger; floats hold the product of two such."""


@dataclass(frozen=True, slots=True)
class BucketProfile:
    """Gradients that are all-reduced together.

    Attributes:
        nbytes: of one rank.
        ready_fraction: 0 to 1: how much of backward has run when its last gradient is there.
    """

    nbytes: int
    ready_fraction: float

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for numbers out of range."""
        _check_whole("a bucket's nbytes", self.nbytes, least=1)
        _check_number("a bucket's ready_fraction", self.ready_fraction)
        if self.ready_fraction > 1:
            raise ValueError(f"a bucket's ready_fraction must be 0 to 1, not {self.ready_fraction}")


@dataclass(frozen=True, slots=True)
class StepProfile:
    """One step of training, as it was recorded; times in seconds, sizes in bytes.

    Attributes:
        name: of the net, for titles.
        ranks: with which it was recorded.
        rows: of the whole batch, over all ranks.
        forward_seconds: of one rank; loss included.
        backward_seconds: of one rank, without waiting for other ranks.
        update_seconds: of the optimizer, and of the norm that it needs.
        scatter_nbytes: of the whole batch, inputs and targets; 0 if nothing is scattered.
        gather_nbytes: of all that is gathered, over all ranks; 0 if nothing is.
        buckets: in the order in which they are all-reduced.
        host_overhead_seconds: the rest of the step: Python, launches, waiting.
        broadcast_nbytes: of one rank, that rank 0 gives all others in each step: parameters and buffers of the drop-in.
        device: the kind of device of the recorded ranks, such as ``cpu`` or ``cuda``; empty: unknown.
        host_forward_seconds: in which the host asks a GPU for a rank's forward and loss; 0: not known, or a CPU rank.
        host_backward_seconds: of a rank's backward.
    """

    name: str
    ranks: int
    rows: int
    forward_seconds: float
    backward_seconds: float
    update_seconds: float
    scatter_nbytes: int
    gather_nbytes: int
    buckets: tuple[BucketProfile, ...]
    host_overhead_seconds: float = 0.0
    broadcast_nbytes: int = 0
    host_forward_seconds: float = 0.0
    host_backward_seconds: float = 0.0
    device: str = ""

    def __post_init__(self) -> None:
        """Raise ``ValueError``, naming the field, for impossible values."""
        for name in (each.name for each in fields(self)):
            value = getattr(self, name)
            if name.endswith("_seconds"):
                _check_number(name, value)
            elif name.endswith("_nbytes"):
                _check_whole(name, value, least=0)
            elif name in ("ranks", "rows"):
                _check_whole(name, value, least=1)
            elif name != "buckets" and not isinstance(value, str):
                raise ValueError(f"{name} must be a string, not {value!r}")
        if self.forward_seconds + self.backward_seconds == 0:
            raise ValueError("forward_seconds and backward_seconds are both 0: nothing was computed")
        if self.ranks > self.rows:
            raise ValueError(f"{self.rows} rows over {self.ranks} ranks: some rank has none")

    def to_json(self) -> str:
        """Return the profile as JSON, indented for people."""
        return json.dumps({"format": FORMAT} | asdict(self), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> StepProfile:
        """Read the text that :meth:`to_json` wrote.

        Raises:
            ValueError: it is not JSON, not of this format, or a field is missing, unknown or out of range.
        """
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON: {error}") from error
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise ValueError(
                f'not a recorded step: wanted a JSON object with "format": "{FORMAT}", as `mgpu explain --profile` '
                "writes it"
            )
        buckets = content.get("buckets")
        if not isinstance(buckets, list):
            raise ValueError("buckets must be a list of objects with nbytes and ready_fraction")
        content["buckets"] = tuple(_built(BucketProfile, each, "a bucket") for each in buckets)
        return _built(cls, content, "the step")


_Made = TypeVar("_Made", BucketProfile, StepProfile)


def _built(kind: type[_Made], content: object, what: str) -> _Made:
    """``kind(**content)``, or an error that names the fields that are wrong."""
    if not isinstance(content, Mapping):
        raise ValueError(f"{what} must be a JSON object, not {content!r}")
    known = {each.name for each in fields(kind)}
    if unknown := sorted(set(content) - known):
        raise ValueError(f"{what} has unknown fields: {', '.join(unknown)}")
    optional = {each.name for each in fields(kind) if each.default is not MISSING}
    if missing := sorted(known - set(content) - optional):
        raise ValueError(f"{what} lacks: {', '.join(missing)}")
    return kind(**content)


def _check_number(name: str, value: object) -> None:
    # The comparison is false for NaN, and exact for whole numbers that no float holds.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _MOST:
        raise ValueError(f"{name} must be a number, finite and not negative, not {value!r}")


def _check_whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < _MOST:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")
