"""The formulas by hand: links with alpha 1 s and a byte a second, so that a result is a count of messages and bytes."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_core import _core
from mgpu_core.tools.explain.cost import Cost, all_reduce, broadcast, scatter
from mgpu_core.tools.explain.topology import Link, Topology

UNIT = Link(1.0, 1.0)
NODE = Topology("unit", UNIT)
# Nodes of 2 GPUs, whose cards take 2 s a byte together.
NODES = Topology("units", UNIT, 2, Link(10.0, 0.5))


@pytest.mark.parametrize(("ranks", "messages", "nbytes"), [(2, 2, 2 * 500), (4, 6, 6 * 250), (5, 8, 8 * 200)])
def test_an_all_reduce_of_1000_bytes_in_a_node_is_a_ring(ranks, messages, nbytes):
    assert all_reduce(NODE, ranks, 1000) == Cost(messages, pytest.approx(nbytes))


@pytest.mark.parametrize(
    ("topology", "ranks", "latency", "transfer"),
    [
        # 2 messages inside a node, and 2 between two nodes, 4 between four; a ring's bytes at the pace of the cards
        (NODES, 4, 2 + 2 * 10, 6 * 250 * 2),
        (NODES, 8, 2 + 4 * 10, 14 * 125 * 2),
        (NODES, 6, 2 + 4 * 10, pytest.approx(10 / 6 * 1000 * 2)),
        (Topology("fast network", UNIT, 2, Link(10.0, 8.0)), 4, 22, 6 * 250),
        (Topology("a GPU a node", UNIT, 1, Link(10.0, 8.0)), 4, 40, 6 * 250 / 8),
    ],
)
def test_all_reduce_of_1000_bytes_over_nodes(topology, ranks, latency, transfer):
    assert all_reduce(topology, ranks, 1000) == Cost(latency, transfer)


def test_nodes_of_one_gpu_move_nothing_inside():
    """Each is a process, whose batch is its own."""
    single = Topology("single", UNIT, 1, Link(10.0, 0.25), 1000.0)
    assert scatter(single, 4, 1000) == broadcast(single, 4, 1000) == 0


@pytest.mark.parametrize(
    "seconds", [scatter, broadcast, lambda *how: all_reduce(*how).seconds], ids=["scatter", "broadcast", "all_reduce"]
)
def test_every_collective_pays_one_call_and_one_rank_pays_nothing(seconds):
    dearer = dataclasses.replace(NODE, call_s=5000.0)
    assert seconds(dearer, 4, 1000) == seconds(NODE, 4, 1000) + 5000
    assert seconds(dearer, 1, 1000) == 0


def test_the_call_is_latency():
    assert all_reduce(Topology("launched", UNIT, call_s=1000.0), 4, 1000) == Cost(1006, pytest.approx(1500))


def test_scatter_and_broadcast():
    assert scatter(NODE, 4, 1000) == 3 + 3 * 250
    assert scatter(NODES, 8, 1000) == 1 + 125  # each of 4 nodes has 250 bytes, and sends half of them
    assert broadcast(NODE, 5, 1000) == 3 * (1 + 1000)
    assert broadcast(NODES, 8, 1000) == 1 + 1000  # inside each node


def test_the_rounds_are_those_of_the_cores_ring():
    for ranks in range(2, 9):
        assert all_reduce(NODE, ranks, 0).latency_s == len(_core.ring_schedule(ranks))


@pytest.mark.parametrize("seconds", [all_reduce, scatter, broadcast])
@pytest.mark.parametrize(
    ("ranks", "message"),
    [(0, "wanted at least 1 GPU, got 0"), (9, "9 GPUs are not a multiple of the 8"), (16, "unit names no network")],
)
def test_what_cannot_be_is_said(seconds, ranks, message):
    with pytest.raises(ValueError, match=message):
        seconds(NODE, ranks, 1)


LINKS = st.builds(Link, st.floats(0, 1e-3), st.floats(1e6, 1e12))
TOPOLOGIES = st.builds(Topology, st.just("any"), LINKS, st.integers(1, 8), LINKS, st.floats(0, 1e-3))
SIZES = st.integers(0, 1 << 36)


@given(TOPOLOGIES, st.integers(1, 9), SIZES, SIZES)
def test_more_bytes_never_take_less_time(topology, nodes, one, other):
    ranks = nodes * topology.gpus_per_node
    seconds = [all_reduce(topology, ranks, nbytes).seconds for nbytes in sorted((one, other))]
    assert 0 <= seconds[0] <= seconds[1] * (1 + 1e-12)


@given(LINKS, st.integers(2, 8), st.integers(1, 1 << 36))
def test_no_ring_is_faster_than_the_wire(link, ranks, nbytes):
    seconds = all_reduce(Topology("any", link), ranks, nbytes).seconds
    assert 2 * (ranks - 1) / ranks * nbytes / seconds <= link.bytes_per_second * (1 + 1e-9)
