"""Predictor: every answer is that of the net, for whoever asked, whatever else is in the batch."""

import asyncio
import collections
import gc
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import CancelledError

import pytest
import torch
from fakes.nets import cpu
from torch import nn

from mgpu_core import Pipeline, Predictor, Replicate, Rows, place
from mgpu_core.devices.devices import local_devices


def net(width=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3))


def alone(module, x):
    with torch.no_grad():
        return module.to(x.device).eval()(x)


def numbers(rows, width=4):
    return torch.rand(rows, width, device=cpu(1)[0])


@pytest.mark.parametrize("rows", [1, 2, 7, 200])
def test_a_call_is_the_net(ranks, rows):
    module, x = net(), numbers(rows)
    with Predictor(module, cpu(ranks)) as predict:
        answer = predict(x)
    assert answer.device == x.device
    assert torch.allclose(answer, alone(module, x), atol=1e-6)


def test_requests_are_joined_and_split_again():
    module, xs = net(), [numbers(1 + index % 3) for index in range(40)]
    with Predictor(module, cpu(2), max_batch=16, max_wait_ms=200) as predict:
        futures = [predict.submit(x) for x in xs]
        answers = [future.result(20) for future in futures]
        stats = predict.stats()
    assert all(torch.allclose(answer, alone(module, x), atol=1e-6) for answer, x in zip(answers, xs, strict=True))
    assert sum(each.requests for each in stats) == 40
    assert sum(each.rows for each in stats) == sum(len(x) for x in xs)
    assert sum(each.batches for each in stats) <= 10
    assert sum(stats.shares) == pytest.approx(1)


def test_map_keeps_the_order_and_runs_a_bounded_number_ahead():
    taken, seen = [], []

    def batches():
        for index in range(20):
            taken.append(index)
            yield torch.full((2, 1), float(index), device=cpu(1)[0])

    with Predictor(nn.Identity(), cpu(2)) as predict:
        for answer in predict.map(batches(), ahead=3):
            seen.append(int(answer[0]))
            assert len(taken) <= len(seen) + 3
    assert seen == list(range(20))


class Picky(nn.Module):
    def forward(self, x):
        if (x < 0).any():
            raise KeyError("negative")
        return x * 2


def test_map_runs_four_batches_a_device_ahead_and_cancels_them_after_an_error():
    taken = []

    def batches():
        for index in range(20):
            taken.append(index)
            yield torch.full((2, 1), -1.0 if index == 1 else 1.0, device=cpu(1)[0])

    with Predictor(Picky(), cpu(2), max_batch=100, max_wait_ms=100) as predict:
        answers = predict.map(batches())
        next(answers)
        assert len(taken) == 8
        predict._queue._max_wait = 60.0  # the others wait
        with pytest.raises(KeyError, match="negative"):
            list(answers)
    assert sum(each.requests for each in predict.stats()) == 7  # of the first eight; the ninth was cancelled


def test_without_devices_there_is_one_rank_per_local_device():
    with Predictor(net()) as predict:
        assert [str(each) for each in predict.devices] == [str(each) for each in local_devices() or ["cpu"]]


def test_requests_of_other_shapes_and_dtypes_go_apart():
    class Sizes(nn.Module):
        def forward(self, x, scale=1, extra=None):
            return {"size": x.sum(1, keepdim=True) * scale, "extra": extra, "dtype": x.dtype}

    with Predictor(Sizes(), cpu(2), max_wait_ms=20) as predict:
        small = predict.submit(torch.ones(2, 3, device=cpu(1)[0]))
        wide = predict.submit(torch.ones(1, 5, device=cpu(1)[0]), scale=2)
        double = predict.submit(torch.ones(1, 3, dtype=torch.float64, device=cpu(1)[0]), extra="mine")
        assert small.result(20)["size"].tolist() == [[3], [3]]
        assert wide.result(20)["size"].tolist() == [[10]]
        assert double.result(20)["dtype"] is torch.float64
        assert double.result(20)["extra"] == "mine"


