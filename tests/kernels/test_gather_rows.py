"""gather_rows against its plain-torch truth, and what it refuses."""

import pytest
import torch

from mgpu_core.kernels import gather_rows, reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (8,), (1, 28, 28), (3, 5, 0), (100, 41)])
@pytest.mark.parametrize("batch", [0, 1, 5, 700])
def test_equals_the_reference(dtype, shape, batch):
    generator = torch.Generator("cpu").manual_seed(0)
    rows = torch.randint(0, 256, (11, *shape), dtype=torch.uint8, generator=generator, device="cpu")
    index = torch.randint(0, 11, (batch,), generator=generator, device="cpu")
    rows, index = (tensor.to(torch.get_default_device()) for tensor in (rows, index))
    out = torch.full((batch, *shape), 77.0, dtype=dtype)
    made = gather_rows(rows, index, scale=0.31, shift=-1.5, dtype=dtype, out=out)
    assert made is out
    assert torch.equal(out, reference.gather_rows(rows, index, scale=0.31, shift=-1.5, dtype=dtype))


def test_defaults_are_zero_to_one():
    rows = torch.tensor([[0], [255]], dtype=torch.uint8)
    assert gather_rows(rows, torch.tensor([1, 0, 1])).tolist() == [[1.0], [0.0], [1.0]]


def test_writing_tells_autograd():
    out = torch.zeros(1, 1)
    before = out._version
    gather_rows(torch.zeros(1, 1, dtype=torch.uint8), torch.tensor([0]), out=out)
    assert out._version > before


@pytest.mark.cpu_only(
    "says cpu in what it expects, mixes in arrays of numpy, or wants what a device cannot know in time"
)
@pytest.mark.parametrize("bad", [-1, 3, 2**40])
def test_an_index_out_of_range_writes_nothing(bad):
    out = torch.full((3, 2), 77.0)
    with pytest.raises(ValueError, match=rf"index\[1\] is {bad}, but there are 3 rows"):
        gather_rows(torch.zeros(3, 2, dtype=torch.uint8), torch.tensor([0, bad, 1]), out=out)
    assert torch.equal(out, torch.full((3, 2), 77.0))


def test_rows_of_nothing():
    """The host looks at the index; a device has no time to, and says NaN."""
    rows, index, out = torch.zeros(0, 2, dtype=torch.uint8), torch.tensor([0, 5]), torch.full((2, 2), 77.0)
    if rows.device.type == "cpu":
        with pytest.raises(ValueError, match="there are 0 rows"):
            gather_rows(rows, index, out=out)
    else:
        gather_rows(rows, index, out=out)
        assert out.cpu().isnan().all()


@pytest.mark.cpu_only(
    "says cpu in what it expects, mixes in arrays of numpy, or wants what a device cannot know in time"
)
def test_refusals():
    rows, index = torch.zeros(3, 2, dtype=torch.uint8), torch.tensor([0])
    with pytest.raises(TypeError, match="rows must be uint8"):
        gather_rows(rows.float(), index)
    with pytest.raises(TypeError, match="index int64"):
        gather_rows(rows, index.int())
    with pytest.raises(TypeError, match="dtype must be one of float32"):
        gather_rows(rows, index, dtype=torch.float64)
    with pytest.raises(ValueError, match="contiguous"):
        gather_rows(torch.zeros(2, 3, dtype=torch.uint8).t(), index)
    with pytest.raises(ValueError, match=r"index \(batch,\)"):
        gather_rows(rows, index.reshape(1, 1))
    with pytest.raises(TypeError, match="index is on the meta device"):
        gather_rows(rows, index.to("meta"))
    with pytest.raises(ValueError, match="out must be contiguous"):
        gather_rows(rows, index, out=torch.zeros(2, 2))


def test_rows_are_not_written_over_themselves():
    rows = torch.arange(64, dtype=torch.uint8).reshape(8, 8)
    before = rows.clone()
    with pytest.raises(ValueError, match="out and an input share memory"):
        gather_rows(rows, torch.tensor([0, 0]), out=rows.view(torch.float32).view(2, 8))
    assert torch.equal(rows, before)
