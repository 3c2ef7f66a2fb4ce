"""What processes compare of an optimizer."""

import torch

from mgpu_core.processes.agreement import numbers_of


def test_numbers_are_plain_and_all_else_is_left_out():
    group = {"lr": torch.tensor(0.5), "betas": (1, torch.tensor([2])), "foreach": None, "params": [1], "fused": True}
    assert numbers_of(group) == {"lr": 0.5, "betas": [1, 2.0], "fused": True}
    assert numbers_of({"table": torch.ones(2), "pair": [1, torch.ones(2)], "name": "sgd"}) == {}
