"""The queue: which requests leave together, when, and who is woken for them."""

import threading
import time

import pytest
import torch

from mgpu_core.inference.request_queue import RequestQueue
from mgpu_core.inference.requests import Joiner

LONG = 60.0


def request(rows, width=1):
    return Joiner(None, None).request(((torch.zeros(rows, width),), {}))


def queue(*requests, max_pending=100, max_wait=LONG, max_batch=8):
    made = RequestQueue(max_pending, max_wait, max_batch)
    for each in requests:
        made.put(each)
    return made


def test_a_full_batch_leaves_at_once():
    requests = [request(3), request(3), request(3)]
    assert queue(*requests).take(lambda: 8) == requests[:2]


def test_a_request_with_more_rows_than_a_batch_leaves_alone():
    large, small = request(9), request(1)
    waiting = queue(large, small)
    assert waiting.take(lambda: 8) == [large]
    assert waiting.take(lambda: 8, wait=False) == []


def test_a_full_batch_goes_before_an_older_one_that_waits_for_others():
    requests = [request(1), request(8, width=2)]
    assert queue(*requests).take(lambda: 8) == requests[1:]


def test_the_oldest_leaves_when_its_time_is_over():
    waiting = queue(request(1), max_wait=0.05)
    begin = time.perf_counter()
    assert len(waiting.take(lambda: 8)) == 1
    assert time.perf_counter() - begin < LONG / 2


@pytest.mark.parametrize("rows", [[8], [1, 7], [1, 1, 1, 5]])
def test_a_worker_that_waits_is_woken_by_the_request_that_fills_a_batch(rows):
    waiting, taken = queue(), []
    worker = threading.Thread(target=lambda: taken.extend(waiting.take(lambda: 8)))
    worker.start()
    for each in rows:
        waiting.put(request(each))
    worker.join(LONG / 2)
    assert [each.rows for each in taken] == rows


def test_what_a_worker_with_a_smaller_batch_leaves_wakes_another():
    waiting, taken = queue(max_wait=0.2, max_batch=100), []
    workers = [threading.Thread(target=lambda: taken.append(len(waiting.take(lambda: 4)))) for _ in range(2)]
    for each in workers:
        each.start()
    for _ in range(2):  # the first wakes one worker, which takes it when its time is over
        waiting.put(request(3))
    for each in workers:
        each.join(LONG / 2)
    assert taken == [1, 1]


def test_requests_that_are_put_back_come_first_and_in_order():
    first, second, other = request(4), request(4), request(1, width=2)
    waiting = queue(first, second, other)
    waiting.put_back(waiting.take(lambda: 8))
    assert waiting.take(lambda: 8) == [first, second]


def test_a_full_queue_lets_a_caller_in_when_a_batch_leaves():
    waiting = queue(request(8), max_pending=1)
    with pytest.raises(TimeoutError, match=r"1 requests were pending for 0\.01 s"):
        waiting.put(request(1), 0.01)
    caller = threading.Thread(target=waiting.put, args=(request(8),))
    caller.start()
    assert waiting.take(lambda: 8)[0].rows == 8
    caller.join(LONG / 2)
    assert waiting.take(lambda: 8)[0].rows == 8


def test_a_closed_queue_gives_what_it_has_and_takes_nothing():
    waiting = queue(request(1))
    caller = []
    full = queue(request(1), max_pending=1)

    def put():
        with pytest.raises(RuntimeError, match="the predictor is closed"):
            full.put(request(1))
        caller.append("refused")

    thread = threading.Thread(target=put)
    thread.start()
    for each in (waiting, full):
        each.close()
    thread.join(LONG / 2)
    assert caller == ["refused"]
    assert len(waiting.take(lambda: 8)) == 1
    assert waiting.take(lambda: 8) == []


def test_drained_requests_are_gone():
    requests = [request(7), request(1, width=2)]
    waiting = queue(*requests)
    assert waiting.drained() == requests
    assert waiting.take(lambda: 8, wait=False) == waiting.drained() == []
    waiting.put(request(1))
    assert waiting.take(lambda: 8, wait=False) == []  # no rows are left over that would fill its batch
