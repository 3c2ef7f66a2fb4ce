"""Sums of the same tensors again and again: what is added up must lie, and be, as where it goes."""

import pytest
import torch

from mgpu_core.comm.rank_sums import RankSums


@pytest.mark.parametrize("at", [0, -1])
def test_parts_with_fewer_rows_are_refused(at, ranks):
    """They have the strides of those with all rows: by these alone the core would read beyond them."""
    out = torch.zeros(3, 2)
    columns = [[torch.ones(3, 2)] for _ in range(ranks)]
    columns[at] = [torch.ones(1, 2)]
    with pytest.raises(ValueError, match=r"another shape .* one of \(3, 2\)"):
        RankSums([out], range(ranks)).add_up(columns)
    assert not out.any()


def test_some_ranks_add_nothing(ranks):
    outs = [torch.ones(3, 2), torch.ones(2)]
    columns = [[torch.full((3, 2), 1.0 + rank), None] for rank in range(ranks)]
    columns[-1][0] = None
    RankSums(outs, range(ranks)).add_up(columns)
    assert outs[0].tolist() == torch.full((3, 2), sum(range(1, ranks)) * 1.0).tolist()
    assert not outs[1].any()
