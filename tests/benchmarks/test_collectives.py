"""The closed forms are right, and all three ways to do a collective give them."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from mgpu_core.tools.bench import cases
from mgpu_core.tools.bench.cases import collectives
from mgpu_core.tools.bench.cases.collectives import OPS
from mgpu_core.tools.bench.collective import Holding, TeamCase, TeamTask, Values, around, others
from mgpu_core.tools.bench.gloo import GlooTeam, PeerFailed

pytestmark = pytest.mark.slow

NAMES = cases.COLLECTIVES
COLLECTIVES = [collectives.COLLECTIVES[name] for name in NAMES]
SALT = 5


def operations(collective: TeamCase) -> tuple[str, ...]:
    return collective.ops or ("sum",)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.several_ranks
def test_closed_form_of_a_reduction(op: str, ranks: int) -> None:
    values = Values(TeamTask(ranks, count=50, op=op), chunks=ranks)
    values.salt = SALT
    stacked = torch.stack([values.of(rank, chunks=ranks) for rank in range(ranks)])
    fold = {"sum": stacked.sum, "avg": stacked.mean, "prod": stacked.prod, "min": stacked.amin, "max": stacked.amax}
    wanted = fold[op](0)
    for chunk in range(ranks):
        assert torch.equal(values.folded(chunk), wanted[50 * chunk : 50 * (chunk + 1)])


def test_inputs_differ_by_rank_and_salt() -> None:
    values = Values(TeamTask(3, count=20), chunks=1)
    first = [values.of(rank).clone() for rank in range(3)]
    values.salt = SALT
    assert not any(torch.equal(values.of(rank), other) for rank in range(3) for other in first)
    assert torch.equal(values.joined(), torch.cat([values.of(rank) for rank in range(3)]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
@pytest.mark.several_ranks
@pytest.mark.parametrize("collective", COLLECTIVES, ids=NAMES)
def test_ours_and_the_loop_are_right(collective: TeamCase, ranks: int, dtype: str) -> None:
    for op in operations(collective):
        task = TeamTask(ranks, count=33, dtype=dtype, op=op)
        holding = Holding(collective, task, range(ranks))
        for do in (collective.ours, collective.loop):
            for salt in (1, SALT):
                assert holding.wrong(partial(do, task, holding.sends), salt) == 0


@pytest.mark.parametrize("collective", COLLECTIVES, ids=NAMES)
def test_what_is_not_done_is_counted(collective: TeamCase) -> None:
    task = TeamTask(2, count=33)
    holding = Holding(collective, task, range(2))
    stale = collective.loop(task, holding.sends)
    kept = [None if result is None else result.clone() for result in stale]
    assert holding.wrong(lambda: kept, SALT) > 0
    assert holding.wrong(lambda: [None, None], SALT) > 0


def test_one_wrong_element_is_one() -> None:
    collective = COLLECTIVES[0]
    task = TeamTask(2, count=33)
    holding = Holding(collective, task, range(2))

    def spoiled() -> list[torch.Tensor]:
        results = collective.ours(task, holding.sends)
        results[1][7] += 1
        return results

    assert holding.wrong(spoiled, SALT) == 1


def test_bus_factors() -> None:
    assert [around(ranks) for ranks in (2, 4, 8)] == [1.0, 1.5, 1.75]
    assert [others(ranks) for ranks in (2, 4, 8)] == [0.5, 0.75, 0.875]
    assert {name: cases.load(name).formula.count("2(n-1)/n") for name in NAMES} == dict.fromkeys(NAMES, 0) | {
        "all_reduce": 1
    }


@pytest.fixture(scope="module")
def team() -> Iterator[GlooTeam]:
    if not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    with GlooTeam(ranks=2) as made:
        yield made


@pytest.mark.parametrize("collective", COLLECTIVES, ids=NAMES)
def test_gloo_is_right(collective: TeamCase, team: GlooTeam) -> None:
    for op in operations(collective):
        team.prepare(collective.name, TeamTask(2, count=33, op=op))
        team.reset()
        assert team.run() > 0
        assert team.wrong(SALT) == 0


def test_a_process_that_dies_is_noticed() -> None:
    with GlooTeam(ranks=2) as team:
        processes = team._processes
        processes[1].kill()
        with pytest.raises(PeerFailed, match="rank 1"):
            team.prepare("broadcast", TeamTask(2, count=3))
    assert not any(process.is_alive() for process in processes)


def test_a_process_that_fails_says_why() -> None:
    with GlooTeam(ranks=1) as team, pytest.raises(PeerFailed, match="rank 0: KeyError: 'nonsense'"):
        team.prepare("nonsense", TeamTask(1, count=3))
