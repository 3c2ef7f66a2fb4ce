"""Devices that are slow or lost, workers that do not start, Ctrl-C and fork: every request ends, once."""

import os
import signal
import threading
import time
from concurrent.futures import CancelledError

import pytest
import torch
from fakes.nets import cpu
from torch import nn

from mgpu_core import Predictor, place
from mgpu_core.inference.engine import Engine
from mgpu_core.inference.request_queue import RequestQueue


class ByRank(nn.Module):
    """Doubles; the ranks in ``seconds`` take that long, those in ``lost`` raise."""

    seconds: dict = {}  # noqa: RUF012 (of all copies)
    lost: set = set()  # noqa: RUF012

    def forward(self, x):
        rank = int(threading.current_thread().name.removeprefix("mgpu predictor-rank"))
        time.sleep(self.seconds.get(rank, 0))
        if rank in self.lost:
            raise RuntimeError(f"rank {rank} is gone")
        return 2 * x


@pytest.fixture
def ranks(monkeypatch):
    ByRank.seconds, ByRank.lost = {}, set()
    monkeypatch.setattr(Engine, "_is_lost", lambda engine, rank: rank in ByRank.lost)
    return ByRank


def one(value=1.0):
    return torch.full((1, 1), value, device=cpu(1)[0])


def answers_of(futures):
    return [float(future.result(20)) for future in futures]


def ask_until_lost(predict):
    while not predict.stats()[0].is_lost:
        assert answers_of([predict.submit(one(float(n))) for n in range(9)]) == [2.0 * n for n in range(9)]


@pytest.mark.slow
def test_a_device_that_is_twice_as_slow_gets_half_the_rows(ranks):
    ranks.seconds = {0: 0.02, 1: 0.01}
    with Predictor(ByRank(), cpu(2), max_batch=4, max_pending=2000) as predict:
        answers_of([predict.submit(one()) for _ in range(1200)])
        shares = predict.stats().shares
    assert shares == pytest.approx([1 / 3, 2 / 3], rel=0.1)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_the_requests_of_a_lost_device_go_to_the_others(ranks, count):
    ranks.lost = {0}
    said = pytest.warns(RuntimeWarning, match="is lost, and the predictor goes on without it: rank 0 is gone")
    with said, Predictor(ByRank(), cpu(count), max_batch=2, max_wait_ms=0) as predict:  # its worker warns until the end
        ask_until_lost(predict)
        assert answers_of([predict.submit(one(3.0))]) == [6]
        stats = predict.stats()
    assert [each.is_lost for each in stats] == [True] + [False] * (count - 1)
    assert "(lost)" in str(stats)
    assert stats[0].requests == 0


@pytest.mark.filterwarnings("ignore:.*is lost")
def test_without_a_device_every_request_gets_the_error(ranks):
    ranks.lost = {0, 1}
    with Predictor(ByRank(), cpu(2), max_batch=1, max_wait_ms=0) as predict:
        futures = [predict.submit(one()) for _ in range(2)]
        for future in futures:
            with pytest.raises(RuntimeError, match="is gone"):
                future.result(20)  # the queue was closed before
        with pytest.raises(RuntimeError, match="the predictor is closed"):
            predict.submit(one())


def test_where_no_worker_starts_there_is_no_predictor(monkeypatch):
    def fails(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fails)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Predictor(nn.Identity(), cpu(1))


def test_no_request_hangs_where_a_worker_fails(monkeypatch):
    def fails(*_):
        raise MemoryError

    monkeypatch.setattr(RequestQueue, "take", fails)
    with Predictor(nn.Identity(), cpu(1)) as predict, pytest.raises((RuntimeError, CancelledError)):
        predict(one())


@pytest.mark.slow
def test_ctrl_c_leaves_the_call_and_the_predictor_goes_on(ranks):
    ranks.seconds = {0: 0.5, 1: 0.5}
    with Predictor(ByRank(), cpu(2), max_batch=2) as predict:
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            predict(one().expand(8, 1))
        timer.join()
        ranks.seconds = {}
        assert float(predict(one())) == 2
        waiting = sum(each.requests for each in predict.stats())
    assert waiting <= 3  # those in work at Ctrl-C, and the last one


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_of_a_fork_is_refused_and_the_parent_goes_on(ranks):
    with Predictor(ByRank(), cpu(2)) as predict:
        assert float(predict(one())) == 2
        child = os.fork()
        if not child:
            status = 1
            try:
                predict.submit(one())
            except RuntimeError as error:
                status = 0 if "before the process forked" in str(error) else 2
            with predict._queue._ready:  # as if another thread had been in it when the process forked
                predict.close()
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert float(predict(one())) == 2


def test_batches_in_flight_share_the_limit_of_their_memory():
    """Memory that is short for one is short for all: they are on the same devices."""
    short = []

    class Large(nn.Linear):
        def forward(self, x):
            if len(x) > 4:
                short.append(len(x))
                raise torch.OutOfMemoryError("too many rows")
            return super().forward(x)

    net = place(nn.Sequential(Large(1, 1), nn.Linear(1, 1)), cpu(2), ["1"])
    with Predictor(net, max_batch=8, max_wait_ms=500, in_flight=2) as predict:
        for _ in range(6):
            for future in [predict.submit(one()) for _ in range(8)]:
                future.result(20)
    assert short == [8]
