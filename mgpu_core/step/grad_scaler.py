"""Mixed precision: which dtype a forward computes in, and the scale that keeps float16 gradients off zero.

Backward starts from the scale, so it costs no pass over memory, and it is divided out together with the other
factors of the sums.  Sums that are not finite mean that it was too large: all ranks skip that update, because
it is the team's sums that are looked at, and the scale is halved.  The numbers are those of ``torch.amp.GradScaler``.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["LossScale"]

INITIAL, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000


class LossScale:
    """The scale of the loss; 1 for ever unless gradients are float16.

    Args:
        amp_dtype: autocast's dtype in forwards.

    Attributes:
        scale: the factor of losses.
        skipped: updates that were skipped so far.
    """

    def __init__(self, amp_dtype: torch.dtype | None) -> None:
        self.is_on = amp_dtype == torch.float16
        self.scale = INITIAL if self.is_on else 1.0
        self.skipped = 0
        self._good = 0  # updates in a row

    def overflowed(self) -> None:
        """Halve the scale after a skipped update.

        Raises:
            FloatingPointError: so small a scale cannot be the reason.
        """
        self._good = 0
        if self.scale < 1:
            raise FloatingPointError(
                f"gradients are not finite at a loss scale of {self.scale:g}: the numbers themselves overflow, or the "
                "loss is NaN; nothing was updated"
            )
        self.skipped += 1
        self.scale *= BACKOFF

    def went_well(self) -> None:
        """Count an update; double the scale after enough of them."""
        self._good += 1
        if self.is_on and self._good == INTERVAL:
            self.scale *= GROWTH
            self._good = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from."""
        return {"is_on": self.is_on, "scale": self.scale, "good": self._good, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put a state back; one without a scale makes this one begin anew."""
        if not self.is_on:
            return
        self.scale, self._good, self.skipped = INITIAL, 0, 0
        if state.get("is_on", True):
            self.scale, self._good, self.skipped = state["scale"], state["good"], state["skipped"]
