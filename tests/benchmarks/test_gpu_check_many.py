"""gpu_check_many.sh without GPUs: its stages on fakes, and its checks on CPU ranks."""

import signal
import subprocess

import pytest
import torch
from fakes.gpu_check import Machine

from benchmarks.gpu_check import many
from mgpu_core.device.peers import PeerVerdict

STAGES = ["build", "probe", "contexts", "replicas", "graphs", "streams", "abort"]


def test_all_checks_of_many_gpus_pass(machine: Machine) -> None:
    assert machine.run("out", script="gpu_check_many.sh", FAKE_GPUS="2") == (0, "")
    assert machine.status == dict.fromkeys(STAGES, "passed")
    assert "* GPU, driver: Fake GPU, 580.1; Fake GPU, 580.1" in machine.summary.splitlines()
    assert "* probe: the check is right" in machine.summary.splitlines()
    calls = machine.calls
    order = (
        *("many.py probe", "many.py contexts", "replicas --algorithm direct", "replicas --algorithm ring"),
        *(
            "replicas --algorithm nccl",
            "-k graphs_of_several_gpus",
            "many.py streams",
            "--signal STOP",
            "--signal KILL",
        ),
    )
    indices = [calls.index(word) for word in order]
    assert indices == sorted(indices)


@pytest.mark.parametrize(
    ("wrong", "failed"), [("probe", "probe"), ("ring", "replicas"), ("streams", "streams"), ("KILL", "abort")]
)
def test_a_check_of_many_gpus_that_fails_fails_the_run(machine: Machine, wrong: str, failed: str) -> None:
    assert machine.run("out", script="gpu_check_many.sh", FAKE_GPUS="2", FAKE_WRONG=wrong) == (1, "")
    assert machine.status == dict.fromkeys(STAGES, "passed") | {failed: "failed"}


def test_one_gpu_is_too_few_for_the_checks_of_many(machine: Machine) -> None:
    status, errors = machine.run("out", script="gpu_check_many.sh")
    assert status == 3
    assert errors.startswith("gpu_check_many.sh: 2 GPU(s) needed here: Fake GPU")


HOSTS = [torch.device("cpu")] * 2


def test_replicas_and_streams_of_the_host(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(many.streams, "settle_peers", many.streams.settle_peers)
    monkeypatch.setattr(many, "ROWS", 8)
    many.replicas(HOSTS, "ring", steps=2)
    assert capsys.readouterr().out.startswith("figure: ring, 2 GPUs: ")
    many.without_peers(HOSTS, turns=2)
    monkeypatch.setattr(many.comm, "all_reduce", lambda tensors: None)
    with pytest.raises(AssertionError):
        many.without_peers(HOSTS, turns=2)


def test_a_pair_is_one_line() -> None:
    assert many.described(PeerVerdict(0, 1, gigabytes_per_second=20.4), True) == (
        "cuda:0 -> cuda:1: driver says yes, test: 20 GB/s"
    )
    assert many.described(PeerVerdict(1, 0, "3 numbers arrived wrong"), True).endswith("test: 3 numbers arrived wrong")


@pytest.mark.parametrize("sent", [signal.SIGSTOP, signal.SIGKILL], ids=lambda sent: sent.name)
@pytest.mark.parametrize("ending", ["echo NcclError >&2; exit 1", "exit 0", "echo other >&2; exit 1", "exec sleep 50"])
def test_a_team_that_loses_a_process(sent: signal.Signals, ending: str) -> None:
    commands = [["sh", "-c", f"echo going; {ending}"], ["sh", "-c", "echo going; exec sleep 50"]]
    if "NcclError" in ending:
        many.abort(commands, sent, seconds=30)
    else:
        with pytest.raises((AssertionError, subprocess.TimeoutExpired)):
            many.abort(commands, sent, seconds=0.2)
