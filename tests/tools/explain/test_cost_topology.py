"""Tiers blend, names are parsed, and what no machine can be is refused."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_core.tools.explain.topology import HostMemory, Link, Tier, Topology, blended_beta, parse_topology

TIERS = (Tier(100, 1.0), Tier(400, 2.0), Tier(None, 5.0))


@pytest.mark.parametrize(
    ("working_set", "beta"),
    [
        (0, 1.0),
        (100, 1.0),
        (200, 0.5 * 1 + 0.5 * 2),
        (400, 0.25 * 1 + 0.75 * 2),
        (800, 0.125 * 1 + 0.375 * 2 + 0.5 * 5),
    ],
)
def test_a_tier_serves_what_it_holds(working_set, beta):
    assert blended_beta(TIERS, working_set) == pytest.approx(beta)


@given(st.floats(0, 1e15), st.floats(0, 1e15))
def test_a_larger_working_set_is_never_faster(one, other):
    small, large = (blended_beta(TIERS, each) for each in sorted((one, other)))
    assert 1 <= small <= large * (1 + 1e-12) <= 5.0001


def test_names():
    plain = parse_topology("pcie4")
    assert (plain.between, plain.gpus_per_node, plain.within.beta_s_per_byte(1)) == (None, 8, 1 / 24e9)
    both = parse_topology("nvlink4+ib-ndr400", gpus_per_node=4)
    assert (both.gpus_per_node, both.nics_per_node, both.name) == (4, 8, "nvlink4+ib-ndr400")
    assert both.between is not None
    assert parse_topology("nvlink3+4xib-hdr200").nics_per_node == 4
    assert parse_topology("nvlink3+eth-100g").nics_per_node == 1
    assert parse_topology("nvswitch4+ib-ndr400").within == parse_topology("nvlink4").within


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
        (lambda: Tier(None, -1.0), "beta_s_per_byte must be finite and not negative, not -1.0"),
        (lambda: Tier(None, 0.0), "beta_s_per_byte must be above 0"),
        (lambda: Tier(0, 1.0), "a tier holds at least one byte, not 0"),
        (lambda: Link(-1.0, TIERS), "alpha_s must be finite and not negative"),
        (lambda: Link(math.nan, TIERS), "alpha_s must be finite"),
        (lambda: Link(1.0, ()), "tiers go from the smallest"),
        (lambda: Link(1.0, TIERS[:2]), "tiers go from the smallest"),
        (lambda: Link(1.0, (TIERS[1], TIERS[0], TIERS[2])), "tiers go from the smallest"),
        (lambda: Topology("x", Link(1.0, TIERS), gpus_per_node=0), "gpus_per_node must be at least 1, not 0"),
        (lambda: Topology("x", Link(1.0, TIERS), call_s=-1.0), "call_s must be finite and not negative"),
        (lambda: HostMemory(-1.0, 0.0, TIERS, TIERS), "call_s must be finite"),
        (lambda: HostMemory(0.0, 0.0, TIERS, ()), "tiers go from the smallest"),
    ],
)
def test_what_no_machine_can_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()