def test_a_request_that_raises_fails_alone():
    device = cpu(1)[0]
    with Predictor(Picky(), cpu(2), max_batch=8, max_wait_ms=100) as predict:
        values = [1.0, -1.0, 2.0, 3.0]
        futures = [predict.submit(torch.full((1, 1), value, device=device)) for value in values]
        assert [float(futures[index].result(20)) for index in (0, 2, 3)] == [2, 4, 6]
        with pytest.raises(KeyError, match="negative"):
            futures[1].result(20)
        assert float(predict(torch.ones(1, 1, device=device))) == 2
        assert sum(each.failures for each in predict.stats()) == 1


def test_out_of_memory_halves_the_batches():
    sizes = []

    class Large(nn.Module):
        def forward(self, x):
            sizes.append(len(x))
            if len(x) > 3:
                raise torch.OutOfMemoryError("too large")
            return x

    with Predictor(Large(), cpu(1), max_batch=8, max_wait_ms=100) as predict:
        futures = [predict.submit(torch.full((1, 1), float(index), device=cpu(1)[0])) for index in range(8)]
        assert [float(future.result(20)) for future in futures] == list(range(8))
    assert [size for size in sizes if size > 1] == [8, 4, 2, 2, 2, 2]  # the first are compared with those alone


def test_weights_are_snapshots_until_refreshed():
    module, x = nn.Linear(1, 1, bias=False), torch.ones(1, 1, device=cpu(1)[0])
    module.weight.data.fill_(1.0)
    with Predictor(module, cpu(2)) as predict:
        module.weight.data.fill_(5.0)
        assert float(predict(x)) == 1
        predict.refresh()
        assert float(predict(x)) == 5
        assert module.weight.requires_grad
        assert module.training


def test_ranks_of_one_device_share_weights_and_no_buffers():
    module = nn.BatchNorm1d(2)
    with Predictor(module, [cpu(1)[0]] * 2) as predict:
        one, other = (each.module for each in predict._engine.replicas)
    assert one.weight.data_ptr() == other.weight.data_ptr() != module.weight.data_ptr()
    assert one.running_mean.data_ptr() != other.running_mean.data_ptr()


def test_a_pipeline_is_one_rank():
    module, x = net(), numbers(5)
    wanted = alone(module, x)
    with Predictor(Pipeline(net(), cpu(2), chunks=2)) as predict:
        assert torch.allclose(predict(x), wanted, atol=1e-6)
        assert len(predict.stats()) == 1
    with pytest.raises(ValueError, match="a Pipeline keeps its devices busy by itself"):
        Predictor(Pipeline(net(), cpu(2), chunks=2), in_flight=2)


@pytest.mark.parametrize("in_flight", [None, 1, 3])
def test_a_placed_net_has_several_batches_in_flight(in_flight):
    module, xs = net(), [numbers(1 + index % 5) for index in range(30)]
    wanted = [alone(module, x) for x in xs]
    with Predictor(place(net(), cpu(2), ["3"]), in_flight=in_flight, max_batch=4, max_wait_ms=0) as predict:
        answers = [each.result(20) for each in [predict.submit(x) for x in xs]]
        assert torch.allclose(predict(torch.cat(xs)), torch.cat(wanted), atol=1e-6)
        assert len(predict.stats()) == (in_flight or 1)
        predict.refresh()
        assert torch.allclose(predict(xs[0]), wanted[0], atol=1e-6)
    assert all(torch.allclose(*each, atol=1e-6) for each in zip(answers, wanted, strict=True))
    with pytest.raises(ValueError, match="leave device_ids out"):
        Predictor(place(net(), cpu(2), ["3"]), cpu(2))
    with pytest.raises(ValueError, match="in_flight is for a module of place"):
        Predictor(net(), cpu(2), in_flight=2)


class Meets(nn.Linear):
    """Waits for the other layer in one of its calls; what changes is nothing of the module's."""

    barrier, calls = threading.Barrier(2), collections.Counter()

    def __init__(self, call):
        super().__init__(4, 4)
        self.call = call

    def forward(self, x):
        self.calls[self.call] += 1
        if self.calls[self.call] == self.call:
            self.barrier.wait(20)
        return super().forward(x)


