"""The formulas by hand: links with alpha 1 s and beta 1 s a byte, so that a result is a count of messages and bytes."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_core import _core
from mgpu_core.tools.explain.cost import (
    ALGORITHMS,
    Cost,
    all_reduce_cost,
    all_reduce_seconds,
    broadcast_seconds,
    bus_bandwidth,
    gather_seconds,
    reduce_seconds,
    scatter_seconds,
)
from mgpu_core.tools.explain.host_passes import ALGORITHMS_ON_HOST, host_passes
from mgpu_core.tools.explain.topology import HostMemory, Link, Tier, Topology

UNIT = Link(1.0, (Tier(None, 1.0),))
NODE = Topology("unit", UNIT, gpus_per_node=8)
# Nodes of 2 GPUs and 2 cards: a card takes 4 s a byte, so both take 2.
NODES = Topology("units", UNIT, gpus_per_node=2, between=Link(10.0, (Tier(None, 4.0),)), nics_per_node=2)
# One second a byte for one core, two for all, in one tier; 100 s a call and 10 s a rank.
HOST = HostMemory(100.0, 10.0, (Tier(None, 1.0),), (Tier(None, 2.0),))


@pytest.mark.parametrize(
    ("algorithm", "ranks", "messages", "nbytes"),
    [
        ("ring", 4, 6, 6 * 250),
        ("ring", 2, 2, 2 * 500),
        ("ring", 5, 8, 8 * 200),
        ("naive", 4, 6, 6 * 1000),
        ("direct", 4, 2, 6 * 250),
        ("tree", 2, 2, 2 * 1000),
        ("tree", 4, 4, 4 * 1000),
        ("tree", 5, 6, 6 * 1000),
        ("hierarchical", 4, 6, 6 * 250),
        ("halving", 4, 6, 6 * 250),
        ("auto", 4, 2, 6 * 250),
    ],
)
def test_all_reduce_of_1000_bytes_in_a_node(algorithm, ranks, messages, nbytes):
    cost = all_reduce_cost(algorithm, ranks, 1000, NODE)
    assert cost == Cost(messages, pytest.approx(nbytes))
    assert all_reduce_seconds(algorithm, ranks, 1000, NODE) == pytest.approx(messages + nbytes)


@pytest.mark.parametrize(
    ("algorithm", "ranks", "latency", "transfer"),
    [
        # inside a node 2 messages of 500 bytes; between nodes 2 x 10 s, and 2 x 250 bytes of each GPU at 4 s a byte
        ("hierarchical", 4, 2 + 20, 2 * 500 + 2 * 250 * 4),
        # 4 nodes: 6 messages of 125 bytes of each GPU, or 4 by halving and doubling, with the same bytes
        ("hierarchical", 8, 2 + 60, 2 * 500 + 6 * 125 * 4),
        ("halving", 8, 2 + 40, 2 * 500 + 6 * 125 * 4),
        # one ring over 4 GPUs: 6 steps, 4 of them between nodes, all at the pace of a node's cards (2 s a byte)
        ("ring", 4, 2 * 1 + 4 * 10, 6 * 250 * 2),
        # 2 rounds inside, 2 between; a single message takes one card
        ("tree", 4, 2 + 20, 2 * 1000 + 2 * 1000 * 4),
        # rank 0 with its neighbour twice, with the other node's two GPUs four times
        ("naive", 4, 2 + 40, 2 * 1000 + 4 * 1000 * 4),
        ("auto", 4, 22, 3000),
    ],
)
def test_all_reduce_of_1000_bytes_over_nodes(algorithm, ranks, latency, transfer):
    assert all_reduce_cost(algorithm, ranks, 1000, NODES) == Cost(latency, pytest.approx(transfer))


def test_one_gpu_a_node_is_a_ring_over_the_network_alone():
    single = Topology("single", UNIT, gpus_per_node=1, between=Link(10.0, (Tier(None, 4.0),)), nics_per_node=1)
    assert all_reduce_cost("ring", 4, 1000, single) == Cost(60, pytest.approx(6 * 250 * 4))
    assert all_reduce_cost("hierarchical", 4, 1000, single) == Cost(60, pytest.approx(6 * 250 * 4))


COLLECTIVES = {
    "all_reduce": lambda *how: all_reduce_seconds("auto", *how),
    "broadcast": broadcast_seconds,
    "gather": gather_seconds,
    "reduce": reduce_seconds,
    "scatter": scatter_seconds,
}


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("machine", [NODE, HOST], ids=lambda machine: machine.name)
def test_every_collective_pays_one_call_and_one_rank_pays_nothing(machine, name):
    seconds = COLLECTIVES[name]
    dearer = dataclasses.replace(machine, call_s=machine.call_s + 5000)
    assert seconds(4, 1000, dearer) == seconds(4, 1000, machine) + 5000
    assert seconds(1, 1000, dearer) == 0


def test_the_call_is_latency():
    launched = Topology("launched", UNIT, call_s=1000.0)
    assert all_reduce_cost("ring", 4, 1000, launched) == Cost(1006, pytest.approx(1500))


def test_nodes_of_one_gpu_scatter_nothing():
    """Each is a process, whose batch is its own."""
    single = Topology("single", UNIT, gpus_per_node=1, between=UNIT, call_s=1000.0)
    assert scatter_seconds(4, 1000, single) == 0
    assert broadcast_seconds(4, 1000, single) == 1000 + 2 * (1 + 1000)


def test_scatter_gather_broadcast_and_reduce():
    assert scatter_seconds(4, 1000, NODE) == 3 + 3 * 250
    assert gather_seconds(4, 1000, NODE) == 3 + 3 * 250
    assert scatter_seconds(8, 1000, NODES) == 1 + 125  # each of 4 nodes has 250 bytes, and sends half of them
    assert broadcast_seconds(5, 1000, NODE) == 3 * (1 + 1000)
    assert broadcast_seconds(8, 1000, NODES) == (1 + 1000) + 2 * (10 + 4000)
    assert reduce_seconds(4, 1000, NODE) == 1 + 3 * 1000


def test_the_rounds_are_those_of_the_core():
    """The formulas' messages are the rounds of the schedules that run."""
    for ranks in range(2, 9):
        assert all_reduce_cost("ring", ranks, 0, NODE).latency_s == len(_core.ring_schedule(ranks))
        assert all_reduce_cost("tree", ranks, 0, NODE).latency_s == len(_core.tree_schedule(ranks))


