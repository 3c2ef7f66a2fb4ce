"""Names are parsed, and what no machine can be is refused."""

import math

import pytest

from mgpu_core.tools.explain.topology import Link, Topology, parse_topology


def test_names():
    plain = parse_topology("pcie4")
    assert (plain.network, plain.gpus_per_node, plain.within.bytes_per_second) == (None, 8, 24e9)
    both = parse_topology("nvlink4+ib-ndr400", gpus_per_node=4)
    assert (both.gpus_per_node, both.name, both.network) == (4, "nvlink4+ib-ndr400", Link(8.5e-6, 8 * 47e9))
    assert parse_topology("nvlink3+4xib-hdr200").network == Link(8.5e-6, 4 * 24e9)
    assert parse_topology("nvlink3+eth-100g").network == Link(8.5e-6, 12e9)


@pytest.mark.parametrize("name", ["", "warp", "nvlink4+", "nvlink4+warp", "nvlink4+0xib-ndr400", "+ib-ndr400", "a+b+c"])
def test_an_unknown_name_lists_what_is_known(name):
    with pytest.raises(ValueError, match=r"unknown topology .*pcie4.*nvlink5.*ib-hdr200.*eth-100g") as caught:
        parse_topology(name)
    assert repr(name) in str(caught.value)


def test_nodes_are_filled_one_after_another():
    topology = parse_topology("nvlink4+ib-ndr400")
    assert [topology.shape(ranks) for ranks in (1, 5, 8, 16, 1024)] == [(1, 1), (1, 5), (1, 8), (2, 8), (128, 8)]
    for ranks, message in [(0, "at least 1 GPU, got 0"), (12, "12 GPUs are not a multiple of the 8"), (-8, "got -8")]:
        with pytest.raises(ValueError, match=message):
            topology.shape(ranks)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Link(-1.0, 1.0), "alpha_s must be 0 or more"),
        (lambda: Link(math.nan, 1.0), "both finite"),
        (lambda: Link(1.0, 0.0), "bytes_per_second above 0"),
        (lambda: Link(1.0, math.inf), "both finite"),
        (lambda: Topology("x", Link(1.0, 1.0), gpus_per_node=0), "gpus_per_node must be at least 1, not 0"),
    ],
)
def test_what_no_machine_can_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()