def test_the_parts_of_a_placed_net_work_at_once():
    """After one call alone, part 1 works on a batch only while part 0 works on the next one."""
    module = place(nn.Sequential(Meets(2), Meets(1)), cpu(2), ["1"])
    with Predictor(module, in_flight=2, max_batch=1, max_wait_ms=0) as predict:
        Meets.calls.update({1: 100, 2: 100})
        wanted = predict(torch.ones(1, 4))
        Meets.calls.clear()
        answers = [each.result(20) for each in [predict.submit(torch.ones(1, 4)) for _ in range(2)]]
    assert all(torch.equal(each, wanted) for each in answers)


class Counts(nn.Module):
    """Answers by another method than the forward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x)

    def steps(self, x, count=1, *, scale=1.0):
        for _ in range(count):
            x = self(x)
        return scale * x


def test_a_method_answers_by_the_keywords_of_each_request(ranks):
    torch.manual_seed(0)
    module = Counts().to(cpu(1)[0])
    calls = [(numbers(1 + index % 3), {"count": 1 + index % 2, "scale": 0.5 + index % 3}) for index in range(24)]
    with torch.no_grad():
        wanted = [module.steps(x, **options) for x, options in calls]
    with Predictor(module, cpu(ranks), method="steps", max_wait_ms=20) as predict:
        answers = [each.result(20) for each in [predict.submit(x, **options) for x, options in calls]]
        assert torch.allclose(predict(calls[0][0], 3), module.steps(calls[0][0], 3), atol=1e-6)
        stats = predict.stats()
    assert all(torch.allclose(*each, atol=1e-6) for each in zip(answers, wanted, strict=True))
    assert sum(each.requests for each in stats) == 25
    assert sum(each.batches for each in stats) >= 7  # seven forms


@pytest.mark.parametrize("method", ["nothing", 3, "layer_count"])
def test_methods_that_are_none(method):
    module = Counts()
    module.layer_count = 1
    with pytest.raises(ValueError, match="method must be the name of a method of Counts"):
        Predictor(module, ["cpu"], method=method)


def test_asyncio():
    module, xs = net(), [numbers(2) for _ in range(10)]

    async def ask(predict):
        return await asyncio.gather(*(predict.asubmit(x) for x in xs))

    with Predictor(module, cpu(2)) as predict:
        answers = asyncio.run(ask(predict))
    assert all(torch.allclose(answer, alone(module, x), atol=1e-6) for answer, x in zip(answers, xs, strict=True))


class Gate(nn.Module):
    """A net that waits until it may go on."""

    def __init__(self):
        super().__init__()
        self.event = threading.Event()

    def __deepcopy__(self, memo):
        return self

    def forward(self, x):
        assert self.event.wait(20)
        return x


def test_a_full_queue_pushes_back_and_cancelled_requests_are_left_out():
    gate, x = Gate(), torch.ones(1, 1, device=cpu(1)[0])
    with Predictor(gate, cpu(1), max_batch=1, max_pending=2, max_wait_ms=0) as predict:
        first = predict.submit(x)
        while not first.running():
            time.sleep(0.001)
        second, third = predict.submit(x), predict.submit(x)
        with pytest.raises(TimeoutError, match=r"2 requests were pending for 0\.01 s"):
            predict.submit(x, timeout=0.01)
        assert second.cancel()
        gate.event.set()
        assert torch.equal(third.result(20), x)
        with pytest.raises(CancelledError):
            second.result(20)
        assert predict.stats()[0].requests == 2


def test_a_coroutine_that_is_cancelled_before_there_is_a_free_slot_leaves_no_request():
    gate, x = Gate(), torch.ones(1, 1, device=cpu(1)[0])

    async def give_up(predict):
        with pytest.raises(TimeoutError, match="were pending"):
            await predict.asubmit(x, timeout=0.01)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(predict.asubmit(x), 0.05)
        gate.event.set()

    with Predictor(gate, cpu(1), max_batch=1, max_pending=1, max_wait_ms=0) as predict:
        first = predict.submit(x)
        while not first.running():
            time.sleep(0.001)
        predict.submit(x)
        asyncio.run(give_up(predict))  # its end waits for the thread that puts the request into the queue
        predict(x)
        assert predict.stats()[0].requests == 3


def test_close_lets_go_of_the_copies():
    """With their memory, and the streams of their graphs."""
    seen = weakref.WeakSet()

    class Net(nn.Linear):
        def forward(self, x):
            seen.add(self)
            return super().forward(x)

    predict = Predictor(Net(4, 3).to(cpu(1)[0]), cpu(2), max_batch=1, max_wait_ms=0)
    predict(numbers(1))
    assert seen
    predict.close()
    gc.collect()
    assert not seen


def test_close_answers_all_or_cancels_those_that_wait():
    gate, x = Gate(), torch.ones(1, 1, device=cpu(1)[0])
    predict = Predictor(gate, cpu(1), max_batch=1, max_wait_ms=0)
    first = predict.submit(x)
    while not first.running():
        time.sleep(0.001)
    second = predict.submit(x)
    second.add_done_callback(lambda _: gate.event.set())
    predict.close(drain=False)
    assert torch.equal(first.result(20), x)
    assert second.cancelled()
    with pytest.raises(RuntimeError, match="closed"):
        predict.submit(x)
    predict.close()


def test_close_ends_all_threads():
    before = threading.enumerate()
    with Predictor(net(), cpu(3)) as predict:
        predict(numbers(6))
        threads = [each for each in threading.enumerate() if each not in before]
        assert len(threads) == 3
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"max_batch": 0}, "max_batch"), ({"max_batch": True}, "max_batch"), ({"max_pending": 0}, "max_pending"),
     ({"max_wait_ms": -1}, "max_wait_ms"), ({"device_ids": []}, "device_ids is empty"),
     ({"collate": 3}, "collate must"),
     ({"amp_dtype": torch.int32}, "amp_dtype must"), ({"output_device": "cuda:77"}, "device cuda:77 does not exist")],
)  # fmt: skip
def test_options_that_cannot_be(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Predictor(net(), **{"device_ids": cpu(1), **options})


def test_a_net_must_be_a_module():
    with pytest.raises(TypeError, match="net must be a torch"):
        Predictor(lambda x: x)


def test_requests_that_cannot_be():
    device = cpu(1)[0]
    with Predictor(net(), cpu(1)) as predict:
        for inputs in ([torch.ones(0, 4, device=device)], [3], [torch.tensor(1)], [Rows()], [Replicate(numbers(2))]):
            with pytest.raises(ValueError, match="1 or more rows"):
                predict.submit(*inputs)
        for other in (torch.ones(3, 4), Rows([1])):
            with pytest.raises(ValueError, match=r"differ in their number of rows.*inputs\[0\].*inputs\[1\]"):
                predict.submit(torch.ones(2, 4), other)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            predict(torch.ones(2, 5, device=device))
        assert predict(numbers(2)).shape == (2, 3)


def test_stats_are_a_table_and_prometheus_text():
    with Predictor(nn.Identity(), cpu(2)) as predict:
        predict(torch.ones(4, 1, device=cpu(1)[0]))
        stats = predict.stats()
    assert len(str(stats).splitlines()) == 3
    text = stats.prometheus()
    assert "# TYPE mgpu_rows_total counter" in text
    rows = [int(line.split()[-1]) for line in text.splitlines() if line.startswith("mgpu_rows_total")]
    assert sum(rows) == 4


OPEN_AT_THE_END = """
import threading, torch, mgpu_core
from mgpu_core.ranks import workers
predict = mgpu_core.Predictor(torch.nn.Identity(), ["cpu"] * 2)
assert predict(torch.ones(4, 1)).shape == (4, 1)
"""
THE_PROCESS_ENDS = f"{OPEN_AT_THE_END}workers.EXIT_SECONDS = 100"
A_THREAD_OUTLIVES_MAIN = f"""{OPEN_AT_THE_END}
def use():
    threading.main_thread().join()
    print(predict(torch.ones(5, 1)).shape[0])
workers.EXIT_SECONDS = 0.1
threading.Thread(target=use).start()
"""


@pytest.mark.parametrize(("script", "printed"), [(THE_PROCESS_ENDS, ""), (A_THREAD_OUTLIVES_MAIN, "5\n")])
def test_the_process_ends_with_an_open_predictor(script, printed):
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")
