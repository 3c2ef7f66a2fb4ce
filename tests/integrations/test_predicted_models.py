"""A Predictor in front of models that people have: their rows do not see each other, and nothing is said of them."""

import warnings

import pytest
import torch

from mgpu_core import Predictor

pytestmark = pytest.mark.slow
torchvision = pytest.importorskip("torchvision")
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

REQUESTS = 32


def resnet():
    return torchvision.models.resnet18(), [{"x": torch.randn(1, 3, 64, 64)} for _ in range(REQUESTS)]


def gpt2():
    sizes = {"n_layer": 4, "n_head": 4, "n_embd": 64, "vocab_size": 200, "n_positions": 64}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False)
    masks = [(torch.arange(24) < length)[None].long() for length in torch.randint(4, 25, (REQUESTS,)).tolist()]
    rows = [{"input_ids": torch.randint(200, (1, 24)), "attention_mask": mask} for mask in masks]
    return transformers.GPT2LMHeadModel(config), rows


@pytest.mark.parametrize("precision", ["float32", "autocast", "bfloat16"])
@pytest.mark.parametrize("made", [resnet, gpt2])
def test_no_false_alarm(made, precision):
    torch.manual_seed(0)
    net, requests = made()
    if precision == "bfloat16":
        net = net.bfloat16()
        requests = [
            {name: value.bfloat16() if value.is_floating_point() else value for name, value in each.items()}
            for each in requests
        ]
    options = {"amp_dtype": torch.bfloat16} if precision == "autocast" else {}
    with (
        warnings.catch_warnings(record=True) as told,
        Predictor(net, ["cpu"] * 2, max_batch=16, max_wait_ms=150, **options) as predict,
    ):
        warnings.simplefilter("always")
        futures = [predict.submit(**each) for each in requests]
        for future in futures:
            future.result(60)
        stats = predict.stats()
    assert sum(each.requests for each in stats) == REQUESTS
    assert sum(each.batches for each in stats) < REQUESTS  # they were joined
    assert [str(each.message) for each in told] == []


def test_the_cache_of_a_decoder_is_each_callers_own():
    torch.manual_seed(0)
    net, requests = gpt2()
    net.config.use_cache = True  # as it is by default
    with (
        Predictor(net, ["cpu"] * 2, max_batch=4, max_wait_ms=150) as predict,
        pytest.warns(RuntimeWarning, match=r"is a DynamicCache, .* one at a time"),
    ):
        answers = [each.result(60) for each in [predict.submit(**each) for each in requests]]
    for request, answer in zip(requests, answers, strict=True):
        with torch.no_grad():
            alone = net.eval()(**request)
        torch.testing.assert_close(answer.logits, alone.logits)
        for mine, theirs in zip(answer.past_key_values.layers, alone.past_key_values.layers, strict=True):
            torch.testing.assert_close(mine.keys, theirs.keys)
            torch.testing.assert_close(mine.values, theirs.values)
