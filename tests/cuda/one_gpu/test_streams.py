"""Streams: late ones of the package, those of users, and of several threads at once."""

import copy

import pytest
import torch
from fakes.here import in_threads
from torch.nn import functional

import mgpu_core
from mgpu_core.devices import streams
from mgpu_core.devices.graphs import CudaRecorder

gpu_only = pytest.mark.usefixtures("gpu_only")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("workers", ["threads", "caller"])
def test_steps_on_late_streams(here, ranks, workers):
    with here.late():
        here.train_alike(
            here.team(ranks), "adamw", where="cpu", each=here.poison, workers=workers, bucket_nbytes=1 << 14
        )


@gpu_only
def test_a_captured_step_on_late_streams(here):
    with here.late():
        here.train_alike(here.team(2), "adamw", each=here.poison, capture=True, bucket_nbytes=1 << 14)


@gpu_only
def test_work_outside_waits_for_an_event_of_the_replay_before_it(here):
    """The graph goes on after the event, and nobody waits for the rest."""
    recorder, x, seen = CudaRecorder(), torch.zeros(1 << 20, device=here.device), []
    event, side = recorder.event(), torch.Stream(here.device)

    def work():
        torch.cuda._sleep(2_000_000)
        x.add_(1)
        event.record(torch.accelerator.current_stream(here.device))
        torch.cuda._sleep(2_000_000)
        return [x]

    recording, _ = recorder.record(here.device, work)
    for _ in range(30):
        recording.replay()
        event.wait(side)
        with streams.on(here.device, side):
            seen.append(x[-1].clone())
        torch.accelerator.current_stream(here.device).wait_stream(side)
    assert [int(each) for each in seen] == list(range(1, 31))


def test_the_wrapper_on_late_streams(here):
    model = mgpu_core.DataParallel(here.net(), here.team(2))
    alone = copy.deepcopy(model.module)
    with here.late():
        for x, _ in here.batches(15, where="cpu"):
            made = model(x)
            here.poison()
            torch.testing.assert_close(made, alone(x.to(here.device)), rtol=1e-9, atol=1e-12)


def test_each_of_four_threads_keeps_its_stream(here):
    """Each with a wrapper of its own, and inputs from the host, which are copied on a stream that all share."""
    net = here.net(dtype=torch.float32).eval()
    here.wait()

    def ask(index):
        model = mgpu_core.DataParallel(net, here.team(2))
        generator = torch.Generator().manual_seed(index)
        own = torch.cuda.Stream() if here.is_gpu else None
        with torch.cuda.stream(own), torch.no_grad():
            for _ in range(60):
                x = torch.randn(512, 20, generator=generator)
                made = model(x)
                assert (torch.cuda.current_stream() if here.is_gpu else None) == own
                torch.testing.assert_close(made, net(x.to(here.device)), rtol=0, atol=1e-4)

    in_threads(ask, 4)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(1, {}), (2, {"workers": "threads"}), (2, {"workers": "caller"}), (2, {"capture": True})],
    ids=str,
)
@gpu_only
def test_steps_on_a_users_stream(here, ranks, options):
    """Whoever reads on another stream reads too early."""
    with here.late(), here.stream():
        here.train_alike(here.team(ranks), each=lambda: here.sleep(0.5), bucket_nbytes=1 << 14, **options)


@gpu_only
def test_the_wrapper_and_a_pipeline_on_a_users_stream(here):
    net = here.net()
    alone = copy.deepcopy(net)
    model = mgpu_core.DataParallel(net, here.team(2))
    with here.late(), here.stream():
        for x, _ in here.batches(10):
            here.sleep(2)
            doubled = x * 2
            for each in (model, alone):
                functional.normalize(each(doubled)).square().sum().backward()
            here.poison()
        for one, other in zip(net.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-8, atol=1e-12)
        pipe = mgpu_core.Pipeline(copy.deepcopy(net), here.team(2), split_points=["5"], chunks=4)
        here.sleep(5)
        torch.testing.assert_close(pipe(doubled), net(doubled), rtol=1e-9, atol=1e-12)
