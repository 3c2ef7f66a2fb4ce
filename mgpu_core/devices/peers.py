"""Which GPUs may touch each other's memory: shown by a test, not believed.

A driver's word that two GPUs reach each other is a capability, not a proof: across some bridges, copies between them
lose data or never end.  So each ordered pair writes a pattern into the other's memory and reads it back, in a child
process with a time limit (a hang there costs a child, not the training).  Pairs that pass are allowed to the core; the
others meet in host memory, and that is said once.  The verdict is kept (see :mod:`mgpu_core.devices.cache`).
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, Queue
from typing import IO

import torch

from mgpu_core import _core
from mgpu_core.devices import cache
from mgpu_core.devices.machine_key import machine_key
from mgpu_core.devices.nccl_teams import keep_nccl_off_peers
from mgpu_core.support.warnings import warn_user

__all__ = ["PeerVerdict", "have_proved_access", "kept_verdicts", "map_for_peer", "prove_peers", "settle_peers"]

PROBE = [sys.executable, "-P", "-m", "mgpu_core.devices.peer_probe"]
START_SECONDS = 120.0  # until the child has imported torch and made its contexts
PAIR_SECONDS = 30.0  # for each pair
END_SECONDS = 5.0  # from its last answer to its end

DRIVER_REFUSES = "the driver says that it cannot access it"  # the one problem that NCCL sees too

BOOT = Path("/proc/sys/kernel/random/boot_id")

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class PeerVerdict:
    """The result of testing one ordered pair: ``problem`` is empty if data arrived; GB/s of the kernel's writes.

    ``proved`` says that this is about the machine: a test that did not come to its end (no memory left, a slow start)
    says nothing about the machine of tomorrow.
    """

    device: int
    peer: int
    problem: str = ""
    gigabytes_per_second: float = 0.0
    proved: bool = True

    @property
    def passed(self) -> bool:
        """True if ``device`` may access the memory of ``peer``."""
        return not self.problem


def prove_peers(devices: Sequence[int], *, again: bool = False) -> list[PeerVerdict]:
    """Return the verdict on every ordered pair of these CUDA indices; from the cache unless ``again``.

    Raises:
        OSError: no child process can be started.
    """
    kept = None if again else kept_verdicts(devices)
    if kept is not None:
        return kept
    verdicts = _probe([(device, peer) for device in devices for peer in devices if device != peer])
    if all(verdict.proved for verdict in verdicts):
        cache.store("peers", _key(devices), [asdict(verdict) for verdict in verdicts])
    return verdicts


_settled: set[int] = set()
_allowed: set[Pair] = set()  # lower index first
_lock = threading.Lock()


def settle_peers(devices: Iterable[int]) -> None:
    """Make sure that the pairs of these devices are judged, and those that passed are allowed to the core."""
    given = set(devices)
    if _settled >= given:
        return
    with _lock:
        wanted = sorted(_settled | given)
        if len(wanted) > 1:
            _allow(prove_peers(wanted))
        _settled.update(wanted)


def have_proved_access(device: int, peer: int) -> bool:
    """Return whether two GPUs have been shown to reach each other's memory, both ways; tests them if need be."""
    pair = min(device, peer), max(device, peer)
    if pair not in _allowed:
        settle_peers(pair)
    return pair in _allowed


def _allow(verdicts: Sequence[PeerVerdict]) -> None:
    failed = [f"cuda:{each.device} -> cuda:{each.peer}: {each.problem}" for each in verdicts if not each.passed]
    both_ways = {(each.device, each.peer) for each in verdicts if each.passed}
    allowed = [pair for pair in both_ways if pair[0] < pair[1] and pair[::-1] in both_ways]
    if any(each.problem not in ("", DRIVER_REFUSES) for each in verdicts):
        keep_nccl_off_peers()
    for pair in sorted(allowed):
        try:
            _enable(pair)
            _allowed.add(pair)
        except (RuntimeError, ValueError) as error:  # torch's, and the core's of both families
            failed.append(f"cuda:{pair[0]} <-> cuda:{pair[1]}: {str(error).splitlines()[0]}")
    if failed:
        warn_user(
            "some GPUs do not reach each other's memory, so their tensors go by way of the host, which is slower: "
            + "; ".join(failed),
            RuntimeWarning,
        )


def _enable(pair: Pair) -> None:
    """Let the two GPUs touch each other's memory, both ways or not at all.

    Raises:
        RuntimeError, ValueError: they cannot: a verdict of another container, or more peers than the hardware takes.
    """
    map_for_peer(*pair)
    _core.allow_peers("cuda", [pair, pair[::-1]])


