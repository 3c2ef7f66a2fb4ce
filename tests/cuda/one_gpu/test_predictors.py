"""Predictors under many callers: every answer is its own request's; and what they record."""

import warnings
from contextlib import contextmanager

import pytest
import torch
from fakes.here import in_threads, optimizer_of
from torch import nn
from torch.nn import functional

import mgpu_core

gpu_only = pytest.mark.usefixtures("gpu_only")


@pytest.mark.parametrize("ranks", [1, 2])
def test_requests_from_many_threads(here, ranks):
    serve(here, ranks, turns=150 if here.is_gpu else 30)


@gpu_only
def test_requests_that_are_replays_of_graphs(here):
    with every_call_is_a_replay():
        serve(here, 1, turns=60, capture=True)


@contextmanager
def every_call_is_a_replay():
    """Fail if a call could not be recorded: that is warned of, in the thread of a worker."""
    with warnings.catch_warnings(record=True, action="always") as told:
        yield
    assert [str(each.message) for each in told if "not as a CUDA graph" in str(each.message)] == []


class Watching(nn.Module):
    def __init__(self, here):
        super().__init__()
        self.net, self.here, self.seen = here.net(dtype=torch.float32).eval(), here, set()

    def forward(self, x):
        if self.here.is_gpu and not torch.cuda.is_current_stream_capturing():
            self.seen.add((torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream))
        return self.net(x)

    def __deepcopy__(self, memo):
        made = Watching(self.here)
        made.load_state_dict(self.state_dict())
        made.seen = self.seen
        return made


def serve(here, ranks, *, turns, threads=8, **options):
    """Ask from threads, every second one with tensors of the GPU; raise unless all answers are right."""
    module = Watching(here)
    with mgpu_core.Predictor(module, here.team(ranks), max_batch=16, max_wait_ms=0.5, **options) as predict:

        def ask(index):
            generator = torch.Generator().manual_seed(index)
            for turn in range(turns):
                x = torch.randn(1 + turn % 3, 20, generator=generator)
                given = x.to(here.device) if index % 2 else x
                answer = predict(given)
                with torch.no_grad():
                    wanted = module.net(x.to(here.device))
                assert answer.device == given.device
                torch.testing.assert_close(answer.to(here.device), wanted, rtol=0, atol=1e-3)
                if turn % 10 == 0:
                    here.poison()

        in_threads(ask, threads)
        assert sum(each.failures for each in predict.stats()) == 0
    assert not here.is_gpu or module.seen == {(0, 0)}, "workers computed on other streams than the default one"


class Waves(nn.Module):
    def forward(self, x):
        for _ in range(20):
            x = x.cos() * 2 + x
        return x


@gpu_only
def test_two_ranks_that_record_at_the_same_time(here):
    predict = mgpu_core.Predictor(Waves(), here.team(2), max_batch=8, max_wait_ms=0, capture=True)

    def ask(index):
        for width in range(1, 13):
            x = torch.randn(1, 16 * width + index)
            torch.testing.assert_close(predict(x), Waves()(x), rtol=1e-3, atol=1e-3)

    with predict, every_call_is_a_replay():
        in_threads(ask, 6)


@gpu_only
def test_a_step_is_recorded_while_a_predictors_graphs_live(here):
    """With dropout, whose generator both record."""
    with mgpu_core.Predictor(here.net(dtype=torch.float32).eval(), here.team(1), capture=True) as predict:
        predict(torch.randn(4, 20, device=here.device))
        net = here.net(dropout=0.1)
        optimizer = optimizer_of("sgd", net.parameters())
        step = mgpu_core.TrainStep(net, functional.cross_entropy, optimizer, here.team(1), capture=True)
        for x, y in here.batches(8):
            step(x, y)
        assert step.graphs.replays >= 3, step.graphs.reason
        predict(torch.randn(4, 20, device=here.device))


class Double(nn.Module):
    def forward(self, x):
        return x * 2


@gpu_only
def test_a_large_call_on_a_users_stream(here):
    """It is cut into batches and gathered on that stream, and read before the memory is given out again."""
    with mgpu_core.Predictor(Double(), here.team(1), max_batch=256) as predict:
        for turn in range(30):
            with here.stream() as own:
                here.sleep(3)
                x = torch.full((1024, 4096), float(turn), device=here.device)
                made = predict(x)
            here.poison()
            torch.full((256, 4096), float("nan"), device=here.device)
            own.synchronize()
            assert bool((made == 2 * turn).all()), turn
