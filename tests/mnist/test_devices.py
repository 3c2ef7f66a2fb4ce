"""Which devices a wish means, on machines without a GPU and with two."""

import pytest
import torch

from mgpu_core.mnist.devices import describe, parse_device_ids, resolve_devices

CPU, GPU0, GPU1 = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


def test_parse() -> None:
    assert parse_device_ids("0, cpu,cuda:1,cpu") == (0, "cpu", "cuda:1", "cpu")
    assert parse_device_ids("-1,") == ("-1", "")


def test_describe() -> None:
    assert describe([CPU, GPU1, CPU]) == "2 x cpu, cuda:1"


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu() -> None:
    assert resolve_devices(None, None, single=False) == [CPU, CPU]
    assert resolve_devices(None, None, single=True) == [CPU]
    assert resolve_devices(None, 3, single=False) == [CPU] * 3
    assert resolve_devices(("cpu", CPU), 2, single=False) == [CPU, CPU]
    assert resolve_devices(("cpu:0",), None, single=True) == [CPU]


@pytest.mark.usefixtures("no_gpu")
def test_as_many_cpu_ranks_as_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MGPU_CORE_CPU_RANKS", "4")
    assert resolve_devices(None, None, single=False) == [CPU] * 4
    assert resolve_devices(None, None, single=True) == [CPU]
    assert resolve_devices(None, 3, single=False) == [CPU] * 3
    monkeypatch.setenv("MGPU_CORE_CPU_RANKS", "many")
    with pytest.raises(ValueError, match="MGPU_CORE_CPU_RANKS must be a whole number"):
        resolve_devices(None, None, single=False)


@pytest.mark.usefixtures("two_gpus")
def test_with_two_gpus() -> None:
    assert resolve_devices(None, None, single=False) == [GPU0, GPU1]
    assert resolve_devices(None, None, single=True) == [GPU0]
    assert resolve_devices(None, 1, single=False) == [GPU0]
    assert resolve_devices((1, "cuda", "cpu", "cuda:1"), None, single=False) == [GPU1, GPU0, CPU, GPU1]


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("device_ids", "ranks", "single", "told"),
    [
        pytest.param(
            (2,), None, False, "device-ids: there is no device '2' here, only cpu, cuda:0, cuda:1", id="number"
        ),
        pytest.param(("cuda:2",), None, False, "no device 'cuda:2' here", id="index"),
        pytest.param(("cpu:1",), None, False, "no device 'cpu:1' here", id="second cpu"),
        pytest.param(("meta",), None, False, "no device 'meta' here", id="no device to compute on"),
        pytest.param(("gpu",), None, False, "no device 'gpu' here", id="no device"),
        pytest.param(("",), None, False, "no device '' here", id="nothing"),
        pytest.param((), None, False, "wanted at least one device", id="empty"),
        pytest.param(None, 3, False, "ranks: wanted at most 2, one for each of cuda:0, cuda:1, got 3", id="too many"),
        pytest.param((0, 1), 3, False, "disagree: 3 ranks, 2 devices", id="disagree"),
        pytest.param((0, 1), None, True, "one device, got 2: cuda:0, cuda:1", id="plain"),
        pytest.param(None, 2, True, "one device, got 2", id="plain ranks"),
    ],
)
def test_refusals(device_ids: tuple[int | str, ...] | None, ranks: int | None, single: bool, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        resolve_devices(device_ids, ranks, single=single)
