"""The optimizers that a :class:`~mgpu_core.TrainStep` runs fused, and nothing else: an option that its kernels lack is
an error here, where ``torch.optim``'s own classes go back to torch's step with a warning.

They take the arguments of ``torch.optim``'s and are those classes: schedulers, groups and states are interchangeable,
and outside a TrainStep they make torch's own step.
"""

from __future__ import annotations

import torch

__all__ = ["SGD", "Adam", "AdamW"]


class SGD(torch.optim.SGD):
    """``torch.optim.SGD``, by the fused kernel in a TrainStep."""


class Adam(torch.optim.Adam):
    """``torch.optim.Adam``, amsgrad and decoupled weight decay included, by the fused kernel in a TrainStep."""


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW``, by the fused kernel in a TrainStep."""
