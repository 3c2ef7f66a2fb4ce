"""The parts of a predicted step: the module's broadcast by hand, its column, and the picture's legend."""

import dataclasses

import pytest

from mgpu_core.tools.explain.cost import Bucket, StepProfile
from mgpu_core.tools.explain.predict import Plan, predict_step
from mgpu_core.tools.explain.simulate import render
from mgpu_core.tools.explain.simulate_plot import figure_of
from mgpu_core.tools.explain.topology import HostMemory, Link, Tier, Topology

UNIT = Link(1.0, (Tier(None, 1.0),))
NODE = Topology("unit", UNIT)
STEP = StepProfile("net", 2, 64, 10.0, 20.0, 3.0, 80, 8, (Bucket(8, 0.5), Bucket(4, 1.0)), 2.0)


def test_the_modules_broadcast_by_hand():
    """To the ranks of a node, 2 rounds of alpha + 6 bytes; a node more has a rank 0 of its own."""
    step = dataclasses.replace(STEP, broadcast_nbytes=6)
    node = Topology("unit", UNIT, between=UNIT, gpus_per_node=4)
    found = [predict_step(step, gpus, Plan(node)) for gpus in (1, 2, 4, 8)]
    assert [each.broadcast_s for each in found] == [0, 7, 14, 14]
    without = predict_step(STEP, 8, Plan(node))
    assert without.broadcast_s == 0
    assert found[3].step_s == pytest.approx(without.step_s + 14)
    host = HostMemory(1.0, 0.0, (Tier(None, 1.0),), (Tier(None, 1.0),))
    assert predict_step(step, 4, Plan(host)).broadcast_s == 1 + 3 * (3 * 6)
    large = dataclasses.replace(STEP, broadcast_nbytes=600)
    assert predict_step(large, 2, Plan(node)).bottleneck == "broadcast of the module"


def test_the_table_has_the_broadcast():
    step = dataclasses.replace(STEP, broadcast_nbytes=6)
    _, _, header, row, *_ = render(step, Plan(NODE), [predict_step(step, 2, Plan(NODE))]).splitlines()
    position = header.split().index("broadcast") - 1  # "step ms" is one column
    assert row.split()[position] == "7000.000"


def test_the_legend_is_beside_the_bars():
    pytest.importorskip("matplotlib")
    figure = figure_of("net", [predict_step(STEP, gpus, Plan(NODE)) for gpus in (1, 2, 4, 8)])
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert [each.get_text() for each in legend.get_texts()] == [
        *("compute", "update", "exposed communication", "broadcast of the module", "input", "host")
    ]
    bars = figure.axes[1]
    assert bars.get_legend() is None
    assert legend.get_window_extent().y1 <= bars.get_tightbbox().y0
