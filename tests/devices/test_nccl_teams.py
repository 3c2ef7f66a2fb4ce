"""Teams of communicators: made once per list of GPUs, dropped when they fail, with a limit that can be set."""

import ctypes
import os

import pytest
import torch.distributed

from mgpu_core.devices import nccl_teams
from mgpu_core.errors import BackendUnavailable, NcclError

getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p


class Team:
    def __init__(self, *arguments):
        self.arguments = arguments
        self.p2p_disabled = getenv(b"NCCL_P2P_DISABLE")  # as NCCL reads it
        self.closed = False

    def close(self):
        self.closed = True


@pytest.fixture
def made(monkeypatch):
    """The teams that were made, in order."""
    teams = []

    def init(*arguments):
        teams.append(Team(*arguments))
        return teams[-1]

    monkeypatch.setattr(nccl_teams, "_teams", {})
    monkeypatch.setattr(nccl_teams, "_made_one", False)
    monkeypatch.setattr(nccl_teams, "_trusted", True)
    monkeypatch.setitem(os.environ, nccl_teams.P2P_VARIABLE, "")  # so that it is put back
    monkeypatch.delenv(nccl_teams.P2P_VARIABLE)
    monkeypatch.setattr(nccl_teams._core, "nccl_open", lambda candidates: 23007)
    monkeypatch.setattr(nccl_teams._core, "nccl_unique_id", lambda: b"id")
    monkeypatch.setattr(nccl_teams._core, "nccl_init", init)
    monkeypatch.delenv(nccl_teams.TIMEOUT_VARIABLE, raising=False)
    return teams


def test_a_team_has_each_gpu_once_and_is_made_once(made):
    seen = [nccl_teams.with_nccl(devices, lambda team: team) for devices in ([3, 1, 3, 1], [3, 1], [1, 3])]
    assert seen == [made[0], made[0], made[1]]
    assert made[0].arguments == (b"id", 2, [0, 1], [3, 1], 600.0)


def test_a_failed_team_is_dropped(made):
    def fails(team):
        raise NcclError("ncclAllReduce: unhandled cuda error")

    with pytest.raises(NcclError):
        nccl_teams.with_nccl([0, 1], fails)
    assert nccl_teams.with_nccl([0, 1], lambda team: team) is made[1]

    def refuses(team):
        raise ValueError("rank 1: expected 5 elements, got 4")

    with pytest.raises(ValueError, match="rank 1"):  # the caller's mistake: the team is as good as before
        nccl_teams.with_nccl([0, 1], refuses)
    assert nccl_teams.with_nccl([0, 1], lambda team: team) is made[1]


def test_the_limit_can_be_set(made, monkeypatch):
    monkeypatch.setenv(nccl_teams.TIMEOUT_VARIABLE, " 2.5 ")
    nccl_teams.with_nccl([0], lambda team: team)
    assert made[0].arguments[-1] == 2.5


@pytest.mark.parametrize("text", ["0", "-1", "soon", "inf", "nan"])
def test_a_limit_that_is_none(made, monkeypatch, text):
    monkeypatch.setenv(nccl_teams.TIMEOUT_VARIABLE, text)
    with pytest.raises(ValueError, match="MGPU_CORE_NCCL_TIMEOUT must be a positive number of seconds"):
        nccl_teams.with_nccl([0], lambda team: team)
    assert made == []


def test_without_nccl_it_says_why(monkeypatch):
    def missing(candidates):
        raise BackendUnavailable("libnccl.so.2: cannot open shared object file")

    monkeypatch.setattr(nccl_teams, "_teams", {})
    monkeypatch.setattr(nccl_teams._core, "nccl_open", missing)
    assert not nccl_teams.nccl_is_there()
    with pytest.raises(BackendUnavailable, match="cannot open shared object"):
        nccl_teams.with_nccl([0], lambda team: team)


