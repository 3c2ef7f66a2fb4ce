"""Batches of tensors in memory: every row once, in the order that is asked for."""

import pytest
import torch

from mgpu_core import DeviceLoader, TensorLoader
from mgpu_core.data import tensor_loader
from mgpu_core.data.tensor_loader import CUT_NBYTES


def data(rows, *shape):
    return torch.arange(rows, dtype=torch.uint8).view(rows, *(1,) * len(shape)).expand(rows, *shape).contiguous()


@pytest.mark.parametrize(("rows", "batch", "sizes"), [(10, 4, [4, 4, 2]), (8, 4, [4, 4]), (3, 8, [3]), (0, 4, [])])
def test_rows_in_order(rows, batch, sizes):
    labels = torch.arange(rows)
    loader = TensorLoader(data(rows, 2, 3), labels, batch_size=batch, scale=2.0, shift=1.0)
    got = [(x, y) for x, y in loader if len(y)]
    assert [len(x) for x, _ in got] == sizes
    assert len(loader) == len(sizes)
    assert [row for _, y in got for row in y.tolist()] == list(range(rows))
    for x, y in got:
        assert (x.dtype, x.shape[1:]) == (torch.float32, (2, 3))
        assert torch.equal(x, (y.float() * 2 + 1).view(-1, 1, 1).expand_as(x))


def test_an_order_of_its_own_for_each_iteration():
    loader = TensorLoader(torch.arange(100), batch_size=7, shuffle=True, generator=torch.Generator().manual_seed(1))
    first, second = ([row for (x,) in loader for row in x.tolist()] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second
    again = TensorLoader(torch.arange(100), batch_size=7, shuffle=True, generator=torch.Generator().manual_seed(1))
    assert [row for (x,) in again for row in x.tolist()] == first


def test_the_rest_can_be_dropped():
    loader = TensorLoader(torch.arange(10), batch_size=4, drop_last=True)
    assert ([x.tolist() for (x,) in loader], len(loader)) == ([[0, 1, 2, 3], [4, 5, 6, 7]], 2)


def test_several_cuts_of_large_rows():
    rows = 3 * CUT_NBYTES // (4 * 1000)  # more than are cut at once
    whole = data(250, 1000).repeat(-(-rows // 250), 1)[:rows]
    got = torch.cat([x for (x,) in TensorLoader(whole, batch_size=100, scale=1.0)])
    assert torch.equal(got, whole.float())


def test_bytes_become_numbers_from_0_to_1():
    ((x,),) = TensorLoader(torch.tensor([0, 51, 255], dtype=torch.uint8), batch_size=3)
    assert x.tolist() == pytest.approx([0.0, 0.2, 1.0])


def test_a_row_a_batch():
    assert [x.tolist() for (x,) in TensorLoader(torch.arange(3), batch_size=1)] == [[0], [1], [2]]


@pytest.mark.parametrize(("columns", "batch", "cuts"), [(1000, 100, 1), (6000, 100, 2), (10**6, 7, 18)])
def test_small_batches_are_cut_together(monkeypatch, columns, batch, cuts):
    """As many rows of float32 as fit in two megabytes, counting all tensors, and at least one batch."""
    seen = []
    original = tensor_loader.gather_rows
    monkeypatch.setattr(tensor_loader, "gather_rows", lambda *a, **k: seen.append(len(a[1])) or original(*a, **k))
    rows = torch.zeros(1, dtype=torch.uint8).expand(120, columns // 2)
    list(TensorLoader(rows.contiguous(), rows.contiguous(), batch_size=batch))
    assert len(seen) == 2 * cuts
    assert sum(seen) == 240


def test_batches_on_the_devices_of_ranks():
    loader = DeviceLoader(TensorLoader(data(5, 2), torch.arange(5), batch_size=2), ["cpu"] * 2)
    assert [y.tolist() for _, y in loader] == [[0, 1], [2, 3], [4]]
    assert (len(loader), loader.batch_size) == (3, 2)


@pytest.mark.parametrize(
    ("tensors", "options", "text"),
    [
        ([], {}, "not the shapes none"),
        ([torch.tensor(1)], {}, r"not the shapes \(\)"),
        ([torch.ones(2), torch.ones(3)], {}, r"not the shapes \(2,\), \(3,\)"),
        ([torch.ones(2), torch.ones(2, device="meta")], {}, "on one device, not cpu, meta"),
        ([torch.ones(2)], {"batch_size": 0}, "1 or more, not 0"),
    ],
)
def test_wrong_arguments(tensors, options, text):
    with pytest.raises(ValueError, match=text):
        TensorLoader(*tensors, **({"batch_size": 1} | options))