def map_for_peer(device: int, peer: int) -> None:
    """Let torch's allocator map the memory of each device for the other: expandable segments and pools need that."""
    here, there = torch.device("cuda", device), torch.device("cuda", peer)
    for one, other in ((here, there), (there, here)):
        torch.empty(1, device=one).copy_(torch.empty(1, device=other))


def _probe(pairs: Sequence[Pair]) -> list[PeerVerdict]:
    """Ask children until every pair has an answer: one that hangs or dies takes the pair that it was at with it.

    After two children in a row that gave no answer at all, the others are not asked.
    """
    verdicts: list[PeerVerdict] = []
    silent = 0
    while len(verdicts) < len(pairs):
        answers, problem = _ask_child(pairs[len(verdicts) :])
        verdicts += answers
        silent = 0 if answers else silent + 1
        failed = pairs[len(verdicts) :][: 1 if silent < 2 else None]
        verdicts += [PeerVerdict(*pair, problem=problem, proved=False) for pair in failed]
    return verdicts


def kept_verdicts(devices: Sequence[int]) -> list[PeerVerdict] | None:
    """Return the results of an earlier test of these devices on this machine, or ``None``."""
    kept = cache.load("peers", _key(devices))
    try:
        return None if kept is None else [PeerVerdict(**each) for each in kept]
    except TypeError:  # of another shape: as good as none
        return None


def _key(devices: Sequence[int]) -> dict[str, object]:
    """Return the key of kept verdicts, with the boot: an IOMMU or a driver may change and leave all names alike."""
    return {**machine_key(devices), "devices": list(devices), "boot": _boot()}


def _boot() -> str:
    try:
        return BOOT.read_text().strip()
    except OSError:
        return ""


def _ask_child(pairs: Sequence[Pair]) -> tuple[list[PeerVerdict], str]:
    """Return the child's answers, in order, and why there is none for the next pair."""
    devices = sorted({device for pair in pairs for device in pair})
    uuids = dict(zip(devices, machine_key(devices)["gpus"], strict=True))  # the child may count in another way
    command = [*PROBE, *(f"{device}:{peer}:{uuids[device]}:{uuids[peer]}" for device, peer in pairs)]
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    lines: Queue[str] = Queue()
    errors: Queue[str] = Queue()
    for pipe, queue in ((child.stdout, lines), (child.stderr, errors)):
        threading.Thread(target=_drain, args=(pipe, queue), daemon=True).start()
    try:
        return _read_answers(pairs, lines, errors, child)
    finally:
        child.kill()
        _abandon(child)


def _abandon(child: subprocess.Popen[str]) -> None:
    """Wait a little for a killed child: one that hangs inside the driver never ends, and is left to the system."""
    try:
        child.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        child.returncode = -signal.SIGKILL  # so that the interpreter does not warn of it, nor look for it again


def _drain(stream: IO[str], into: Queue[str]) -> None:
    with stream:
        for line in stream:
            into.put(line)
    into.put("")  # the end


def _read_answers(
    pairs: Sequence[Pair], lines: Queue[str], errors: Queue[str], child: subprocess.Popen[str]
) -> tuple[list[PeerVerdict], str]:
    answers: list[PeerVerdict] = []
    seconds = START_SECONDS
    for device, peer in pairs:
        try:
            answer = _next_answer(lines, seconds)
        except Empty:
            return answers, f"no answer within {seconds:g} s"
        if answer is None:
            return answers, f"the test ended {_status(child)}{_last_line(errors)}"
        answers.append(PeerVerdict(device, peer, *answer))
        seconds = PAIR_SECONDS
    return answers, ""


def _next_answer(lines: Queue[str], seconds: float) -> tuple[str, float, bool] | None:
    """Return the child's next answer; ``None`` at its end, empty if none comes in time."""
    end = time.monotonic() + seconds
    while line := lines.get(timeout=max(0.0, end - time.monotonic())):
        with suppress(ValueError, KeyError, TypeError):
            answer = json.loads(line)
            return str(answer["problem"]), float(answer["gigabytes_per_second"]), bool(answer["proved"])
    return None


def _status(child: subprocess.Popen[str]) -> str:
    try:
        return f"with status {child.wait(END_SECONDS)}"
    except subprocess.TimeoutExpired:
        return "its answers, and went on"


def _last_line(errors: Queue[str]) -> str:
    said = ""
    with suppress(Empty):
        while line := errors.get(timeout=5):
            said = line.strip() or said
    return f": {said}" if said else ""
