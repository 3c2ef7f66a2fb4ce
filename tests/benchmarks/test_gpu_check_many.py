"""The checks of gpu_check_many.sh without GPUs: on CPU ranks."""

import signal
import subprocess

import pytest
import torch

from benchmarks.gpu_check import many
from mgpu_core.devices.peers import PeerVerdict

pytestmark = pytest.mark.slow

HOSTS = [torch.device("cpu")] * 2


def test_replicas_and_streams_of_the_host(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("settle_peers", "have_proved_access"):  # which it replaces
        monkeypatch.setattr(many.streams, name, getattr(many.streams, name))
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