def test_at_exit_all_are_closed(made):
    nccl_teams.with_nccl([0], lambda team: team)
    nccl_teams.with_nccl([1], lambda team: team)
    nccl_teams._close_all()
    assert [team.closed for team in made] == [True, True]
    assert nccl_teams._teams == {}


def test_a_forked_child_leaves_the_parents_teams_alone(made, monkeypatch):
    monkeypatch.setattr(nccl_teams, "_of_parent", [])
    team = nccl_teams.with_nccl([0], lambda team: team)
    nccl_teams._after_fork_in_child()
    assert nccl_teams._teams == {}
    assert nccl_teams._of_parent == [team]
    assert not team.closed
    assert nccl_teams.with_nccl([0], lambda team: team) is made[1]


def test_who_hears_late_of_a_dead_team_leaves_the_next_one(made):
    """Another thread has heard before, and has made it."""

    def late(team):
        with pytest.raises(NcclError):
            nccl_teams.with_nccl([0, 1], dies)
        assert nccl_teams.with_nccl([0, 1], lambda other: other) is made[1]
        raise NcclError("dead, again")

    def dies(team):
        raise NcclError("dead")

    with pytest.raises(NcclError, match="again"):
        nccl_teams.with_nccl([0, 1], late)
    assert nccl_teams.with_nccl([0, 1], lambda team: team) is made[1]
    assert len(made) == 2


def test_a_practice_has_a_team_of_its_own_with_a_short_limit(made):
    usual = nccl_teams.with_nccl([0, 1], lambda team: team)
    with nccl_teams.practice([0, 1, 0], 30.0):
        assert nccl_teams.with_nccl([1], lambda team: team).arguments[-1] == 600.0  # other GPUs' is as ever
        assert nccl_teams.with_nccl([0, 1], lambda team: team).arguments[-1] == 30.0
    assert nccl_teams.with_nccl([0, 1], lambda team: team) is usual
    with nccl_teams.practice([2], 30.0):
        nccl_teams.with_nccl([2], lambda team: team)
    assert nccl_teams.with_nccl([2], lambda team: team).arguments[-1] == 600.0


def test_before_the_first_communicator_nccl_is_kept_off_peers(made):
    nccl_teams.keep_nccl_off_peers()
    nccl_teams.with_nccl([0, 1], lambda team: team)
    assert made[0].p2p_disabled == b"1"
    assert nccl_teams.nccl_is_trusted()


def test_afterwards_auto_does_without_nccl(made):
    nccl_teams.with_nccl([0, 1], lambda team: team)
    assert made[0].p2p_disabled is None
    nccl_teams.keep_nccl_off_peers()
    assert not nccl_teams.nccl_is_trusted()


def test_where_the_user_wants_peers_auto_does_without_nccl(made, monkeypatch):
    monkeypatch.setenv(nccl_teams.P2P_VARIABLE, "0")
    nccl_teams.keep_nccl_off_peers()
    assert not nccl_teams.nccl_is_trusted()
    assert os.environ[nccl_teams.P2P_VARIABLE] == "0"


@pytest.mark.parametrize(("config", "trusted"), [("cpu:gloo,cuda:nccl", False), ("cpu:gloo", True)])
def test_where_torch_has_a_group_with_nccl_auto_does_without(made, monkeypatch, config, trusted):
    """Torch keeps this of each group, also where no backend was named or the default group is another one's."""
    groups = torch.distributed.distributed_c10d._world.pg_backend_config
    monkeypatch.setitem(groups, object(), config)
    nccl_teams.keep_nccl_off_peers()
    assert nccl_teams.nccl_is_trusted() is trusted


def test_torch_keeps_the_backends_of_a_group_that_names_none():
    torch.distributed.init_process_group(store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        (config,) = torch.distributed.distributed_c10d._world.pg_backend_config.values()
        assert "cpu:gloo" in config
    finally:
        torch.distributed.destroy_process_group()
