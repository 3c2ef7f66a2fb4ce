"""Twenty thousand requests to a Predictor from threads and from asyncio, without and with faults.

Each request has one row or more, of one of several shapes, and its own number in it, so that an answer to the
wrong caller is noticed.
"""

import asyncio
import gc
import random
import threading
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
import torch
from fakes.nets import cpu
from torch import nn

from mgpu_core import Predictor
from mgpu_core.inference.engine import Engine

THREADS, TASKS, EACH, ROUNDS = 16, 16, 125, 5  # 20,000 requests

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


class Net(nn.Module):
    """Sums over the length, so that requests of all lengths have answers of one shape."""

    seen: list = []  # noqa: RUF012 (of all copies: inputs and outputs of some batches)

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 16)

    def forward(self, x):
        if torch.isnan(x).any():
            raise KeyError("not a number")
        if threading.current_thread().name in LOST:
            raise RuntimeError("the device is lost")
        answer = self.linear(x).tanh().sum(1)
        if len(x) > 1 and len(self.seen) < 500:
            self.seen.append((x.clone(), answer.clone(), torch.get_num_threads()))
        return answer


LOST = set()  # names of the threads of lost ranks


@pytest.fixture
def net():
    torch.manual_seed(0)
    Net.seen.clear()
    LOST.clear()
    return Net().to(cpu(1)[0]).eval().requires_grad_(False)


def asked(chance, bad=0.0):
    rows, length = chance.randint(1, 9), chance.randint(1, 4)
    generator = torch.Generator("cpu").manual_seed(chance.getrandbits(30))
    x = torch.rand(rows, length, 8, device="cpu", generator=generator).to(cpu(1)[0])
    if chance.random() < bad:
        x[0, 0, 0] = torch.nan
    return x


def by_thread(predict, seed, faults, answers):
    chance = random.Random(seed)
    for _ in range(EACH):
        x = asked(chance, faults / 50)
        try:
            future = predict.submit(x, timeout=1e-6 if chance.random() < faults / 20 else 60)
            if chance.random() < faults / 20:
                future.cancel()
            answers.append((x, future.result(60)))
        except (KeyError, CancelledError, TimeoutError) as error:
            answers.append((x, error))


async def by_task(predict, seed, faults, answers):
    chance = random.Random(seed)
    for _ in range(EACH):
        x = asked(chance, faults / 50)
        seconds = 1e-4 if chance.random() < faults / 20 else 60
        try:
            answers.append((x, await asyncio.wait_for(predict.asubmit(x), seconds)))
        except (KeyError, TimeoutError) as error:
            answers.append((x, error))


def one_round(predict, first_seed, faults):
    answers = []

    async def tasks():
        await asyncio.gather(*(by_task(predict, first_seed + THREADS + n, faults, answers) for n in range(TASKS)))

    threads = [threading.Thread(target=by_thread, args=(predict, first_seed + n, faults, answers)) for n in range(16)]
    threads.append(threading.Thread(target=asyncio.run, args=(tasks(),)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def is_right(net, x, answer):
    if isinstance(answer, KeyError):
        return bool(torch.isnan(x).any())
    if isinstance(answer, Exception):
        return True  # who gave up
    return torch.allclose(answer, net(x), rtol=1e-5, atol=1e-6)


def rss():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0


@pytest.mark.parametrize("faults", [0, 1])
def test_every_answer_is_right_and_nothing_is_left(net, faults):
    memory, tensors = [], []
    with Predictor(net, cpu(2), max_batch=32, max_wait_ms=0.5, max_pending=24) as predict:
        for number in range(ROUNDS):
            answers = one_round(predict, number * 100, faults)
            assert len(answers) == (THREADS + TASKS) * EACH
            assert all(is_right(net, x, answer) for x, answer in answers)
            failed = sum(isinstance(answer, Exception) for _, answer in answers)
            assert failed == 0 if not faults else 0 < failed < len(answers) / 4
            del answers
            gc.collect()
            tensors.append(sum(type(each) is torch.Tensor for each in gc.get_objects()) - 2 * len(Net.seen))
            memory.append(rss())
        stats = predict.stats()
    if not faults:
        assert sum(each.requests for each in stats) == (THREADS + TASKS) * EACH * ROUNDS
    assert sum(each.batches for each in stats) < sum(each.requests for each in stats)
    assert tensors[1] == tensors[-1], tensors
    assert memory[-1] - memory[1] <= 16 * 2**20, memory
    assert len(Net.seen) >= 500
    before = torch.get_num_threads()
    for x, answer, cores in Net.seen:
        torch.set_num_threads(cores)
        assert torch.equal(net(x.to(cpu(1)[0])), answer.to(cpu(1)[0]))
    torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore:.*is lost")
def test_a_lost_rank_loses_no_request(net, monkeypatch):
    monkeypatch.setattr(Engine, "_is_lost", lambda engine, rank: f"mgpu predictor-rank{rank}" in LOST)
    with Predictor(net, cpu(3), max_batch=32, max_wait_ms=0.5) as predict:
        answers = one_round(predict, 0, 1)
        LOST.add("mgpu predictor-rank1")
        answers += one_round(predict, 100, 1)
        LOST.add("mgpu predictor-rank0")
        answers += one_round(predict, 200, 1)
        stats = predict.stats()
    assert all(is_right(net, x, answer) for x, answer in answers)
    assert len(answers) == 3 * (THREADS + TASKS) * EACH
    assert [each.is_lost for each in stats] == [True, True, False]