@pytest.mark.parametrize("ranks", range(2, 10))
@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_the_bytes_on_the_host_are_those_of_the_schedule(algorithm, ranks):
    """A hop that adds reads two chunks and writes one; one that copies moves three bytes for one."""
    nbytes = 9 * 8 * 7 * 5 * 4  # cut into equal chunks by any number of ranks up to 10
    schedule = _core.ring_schedule(ranks) if algorithm == "ring" else _core.tree_schedule(ranks)
    chunks = [count for _, count in _core.chunk_plan(nbytes, ranks)] if algorithm == "ring" else [nbytes]
    wanted = [sum(chunks[chunk] for _, _, chunk, _ in hops) for hops in schedule]
    adding = [hops[0][3] for hops in schedule]
    passes = host_passes(algorithm, ranks, nbytes)
    assert sorted((each.sums, each.nbytes) for each in passes) == sorted(zip(adding, wanted, strict=True))
    assert [each.traffic_nbytes for each in passes] == [3 * each.nbytes for each in passes]


def test_direct_and_naive_on_the_host():
    (direct,) = host_passes("direct", 4, 100)
    assert (direct.nbytes, direct.traffic_nbytes, direct.sums) == (100, 4 * 100 + 4 * 100, True)
    total, copies = host_passes("naive", 4, 100)
    assert (total.nbytes, total.traffic_nbytes, total.sums) == (100, 4 * 100 + 100, True)
    assert (copies.nbytes, copies.traffic_nbytes, copies.sums) == (300, 3 * 300, False)


def test_up_to_the_cores_grain_one_core_works():
    grain = 512 * 1024 * 4
    assert all_reduce_cost("auto", 2, grain, HOST) == Cost(100 + 2 * 10, 4 * grain * 1.0)
    assert all_reduce_cost("auto", 2, grain + 4, HOST) == Cost(120, 4 * (grain + 4) * 2.0)
    assert scatter_seconds(2, 1 << 20, HOST) == 120 + 3 * (1 << 20) * 1.0
    assert broadcast_seconds(3, 1 << 20, HOST) == 130 + 3 * (2 << 20) * 2.0
    assert reduce_seconds(3, 1 << 20, HOST) == 130 + (3 + 2) * (1 << 20) * 1.0


