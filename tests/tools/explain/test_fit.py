"""The fit finds the constants that made the measurements, which are made up: no test here asks how fast anything is."""

import random

import pytest

from mgpu_core.devices import cache
from mgpu_core.tools.explain import fit
from mgpu_core.tools.explain.cost import all_reduce_seconds
from mgpu_core.tools.explain.fit import POINTS, Point, Sample, fit_host, fit_node, load, measure, save, this_host
from mgpu_core.tools.explain.topology import HostMemory, Link, Tier, Topology

CACHES = (1 << 20, 32 << 20)
HOST = HostMemory(
    20e-6, 8e-6, (Tier(CACHES[0], 1.2e-11), Tier(None, 2.7e-11)), (Tier(CACHES[1], 1.8e-11), Tier(None, 2.1e-11))
)


def samples_of(host, points=POINTS, noise=0.0):
    random_ = random.Random(1)
    return [
        Sample(
            each, (all_reduce_seconds(each.algorithm, each.ranks, each.nbytes, host) * random_.uniform(1 - noise, 1),)
        )
        for each in points
    ]


def test_the_constants_come_back():
    found = fit_host(samples_of(HOST), CACHES)
    assert (found.call_s, found.rank_s) == (pytest.approx(20e-6), pytest.approx(8e-6))
    for mine, theirs in ((found.one_core, HOST.one_core), (found.all_cores, HOST.all_cores)):
        assert [tier.holds_nbytes for tier in mine] == [tier.holds_nbytes for tier in theirs]
        assert [tier.beta_s_per_byte for tier in mine] == pytest.approx([tier.beta_s_per_byte for tier in theirs])


def test_noise_moves_the_prediction_less_than_itself():
    found = fit_host(samples_of(HOST, noise=0.4), CACHES)
    for ranks in (2, 4, 8):
        for nbytes in (64 << 10, 1 << 20, 64 << 20):
            predicted, true = (all_reduce_seconds("auto", ranks, nbytes, each) for each in (found, HOST))
            assert 0.6 < predicted / true < 1


def test_constants_stay_positive_and_memory_stays_slower():
    """Times that no positive constants explain: larger is faster."""
    points = [Point("direct", ranks, nbytes) for ranks in (2, 4) for nbytes in (4 << 10, 1 << 20, 8 << 20, 64 << 20)]
    found = fit_host([Sample(each, (1e-3 / each.nbytes,)) for each in points], CACHES)
    assert found.call_s > 0
    assert found.rank_s > 0
    for tiers in (found.one_core, found.all_cores):
        assert 0 < tiers[0].beta_s_per_byte <= tiers[1].beta_s_per_byte


def test_what_was_not_measured_is_taken_from_what_was():
    small = [point for point in POINTS if point.algorithm == "direct" and point.nbytes <= 1 << 20]
    found = fit_host(samples_of(HOST, small), CACHES)
    assert found.all_cores == found.one_core
    large = [Point("direct", ranks, nbytes << 20) for ranks in (2, 4, 8) for nbytes in (4, 16, 64)]
    found = fit_host(samples_of(HOST, large), CACHES)
    assert found.one_core == found.all_cores


def test_links_between_gpus():
    node = Topology("a node", Link(2e-6, (Tier(None, 1 / 300e9),)), 8, call_s=7e-6)
    points = [Point("ring", ranks, nbytes) for ranks in (2, 4, 8) for nbytes in (1 << 10, 1 << 20, 1 << 28)]
    found = fit_node(samples_of(node, points))
    assert found.call_s == pytest.approx(7e-6)
    assert found.within.alpha_s == pytest.approx(2e-6)
    assert found.within.beta_s_per_byte(1) == pytest.approx(1 / 300e9)
    assert found.gpus_per_node == 8


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fit_host(samples_of(HOST)[:6]), "wanted at least 7 measurements, got 6"),
        (lambda: fit_host([Sample(each, (0.0,)) for each in POINTS]), "a measured time must be above 0"),
        (lambda: fit_node(samples_of(HOST)), "links are fitted to measurements of ring"),
    ],
)
def test_what_cannot_be_fitted(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_every_point_is_measured_once_a_round():
    points = [Point("direct", 2, 4096), Point("tree", 3, 64)]
    found = measure(points, rounds=4)
    assert [sample.point for sample in found] == points
    assert all(len(sample.rounds) == 4 and min(sample.rounds) > 0 for sample in found)


def test_three_rounds_are_run_whatever_the_budget():
    (found,) = measure([Point("direct", 2, 64)], rounds=9, budget_seconds=0.0)
    assert len(found.rounds) == 3


def test_a_file_holds_the_constants_of_this_machine(tmp_path):
    path = tmp_path / "host.json"
    save(path, HOST)
    assert load(path) == HOST
    path.write_text(path.read_text().replace('"threads": ', '"threads": 9'))
    with pytest.raises(ValueError, match=r"host\.json: measured on another machine or build"):
        load(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "other"}', '{"format": "mgpu_core host 1", "host": {}}'])
def test_a_damaged_file_is_refused(tmp_path, text):
    path = tmp_path / "host.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"host\.json: not the constants of a host"):
        load(path)


def test_a_negative_constant_in_a_file_is_refused(tmp_path):
    path = tmp_path / "host.json"
    save(path, HOST)
    path.write_text(path.read_text().replace('"call_s": ', '"call_s": -'))
    with pytest.raises(ValueError, match="call_s must be finite and not negative"):
        load(path)


def test_this_host_is_measured_once(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    cache.forget()
    measured = []

    def measure_once(points):
        measured.append(points)
        return samples_of(HOST)

    monkeypatch.setattr(fit, "measure", measure_once)
    first = this_host()
    cache.forget()
    assert this_host() == first
    assert measured == [POINTS]
    cache.forget()
