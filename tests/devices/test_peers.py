"""The test of peers, with children that answer as machines do: well, wrongly, never, or with their own end."""

import json
import subprocess
import sys

import pytest

from mgpu_core.comm import tuning
from mgpu_core.devices import cache, peers
from mgpu_core.devices.peers import PeerVerdict
from mgpu_core.tools import doctor
from mgpu_core.tools.doctor import examination, render
from mgpu_core.tools.doctor.facts import Backend, Core

pytestmark = pytest.mark.slow

CHILD = """
import json, os, sys, time
for argument in sys.argv[1:]:
    device, peer, *uuids = argument.split(":")
    assert uuids == [f"GPU-{device}", f"GPU-{peer}"], uuids
    argument = f"{device}:{peer}"
    act = ACTS.get(argument, "good")
    with open(LOG, "a") as log:
        print(argument, file=log)
    if act == "hang":
        time.sleep(600)
    if act == "die":
        print("CUDA is broken", file=sys.stderr)
        os._exit(3)
    if act == "mute":
        os.close(1)
        time.sleep(600)
    if act == "noise":
        print("hello")
    problems = {"wrong": "7 of 9 numbers arrived wrong", "full": "CUDA out of memory", "refused": REFUSED}
    problem = problems.get(act, "")
    answer = {"problem": problem, "gigabytes_per_second": 0 if problem else 25.5, "proved": act != "full"}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Makes a machine out of what each pair does: ``machine(pair="hang")``; returns the list of pairs asked."""
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    cache.forget()
    allowed = []
    monkeypatch.setattr(peers, "machine_key", lambda devices: {"gpus": [f"GPU-{device}" for device in devices]})
    monkeypatch.setattr(peers._core, "allow_peers", lambda _, pairs: allowed.extend(pairs))
    monkeypatch.setattr(peers, "map_for_peer", lambda device, peer: None)
    monkeypatch.setattr(peers, "keep_nccl_off_peers", lambda: None)
    monkeypatch.setattr(peers, "_settled", set())
    monkeypatch.setattr(peers, "_allowed", set())
    monkeypatch.setattr(peers, "PAIR_SECONDS", 1.0)
    monkeypatch.setattr(peers, "START_SECONDS", 20.0)
    log = tmp_path / "log"

    def make(**acts):
        named = {name.lstrip("p").replace("_", ":"): act for name, act in acts.items()}
        program = CHILD.replace("ACTS", repr(named)).replace("LOG", repr(str(log)))
        program = program.replace("REFUSED", repr(peers.DRIVER_REFUSES))
        monkeypatch.setattr(peers, "PROBE", [sys.executable, "-I", "-c", program])
        return allowed, lambda: log.read_text().split() if log.exists() else []

    yield make
    cache.forget()


def problems(verdicts):
    return {(each.device, each.peer): each.problem for each in verdicts if not each.passed}


def test_all_is_well_and_kept(machine):
    _, asked = machine()
    verdicts = peers.prove_peers([0, 1, 2])
    assert [(each.device, each.peer) for each in verdicts] == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert all(each.passed and each.gigabytes_per_second == 25.5 for each in verdicts)
    assert len(asked()) == 6
    cache.forget()
    assert peers.prove_peers([0, 1, 2]) == verdicts
    assert peers.kept_verdicts([0, 1, 2]) == verdicts
    assert peers.kept_verdicts([0, 1]) is None
    assert len(asked()) == 6
    peers.prove_peers([0, 1, 2], again=True)
    assert len(asked()) == 12


def test_wrong_data_is_a_failure_and_kept(machine):
    machine(p0_1="wrong")
    assert problems(peers.prove_peers([0, 1])) == {(0, 1): "7 of 9 numbers arrived wrong"}
    assert problems(peers.kept_verdicts([0, 1])) == {(0, 1): "7 of 9 numbers arrived wrong"}


def test_a_test_that_failed_is_not_kept_against_the_machine(machine):
    machine(p0_1="full")
    assert problems(peers.prove_peers([0, 1])) == {(0, 1): "CUDA out of memory"}
    assert peers.kept_verdicts([0, 1]) is None
    machine(p0_1="die")
    peers.prove_peers([0, 1])
    assert peers.kept_verdicts([0, 1]) is None


def test_a_verdict_ends_with_the_boot(machine, monkeypatch, tmp_path):
    machine()
    peers.prove_peers([0, 1])
    assert peers.kept_verdicts([0, 1]) is not None
    monkeypatch.setattr(peers, "BOOT", tmp_path / "boot")
    assert peers.kept_verdicts([0, 1]) is None  # where nobody says which boot it is, it is another
    peers.BOOT.write_text("a new one")
    assert peers.kept_verdicts([0, 1]) is None


def test_a_hang_costs_its_pair_alone(machine):
    machine(p1_0="hang")
    assert problems(peers.prove_peers([0, 1, 2])) == {(1, 0): "no answer within 1 s"}


def test_a_child_that_dies_costs_its_pair_alone(machine):
    machine(p0_2="die", p2_1="noise")
    found = problems(peers.prove_peers([0, 1, 2]))
    assert found == {(0, 2): "the test ended with status 3: CUDA is broken"}


def test_what_a_child_says_besides_is_passed_over(machine):
    """A banner of the interpreter's site, a notice of the driver's."""
    machine(**{f"p{one}_{two}": "noise" for one in range(3) for two in range(3)})
    assert all(each.passed for each in peers.prove_peers([0, 1, 2]))