def test_the_tier_is_that_of_all_ranks_bytes_together():
    cached = HostMemory(0.0, 0.0, (Tier(4000, 1.0), Tier(None, 3.0)), (Tier(None, 9.0),))
    assert all_reduce_seconds("auto", 4, 1000, cached) == 8000 * 1.0
    assert all_reduce_seconds("auto", 8, 1000, cached) == 16000 * 2.0  # half of it is in the cache
    assert all_reduce_seconds("auto", 4, 4000, cached) == 32000 * 2.5  # a quarter


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: all_reduce_seconds("rings", 4, 1, NODE),
            "unknown algorithm 'rings': wanted one of auto, naive, direct",
        ),
        (lambda: all_reduce_seconds("halving", 4, 1, HOST), "the host has no halving: wanted one of naive, direct"),
        (lambda: all_reduce_seconds("ring", 0, 1, NODE), "wanted at least 1 rank, got 0"),
        (lambda: all_reduce_seconds("ring", 4, -1, NODE), "nbytes must be finite and not negative, not -1"),
        (lambda: scatter_seconds(4, math.nan, NODE), "nbytes must be finite"),
        (lambda: all_reduce_seconds("ring", 9, 1, NODE), "9 GPUs are not a multiple of the 8 GPUs of a node"),
        (lambda: all_reduce_seconds("ring", 16, 1, NODE), "16 GPUs are 2 nodes of 8, and unit names no network"),
        (lambda: all_reduce_seconds("halving", 1, 1, HOST), "the host has no halving: wanted one of naive, direct"),
        (lambda: all_reduce_seconds("direct", 4, 1, NODES), "which 2 nodes do not share: name ring"),
        (lambda: reduce_seconds(4, 1, NODES), "reduce reads the memory of peers, which 2 nodes do not share"),
    ],
)
def test_what_cannot_be_is_said(call, message):
    with pytest.raises(ValueError, match=message):
        call()


LINKS = st.builds(Link.of, st.floats(0, 1e-3), st.floats(1e6, 1e12))
TOPOLOGIES = st.builds(
    Topology, st.just("any"), LINKS, st.integers(1, 8), LINKS, st.integers(1, 8), call_s=st.floats(0, 1e-3)
)
SIZES = st.integers(0, 1 << 36)


@given(TOPOLOGIES, st.integers(1, 9), st.sampled_from(ALGORITHMS), SIZES, SIZES)
def test_more_bytes_never_take_less_time(topology, nodes, algorithm, one, other):
    ranks = nodes * topology.gpus_per_node
    if algorithm == "direct":
        ranks = topology.gpus_per_node
    seconds = [all_reduce_seconds(algorithm, ranks, nbytes, topology) for nbytes in sorted((one, other))]
    assert 0 <= seconds[0] <= seconds[1] * (1 + 1e-12)


@given(LINKS, st.sampled_from(["naive", "ring", "tree"]), SIZES)
def test_more_ranks_of_a_node_never_take_less_time(link, algorithm, nbytes):
    seconds = [all_reduce_seconds(algorithm, ranks, nbytes, Topology("any", link)) for ranks in range(1, 9)]
    assert all(one <= other * (1 + 1e-12) for one, other in itertools.pairwise(seconds))


@given(LINKS, st.sampled_from(["naive", "direct", "ring", "tree"]), st.integers(2, 8), st.integers(1, 1 << 36))
def test_no_algorithm_is_faster_than_the_wire(link, algorithm, ranks, nbytes):
    seconds = all_reduce_seconds(algorithm, ranks, nbytes, Topology("any", link))
    assert bus_bandwidth(ranks, nbytes, seconds) <= 1 / link.beta_s_per_byte(nbytes) * (1 + 1e-9)


@given(st.sampled_from(ALGORITHMS_ON_HOST), st.integers(2, 64), st.integers(0, 1 << 20), st.integers(0, 1 << 20))
def test_more_bytes_on_the_host_never_take_less_time(algorithm, ranks, one, other):
    tiers = (Tier(1 << 20, 1e-11), Tier(None, 4e-11))
    host = HostMemory(1e-5, 1e-6, tiers, tiers)
    seconds = [all_reduce_seconds(algorithm, ranks, nbytes, host) for nbytes in sorted((one, other))]
    assert seconds[0] <= seconds[1] * (1 + 1e-12)
