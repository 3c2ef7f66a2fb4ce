"""What gradients are multiplied by when their norm is limited, and what becomes of padding."""

import math

import pytest
import torch

from mgpu_core.step.grad_clip import Sums, factor_of, multiply


@pytest.mark.parametrize(("factor", "wanted"), [(None, 1.0), (0.5, 0.5), (-0.5, -0.5)])
def test_a_small_norm_leaves_a_factor_as_it_is(factor, wanted):
    found = factor_of(factor, torch.tensor(6.0), 6.5)
    assert type(found) is float
    assert found == wanted


@pytest.mark.parametrize("factor", [2.0, torch.tensor(2.0, dtype=torch.float64)])
def test_a_large_norm_is_made_the_limit(factor):
    found = factor_of(factor, torch.tensor(8.0), 4.0)  # 8 times 2 is 4 times the limit
    assert float(found) == pytest.approx(0.5, abs=1e-6)
    assert type(found) is type(factor)


@pytest.mark.parametrize("factor", [2.0, math.nan, torch.tensor(math.inf)])
def test_padding_stays_zero(factor):
    flat, sparse = torch.tensor([1.0, 0.0, 3.0, 0.0]), torch.eye(2).to_sparse()
    multiply(Sums([[flat]], [[torch.tensor([1, 3])]], [flat], {0: sparse}), factor)
    assert flat[1::2].tolist() == [0.0, 0.0]
    wanted = torch.tensor([1.0, 3.0]) * factor
    assert torch.equal(flat[::2].nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert torch.equal(sparse.coalesce().values().nan_to_num(7.0), (torch.ones(2) * factor).nan_to_num(7.0))