def test_a_child_that_ends_its_answers_and_lives_on(machine, monkeypatch):
    machine(p0_1="mute")
    monkeypatch.setattr(peers, "END_SECONDS", 0.2)
    assert problems(peers.prove_peers([0, 1]))[0, 1] == "the test ended its answers, and went on"


def test_a_child_that_cannot_be_killed_is_left_alone(machine, monkeypatch):
    """As one that hangs inside the driver: it survives the signal, and whoever waits for it waits for ever."""
    machine()
    killed = []

    class Unkillable(subprocess.Popen):
        def kill(self):
            killed.append(self.pid)
            super().kill()
            super().wait(20)

        def wait(self, timeout=None):
            assert timeout is not None, "this wait would never end"
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(peers.subprocess, "Popen", Unkillable)
    assert not problems(peers.prove_peers([0, 1]))
    assert len(killed) == 1


def test_children_that_never_answer_are_not_asked_for_ever(machine):
    _, asked = machine(**{f"p{one}_{two}": "die" for one in range(8) for two in range(8)})
    verdicts = peers.prove_peers(range(8))
    assert len(verdicts) == 56
    assert not any(each.passed for each in verdicts)
    assert asked() == ["0:1", "0:2"]


def test_only_pairs_that_pass_both_ways_are_allowed(machine):
    allowed, asked = machine(p0_1="wrong")
    with pytest.warns(RuntimeWarning, match="cuda:0 -> cuda:1: 7 of 9 numbers arrived wrong"):
        peers.settle_peers([0, 1, 2])
    assert sorted(allowed) == [(0, 2), (1, 2), (2, 0), (2, 1)]
    peers.settle_peers([0, 2])  # settled: said once, asked once
    assert len(asked()) == 6


@pytest.mark.parametrize(
    ("act", "broken"), [("wrong", True), ("hang", True), ("die", True), ("refused", False), ("good", False)]
)
@pytest.mark.filterwarnings("ignore:some GPUs do not reach")
def test_nccl_is_kept_off_peers_that_lose_data(machine, monkeypatch, act, broken):
    """But not off those that the driver refuses, because NCCL asks it too."""
    kept_off = []
    monkeypatch.setattr(peers, "keep_nccl_off_peers", lambda: kept_off.append(True))
    machine(p0_1=act)
    peers.settle_peers([0, 1])
    assert bool(kept_off) is broken


def test_a_pair_that_cannot_be_enabled_is_a_failed_pair(machine, monkeypatch):
    """A verdict may be of another container, and hardware takes so many peers: no collective fails for it."""
    allowed, _ = machine()

    def allow(_, pairs):
        if {0, 2} == set(pairs[0]):
            raise peers._core.CudaError("cudaDeviceEnablePeerAccess: too many peers (cudaErrorTooManyPeers)")
        allowed.extend(pairs)

    monkeypatch.setattr(peers._core, "allow_peers", allow)
    with pytest.warns(RuntimeWarning, match=r"cuda:0 <-> cuda:2: cudaDeviceEnablePeerAccess: too many peers"):
        peers.settle_peers([0, 1, 2])
    assert sorted(allowed) == [(0, 1), (1, 0), (1, 2), (2, 1)]
    peers.settle_peers([0, 1, 2])  # settled: said once


def test_one_device_asks_nobody(machine):
    allowed, asked = machine()
    peers.settle_peers([0])
    peers.settle_peers([0, 0])
    assert (allowed, asked()) == ([], [])


def with_gpus(monkeypatch, count):
    monkeypatch.setattr(tuning, "machine_key", lambda devices: {"gpus": len(devices)})
    backends = (Backend("cpu", True, "2 threads"), Backend("cuda", True, "CUDA runtime 13.0"))
    monkeypatch.setattr(examination, "_core", lambda: Core(backends, 13000, 13000, count))


def test_doctor_shows_the_matrix(machine, monkeypatch, capsys):
    machine(p1_0="wrong")
    with_gpus(monkeypatch, 2)
    assert "mgpu doctor --p2p" in [notice.advice for notice in doctor.examine().notices]
    report = doctor.examine(test_peers=True)
    assert report.peers == (PeerVerdict(0, 1, "", 25.5), PeerVerdict(1, 0, "7 of 9 numbers arrived wrong", 0.0))
    text = render(report)
    assert "from   to 0  to 1\n     0      -  25.5\n     1  fails     -" in text
    assert "1 -> 0 (7 of 9 numbers arrived wrong)" in " ".join(text.split())
    assert json.loads(report.to_json())["peers"][1]["problem"] == "7 of 9 numbers arrived wrong"
    assert doctor.examine().peers == report.peers  # kept


def test_doctor_without_gpus_has_nothing_to_test(machine, monkeypatch):
    machine()
    with_gpus(monkeypatch, 0)
    assert doctor.examine().peers is None
    assert "there is one GPU, or none: nothing to test" in render(doctor.examine(test_peers=True))


def test_doctor_shows_what_auto_is(machine, monkeypatch):
    machine()
    with_gpus(monkeypatch, 2)
    assert doctor.examine().all_reduce is None
    cache.store("tuning", tuning._key(range(2)), {"4096": "direct", "16777216": "nccl"})
    report = doctor.examine()
    assert report.all_reduce == {4096: "direct", 2**24: "nccl"}
    assert "all_reduce, auto\n  to 4 KiB       direct\n  to 16384 KiB   nccl\n" in render(report)
