"""The collectives of `mgpu bench` on several devices: ours and the loop in torch give the exact values."""

from functools import partial

import pytest

from mgpu_core.tools.bench import cases
from mgpu_core.tools.bench.collective import Holding, TeamTask

NAMES = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "scatter", "gather")


@pytest.mark.parametrize("devices", [("fake:0", "fake:1"), ("fake:2", "fake:0", "fake:2")], ids="-".join)
@pytest.mark.parametrize("name", NAMES)
def test_ours_and_the_loop_are_right(name, devices):
    collective = cases.load(name).plan.args[0]
    for op in collective.ops or ("sum",):
        task = TeamTask(len(devices), count=33, op=op, devices=devices)
        holding = Holding(collective, task, range(len(devices)))
        assert [str(each.device) for each in holding.sends] == list(devices)
        for do in (collective.ours, collective.loop):
            assert holding.wrong(partial(do, task, holding.sends), 3) == 0
