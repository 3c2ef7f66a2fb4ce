"""``generate`` of transformers over ranks and parts: the ids of one device, row by row."""

import copy
import os
import signal
import threading
import warnings

import pytest
import torch

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

from mgpu_core import DataParallel, Predictor, place  # noqa: E402

IDS = torch.randint(3, 40, (7, 5), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(IDS)
MASK[::2, :2] = 0
OPTIONS = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": 7}
SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4}
SMALL_T5 = {"vocab_size": 40, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}


def made(name):
    torch.manual_seed(0)
    if name == "t5":
        return transformers.T5ForConditionalGeneration(
            transformers.T5Config(**SMALL_T5, decoder_start_token_id=0)
        ).eval()
    config = transformers.LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config).eval()


def as_long(ids, length):
    return torch.nn.functional.pad(ids, (0, length - ids.size(1)), value=0)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_ranks_generate_their_rows(name, beams, ranks):
    net, options = made(name), OPTIONS | {"num_beams": beams}
    wanted = net.generate(IDS, attention_mask=MASK, **options)
    model = DataParallel(copy.deepcopy(net), ["cpu"] * ranks)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = model.call("generate", IDS, attention_mask=MASK, pad_value=0, **options)
    longest = max(found.size(1), wanted.size(1))
    assert torch.equal(as_long(found, longest), as_long(wanted, longest))


def test_a_dict_of_outputs_is_joined():
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "use_cache": False, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_scores": True}
    net = made("llama")
    wanted, found = net.generate(IDS, **options), DataParallel(net, ["cpu"] * 3).call("generate", IDS, **options)
    assert type(found) is type(wanted)
    assert torch.equal(found.sequences, wanted.sequences)
    assert len(found.scores) == 3
    assert all(torch.allclose(*each, atol=1e-5) for each in zip(found.scores, wanted.scores, strict=True))


@pytest.mark.parametrize("parts", [1, 2])
def test_a_predictor_generates_by_the_keywords_of_each_request(parts):
    net = made("llama")
    lengths = [2 + index % 3 for index in range(12)]
    requests = [IDS[index % 7][None] for index in range(12)]
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    wanted = [net.generate(each, max_new_tokens=n, **options) for each, n in zip(requests, lengths, strict=True)]
    served = copy.deepcopy(net)
    served = served if parts == 1 else place(served, ["cpu"] * parts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "requests to generate are answered one at a time")
        with Predictor(served, ["cpu"] * 2 if parts == 1 else None, method="generate", max_wait_ms=50) as predict:
            futures = [
                predict.submit(each, max_new_tokens=n, **options) for each, n in zip(requests, lengths, strict=True)
            ]
            found = [each.result(60) for each in futures]
            batches = sum(each.batches for each in predict.stats())
    assert all(torch.equal(*each) for each in zip(found, wanted, strict=True))
    assert batches == 12  # without split=, one request at a time


def test_texts_that_end_apart_are_cut_by_a_function():
    net = made("llama")
    requests = [IDS[index][None] for index in range(7)]

    def split(outputs, calls):
        return [row[None, : 5 + ended(row[5:])] for row in outputs]

    def ended(new):
        ends = (new == 7).nonzero()
        return len(new) if not len(ends) else int(ends[0]) + 1

    net.lm_head.weight.data[7] = 3 * net.lm_head.weight.data.mean(0).abs()  # it ends soon
    options = {**OPTIONS, "max_new_tokens": 12}
    wanted = [net.generate(each, **options) for each in requests]
    with Predictor(net, ["cpu"] * 2, method="generate", max_wait_ms=50, split=split) as predict:
        found = [each.result(60) for each in [predict.submit(each, **options) for each in requests]]
    assert all(torch.equal(*each) for each in zip(found, wanted, strict=True))


def test_ctrl_c_inside_generate_leaves_a_placed_net_usable():
    net = made("llama")
    wanted = net.generate(IDS, attention_mask=MASK, **OPTIONS)
    place(net, ["cpu"] * 2)
    begun, others = threading.Event(), []

    def interrupt():
        begun.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    def other():
        others.append(net.generate(IDS, attention_mask=MASK, **OPTIONS))

    handle = net.model.layers[3].register_forward_hook(lambda *_: begun.set())
    threads = [threading.Thread(target=each) for each in (interrupt, other)]
    for each in threads:
        each.start()
    with pytest.raises(KeyboardInterrupt):
        net.generate(IDS, **OPTIONS | {"max_new_tokens": 2000, "eos_token_id": None})
    for each in threads:
        each.join(60)
    handle.remove()
    assert torch.equal(others[0], wanted)
    assert torch.equal(net.generate(IDS, attention_mask=MASK, **OPTIONS), wanted)
