"""Predicted beside measured: which formula a recorded collective gets, and where it is shown."""

import pytest
import torch

import mgpu_core
from mgpu_core import comm
from mgpu_core.tools.explain import cost, page
from mgpu_core.tools.explain.predicted import predicted_seconds
from mgpu_core.tools.explain.topology import HostMemory, Tier, parse_topology
from mgpu_core.trace.events import Collective

PER_BYTE = (Tier(None, 1.0),)  # a second a byte, whatever the working set
HOST = HostMemory(call_s=100.0, rank_s=1.0, one_core=PER_BYTE, all_cores=PER_BYTE)


def call(operation, nbytes, route="direct"):
    ranks = tuple(range(len(nbytes)))
    return Collective(operation, route, ranks, nbytes, ("cpu",) * len(nbytes), (), {"cpu": (0, 5)}, 0, 5, 1)


@pytest.mark.parametrize(
    ("made", "seconds"),
    [
        (call("all_reduce", (8,) * 4), 100 + 4 + 2 * 4 * 8),
        (call("all_reduce", (8,) * 4, "ring"), 100 + 4 + 3 * 8 * 6),
        (call("broadcast", (0, 8, 8)), 100 + 3 + 3 * 16),
        (call("reduce", (8, 8)), 100 + 2 + 4 * 8),
        (call("scatter", (16, 8)), 100 + 2 + 3 * 24),
        (call("gather", (16, 8)), 100 + 2 + 3 * 24),
    ],
)
def test_by_hand_on_the_host(made, seconds):
    assert predicted_seconds([made], HOST) == seconds
    assert predicted_seconds([made, made], HOST) == 2 * seconds


def test_what_has_no_prediction():
    ring = call("all_reduce", (8, 8), "ring")
    assert predicted_seconds([], HOST) is None
    assert predicted_seconds([ring], None) is None
    assert predicted_seconds([ring, call("all_gather", (8, 8))], HOST) is None
    assert predicted_seconds([call("reduce", (8, 8), "generic")], HOST) is None
    assert predicted_seconds([call("broadcast", (0,))], HOST) is None


def test_a_reduce_over_links():
    node = parse_topology("nvlink4")
    link = node.within
    expected = node.call_s + link.alpha_s + 3 * 1000 * link.beta_s_per_byte(1000)
    assert cost.reduce_seconds(4, 1000, node) == pytest.approx(expected)
    assert cost.reduce_seconds(1, 1000, node) == 0
    with pytest.raises(ValueError, match="do not share"):
        cost.reduce_seconds(16, 1000, parse_topology("nvlink4+ib-ndr400"))


def test_the_table_and_the_page_show_it(monkeypatch):
    with mgpu_core.explain() as trace:
        comm.all_reduce([torch.ones(8) for _ in range(2)], algorithm="ring")
    assert "predicted" not in trace.table()
    trace.predict(HOST)
    head = next(line for line in trace.table().splitlines() if line.startswith("phase"))
    row = next(line for line in trace.table().splitlines() if line.startswith("all_reduce"))
    assert head.split()[-2:] == ["collectives", "predicted"]
    assert row.split()[-2:] == ["294", "s"]  # 100 + 2 + 3 x 32 x 2
    head, phase = page.page_data(trace)["steps"][0]["table"]
    assert phase[head.index("predicted")] == "294 s"
    monkeypatch.setattr("mgpu_core.tools.explain.trace.this_host", lambda: HOST)
    trace.machine = None
    trace.predict()
    assert trace.machine is HOST


def test_other_devices_need_a_name():
    with mgpu_core.explain() as trace:
        comm.broadcast(torch.ones(4), ["cpu"] * 2)
    trace.steps[0].__dict__["devices"] = ("cuda:0", "cuda:1")
    with pytest.raises(ValueError, match="name a topology"):
        trace.predict()
