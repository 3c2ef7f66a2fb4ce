"""Loaders on a GPU: batches hold what was written, however late the copies are."""

import pytest
import torch

import mgpu_core

gpu_only = pytest.mark.usefixtures("gpu_only")


@pytest.mark.parametrize("source", ["host", "device"])
def test_a_tensor_loader_through_a_device_loader(here, source):
    where = here.device if source == "device" else "cpu"
    images = torch.randint(0, 256, (1000, 20), dtype=torch.uint8)
    labels = torch.arange(1000) % 3
    tensors = mgpu_core.TensorLoader(images.to(where), labels.to(where), batch_size=64, shuffle=False)
    with here.late():
        for number, (x, y) in enumerate(mgpu_core.DeviceLoader(tensors, here.team(2))):
            here.poison()
            rows = slice(64 * number, 64 * number + 64)
            assert torch.equal(y.cpu(), labels[rows])
            torch.testing.assert_close(x.cpu(), images[rows].float() / 255)


class Source:
    """Batches of one number each, written late where they are on the GPU."""

    def __init__(self, here, device):
        self.here, self.device = here, device

    def __iter__(self):
        for number in range(12):
            x = torch.empty(2048, 512, device=self.device)
            if self.device != "cpu":
                self.here.sleep(5)
            x.fill_(number)
            yield x
            del x
            self.here.poison()


@gpu_only
@pytest.mark.parametrize("source", ["host", "device"])
def test_batches_are_split_over_a_gpu_and_the_cpu(here, source):
    batches = Source(here, here.name if source == "device" else "cpu")
    for number, x in enumerate(mgpu_core.DeviceLoader(batches, [here.name, "cpu"])):
        assert all(bool((part == number).all()) for part in x.parts), number
