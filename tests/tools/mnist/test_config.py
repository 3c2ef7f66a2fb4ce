"""Which settings are refused, and which devices they mean, on machines without a GPU and with two."""

import math

import pytest
import torch

from mgpu_core.tools.mnist import Config, build_model

CPU, GPU0, GPU1 = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


def devices(**settings: object) -> list[torch.device]:
    return Config(**settings).devices()


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu() -> None:
    assert devices() == devices(engine="drop-in") == [CPU, CPU]
    assert devices(engine="plain") == [CPU]
    assert devices(ranks=3) == [CPU] * 3
    assert devices(device_ids=("cpu", CPU), ranks=2) == [CPU, CPU]


@pytest.mark.usefixtures("no_gpu")
def test_as_many_cpu_ranks_as_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MGPU_CORE_CPU_RANKS", "4")
    assert devices() == [CPU] * 4
    assert devices(engine="plain") == [CPU]
    assert devices(ranks=3) == [CPU] * 3
    monkeypatch.setenv("MGPU_CORE_CPU_RANKS", "many")
    with pytest.raises(ValueError, match="MGPU_CORE_CPU_RANKS must be a whole number"):
        devices()


@pytest.mark.usefixtures("two_gpus")
def test_with_two_gpus() -> None:
    assert devices() == [GPU0, GPU1]
    assert devices(engine="plain") == [GPU0]
    assert devices(ranks=3) == [CPU] * 3
    assert devices(device_ids=(1, "cuda:0", "cpu", "cuda:1")) == [GPU1, GPU0, CPU, GPU1]


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"device_ids": (2,)}, "device cuda:2 does not exist: torch sees 2 cuda devices here"),
        ({"device_ids": ("gpu",)}, "'gpu' is not a device"),
        ({"device_ids": ()}, "device_ids is empty"),
        ({"device_ids": (0, 1), "ranks": 3}, "ranks: wanted 3, there are 2 devices"),
        ({"device_ids": (0, 1), "engine": "plain"}, "the plain engine trains on one device, got 2"),
        ({"ranks": 2, "engine": "plain"}, "the plain engine trains on one device, got 2"),
    ],
)
def test_devices_that_are_refused(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        devices(**settings)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"batch": 0}, "batch: wanted a number from 1 to 2147483647, got 0"),
        ({"epochs": -1}, "epochs: wanted a number from 1 to 2147483647, got -1"),
        ({"accumulate": 2**31}, "accumulate: wanted a number from 1 to 2147483647, got 2147483648"),
        ({"ranks": 65}, "ranks: 65 are more than the 64 rows of a batch: some would have none"),
        ({"ranks": 0}, "ranks: wanted a number from 1 to 2147483647, got 0"),
        ({"lr": math.nan}, "lr: wanted a finite number above 0, got nan"),
        ({"lr": math.inf}, "lr: wanted a finite number above 0, got inf"),
        ({"lr": 0.0}, "lr: wanted a finite number above 0, got 0.0"),
        ({"seed": -1}, "seed: wanted a number from 0 to 9223372036854775807, got -1"),
        ({"seed": 2**63}, "seed: wanted a number from 0 to"),
        ({"engine": "ddp"}, "engine: wanted one of step, drop-in, plain, got 'ddp'"),
        ({"amp": "float64"}, "amp: wanted one of bfloat16, float16, got 'float64'"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Config(**settings)


def test_an_unknown_network_is_refused() -> None:
    with pytest.raises(ValueError, match="model: wanted one of simplenet, cnn, got 'resnet'"):
        build_model("resnet")
