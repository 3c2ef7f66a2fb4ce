"""The copies of the module: what they share, how they run, and which modules cannot be copied to answer requests."""

import pytest
import torch
from fakes.nets import cpu
from torch import nn

from mgpu_core import Pipeline, Predictor


class Writing(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.is_harmless = True

    def forward(self, x):
        if not (x > 0).all():
            self.calls += 1
        return x


def test_a_module_that_writes_its_buffers_is_refused_and_the_predictor_goes_on():
    one = torch.ones(1, 1, device=cpu(1)[0])
    with Predictor(Writing(), cpu(2)) as predict:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the forward of Writing writes its buffer 'calls' in eval mode"):
                predict(-one)
            assert float(predict(one)) == 1


def test_a_predictor_that_is_made_in_inference_mode():
    with torch.inference_mode():
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        x = torch.ones(1, 2, device=cpu(1)[0])
        with Predictor(module, cpu(2)) as predict:
            answer = predict(x)
    assert answer.shape == (1, 2)
    assert module.training


def test_a_refresh_that_fails_keeps_the_old_weights():
    class Uncopyable(nn.Linear):
        refuses = False

        def __deepcopy__(self, memo):
            if self.refuses:
                raise OSError("no copy")
            made = nn.Linear(1, 1, bias=False)
            made.weight.data.copy_(self.weight.data)
            return made

    module = Uncopyable(1, 1, bias=False)
    module.weight.data.fill_(2.0)
    with Predictor(module, cpu(2)) as predict:
        module.weight.data.fill_(3.0)
        module.refuses = True
        with pytest.raises(OSError, match="no copy"):
            predict.refresh()
        assert float(predict(torch.ones(1, 1, device=cpu(1)[0]))) == 2


def test_bfloat16_by_autocast():
    with Predictor(nn.Linear(2, 2), cpu(1), amp_dtype=torch.bfloat16) as predict:
        assert predict(torch.ones(1, 2, device=cpu(1)[0])).dtype is torch.bfloat16


@pytest.mark.slow
def test_compiled_copies():
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    xs = [torch.rand(rows, 3) for rows in (1, 2, 5, 8)]
    with Predictor(module, ["cpu"] * 2, compile=True, max_wait_ms=0) as predict:
        answers = [predict(x) for x in xs]
        assert all(each.module._compiled_call_impl is not None for each in predict._engine.replicas)
    assert all(torch.allclose(one, module(x), atol=1e-6) for one, x in zip(answers, xs, strict=True))


def test_a_capture_needs_a_gpu_and_a_module_on_one():
    with pytest.raises(ValueError, match="capture=True needs CUDA devices"):
        Predictor(nn.Linear(1, 1), cpu(1), capture=True)
    with pytest.raises(ValueError, match="capture=True needs"):
        Predictor(Pipeline([nn.Linear(1, 1), nn.Linear(1, 1)], cpu(2)), capture=True)
