"""``Generation``: prompts of unequal lengths in one batch, and each text as ``generate`` gives it alone."""

import warnings

import pytest
import torch

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

from mgpu_core import Predictor, place  # noqa: E402
from mgpu_core.integrations.transformers import Generation  # noqa: E402

END, PAD = 2, 0
SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "initializer_range": 0.5}
GPT2 = {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 24, "initializer_range": 0.5}
T5 = {
    "vocab_size": 40,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 4,
    "initializer_factor": 3.0,
}
TOKENS = {"eos_token_id": END, "pad_token_id": PAD, "bos_token_id": 1}
GREEDY = {"do_sample": False}


def made(name):
    """Return a net, some of whose texts end before their limits."""
    torch.manual_seed(3)
    if name == "t5":
        net = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5, **TOKENS, decoder_start_token_id=PAD))
    elif name == "gpt2":  # it pads by what its texts end with, and its positions are a table
        net = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **TOKENS | {"pad_token_id": None}))
    else:
        net = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_attention_heads=4, **TOKENS))
    net.eval()
    new = [net.generate(ids, max_new_tokens=12, **GREEDY)[0, -11:].tolist() for ids in prompts(24)]
    firsts = {token: [row.index(token) for row in new if token in row[:9]] for token in range(8, 40)}
    net.generation_config.eos_token_id = max(firsts, key=lambda token: len(set(firsts[token])))
    return net


def prompts(count, longest=9):
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(8, 40, (1, length), generator=generator) for length in lengths]


def asked(predict, requests, **options):
    futures = [predict.submit(ids, **GREEDY | options | own) for ids, own in requests]
    return [future.result(60) for future in futures]


def batches(predict):
    return sum(each.batches for each in predict.stats())


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_each_text_is_that_of_its_request(name, ranks):
    """With limits of their own, ends that come at any place, and none."""
    net = made(name)
    requests = [(ids, {"max_new_tokens": 1 + 5 * index % 13}) for index, ids in enumerate(prompts(24))]
    wanted = [net.generate(ids, **GREEDY, **own) for ids, own in requests]
    assert len({each.size(1) - ids.size(1) for each, (ids, own) in zip(wanted, requests, strict=True)}) > 4
    ends = net.generation_config.eos_token_id
    assert sum(bool(each[0, -1] == ends) for each in wanted) > 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Predictor(Generation(net), ["cpu"] * ranks, max_batch=8, max_wait_ms=2000) as predict:
            found = asked(predict, requests)
            assert batches(predict) == 3
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_padding_that_a_request_has_brought(name):
    """On either side, with a mask and without: alone it is there, too."""
    net = made(name)
    net.generation_config.pad_token_id = PAD
    ids = torch.randint(8, 40, (5, 6), generator=torch.Generator().manual_seed(5))
    ids[0, :4] = ids[1, 3:] = ids[2, 2] = PAD
    options = [{}, {}, {}, {"attention_mask": (torch.arange(6) < 4).long()[None]}, {}]
    requests = [(row[None], {"max_new_tokens": 9, **own}) for row, own in zip(ids, options, strict=True)]
    requests.append((torch.tensor([[9, 10]]), {"max_new_tokens": 9}))
    wanted = [net.generate(rows, **own, **GREEDY) for rows, own in requests]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Predictor(Generation(net), ["cpu"], max_batch=6, max_wait_ms=2000) as predict:
            assert all(map(torch.equal, asked(predict, requests), wanted))
            assert batches(predict) == 1


@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_options_with_other_values_are_not_joined(kind):
    net = made("llama")
    requests = [
        (ids, {"max_new_tokens": 9, "eos_token_id": kind([12 + index])}) for index, ids in enumerate(prompts(4))
    ]
    wanted = [net.generate(ids, **own, **GREEDY) for ids, own in requests]
    with Predictor(Generation(net), ["cpu"], max_batch=4, max_wait_ms=50) as predict:
        assert all(map(torch.equal, asked(predict, requests), wanted))
        assert batches(predict) == 4


def test_a_configuration_that_its_caller_changes_for_the_next_request():
    net = made("llama")
    config = transformers.GenerationConfig(max_new_tokens=1, pad_token_id=PAD, eos_token_id=END, do_sample=False)
    found, wanted = [], []
    with Predictor(Generation(net), ["cpu"], max_batch=8, max_wait_ms=500) as predict:
        for index, ids in enumerate(prompts(8)):
            config.max_new_tokens = 3 + index % 2
            wanted.append(net.generate(ids, generation_config=config))
            found.append(predict.submit(ids, generation_config=config))
        assert all(map(torch.equal, [each.result(60) for each in found], wanted))
        assert batches(predict) == 2  # by their contents
        odd = transformers.GenerationConfig(max_new_tokens=3, pad_token_id=torch.tensor(PAD), eos_token_id=END)
        wanted = net.generate(ids, generation_config=odd, do_sample=False)
        assert torch.equal(predict(ids, generation_config=odd, do_sample=False), wanted)
        net.generation_config.eos_token_id = [12]
        with pytest.raises(RuntimeError, match="generation_config was changed after"):
            predict(ids, max_new_tokens=3)


def test_beams_of_the_model_that_a_call_leaves_out():
    net = made("llama")
    net.generation_config.num_beams = 4
    requests = [(ids, {"max_new_tokens": 6, "num_beams": 1}) for ids in prompts(4)]
    wanted = [net.generate(ids, **own, **GREEDY) for ids, own in requests]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Predictor(Generation(net), ["cpu"], max_batch=4, max_wait_ms=2000) as predict:
            assert all(map(torch.equal, asked(predict, requests), wanted))
            assert batches(predict) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_in_half_precision_are_compared_as_such(dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with Predictor(Generation(made("llama")), ["cpu"], max_batch=8, max_wait_ms=2000, amp_dtype=dtype) as predict:
            for count in (8, 7):
                asked(predict, [(ids, {"max_new_tokens": 4}) for ids in prompts(count)])
            assert batches(predict) == 2


def test_rows_masks_and_configurations_of_requests():
    net = made("llama")
    ids = torch.randint(8, 40, (3, 6), generator=torch.Generator().manual_seed(5))
    ids[0, :4] = PAD  # which transformers leaves out by itself
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    config = transformers.GenerationConfig(max_length=14, eos_token_id=[END, 9], pad_token_id=3, do_sample=False)
    for options in (
        {"max_new_tokens": 9},
        {"max_new_tokens": 9, "attention_mask": mask},
        {"generation_config": config},
    ):
        requests = [
            (ids, options),
            (ids[2:], {name: each for name, each in options.items() if name != "attention_mask"}),
        ]
        wanted = [net.generate(rows, **own, **({} if config in own.values() else GREEDY)) for rows, own in requests]
        with Predictor(Generation(net), ["cpu"], max_batch=4, max_wait_ms=2000) as predict:
            found = [
                predict.submit(rows, **own, **({} if config in own.values() else GREEDY)) for rows, own in requests
            ]
            assert all(map(torch.equal, [each.result(60) for each in found], wanted))
            assert batches(predict) == 1


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": PAD, "<s>": 1, "</s>": END, **{f"w{index}": index for index in range(3, 40)}}
    tokens = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="</s>")


def text_of(ids):
    return " ".join(f"w{token}" for token in ids.tolist() if token > END)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_texts_are_answered_by_what_follows(name):
    net = made(name)
    ids = prompts(4)
    wanted = []
    for prompt in ids:
        start = 1 if name == "t5" else prompt.size(1)
        wanted.append(text_of(net.generate(prompt, max_new_tokens=8, **GREEDY)[0, start:]))
    texts = [text_of(prompt[0]) for prompt in ids]
    with Predictor(Generation(net, tokenizer()), ["cpu"], max_batch=4, max_wait_ms=2000) as predict:
        assert asked(predict, [(text, {"max_new_tokens": 8}) for text in texts]) == wanted
        assert batches(predict) == 1
        assert predict(texts, max_new_tokens=8, **GREEDY) == wanted
        with pytest.warns(UserWarning, match="num_beams may not treat"):
            beams = predict(texts[0], max_new_tokens=8, num_beams=2, **GREEDY)
        assert isinstance(beams, str)
        several = predict(texts[0], max_new_tokens=8, num_beams=2, num_return_sequences=2, **GREEDY)
        assert several[0] == beams
        assert len(several) == 2
        with pytest.raises(TypeError, match="return_dict_in_generate answers no texts"):
            predict(texts[0], max_new_tokens=8, return_dict_in_generate=True)
    with Predictor(Generation(net), ["cpu"]) as predict, pytest.raises(TypeError, match="need a tokenizer"):
        predict("w5", max_new_tokens=2)


class Stream:
    def __init__(self):
        self.tokens, self.ends = [], 0

    def put(self, ids):
        assert self.ends == 0
        self.tokens += ids.flatten().tolist()

    def end(self):
        self.ends += 1


@pytest.mark.parametrize("name", ["llama", "t5"])
@pytest.mark.parametrize("failing", [None, 10])
def test_streams_of_one_batch(name, failing):
    """Each has the tokens of its own text, once, also where the batch fails and is answered again."""
    net = made(name)
    requests = [(ids, {"max_new_tokens": 2 + 3 * index}) for index, ids in enumerate(prompts(4))]
    wanted = [net.generate(ids, **GREEDY, **own)[0].tolist() for ids, own in requests]
    calls, forward = [], net.forward

    def forward_of_call(*args, **kwargs):
        calls.append(args)
        if len(calls) == failing:
            raise ValueError("no")
        return forward(*args, **kwargs)

    net.forward = forward_of_call
    streams = [Stream() for _ in requests]
    streamed = [(ids, {**own, "streamer": each}) for (ids, own), each in zip(requests, streams, strict=True)]
    with Predictor(Generation(net), ["cpu"], max_batch=4, max_wait_ms=2000) as predict:
        assert [each[0].tolist() for each in asked(predict, streamed)] == wanted
        assert predict.stats()[0].retries == (4 if failing else 0)
    assert [each.tokens for each in streams] == wanted
    assert [each.ends for each in streams] == [1] * 4


class BrokenStream(Stream):
    """Raises after a few tokens, as the streamer of a caller that has disconnected."""

    def put(self, ids):
        super().put(ids)
        if len(self.tokens) > 3:
            raise ConnectionError("gone")


@pytest.mark.parametrize("sampled", [False, True])
def test_a_streamer_that_raises_fails_its_request_alone(sampled):
    net = made("llama")
    options = {"max_new_tokens": 7, "eos_token_id": None, "do_sample": sampled}
    streams = [Stream(), BrokenStream(), Stream()]
    requests = [(torch.tensor([[9 + index]]), options | {"streamer": stream}) for index, stream in enumerate(streams)]
    with Predictor(Generation(net), ["cpu"], max_batch=3, max_wait_ms=2000) as predict:
        futures = [predict.submit(ids, **own) for ids, own in requests]
        with pytest.raises(ConnectionError, match="gone"):
            futures[1].result(60)
        answers = [futures[index].result(60)[0].tolist() for index in (0, 2)]
        assert predict.stats()[0].retries == 0
        assert batches(predict) == 1
    assert [streams[0].tokens, streams[2].tokens] == answers
    assert [each.ends for each in streams] == [1, 1, 1]


def test_a_sampled_stream_is_no_mixture_of_two_texts():
    """The batch fails and is answered again, with other random numbers."""
    net = made("llama")
    calls, forward = [], net.forward

    def forward_of_call(*args, **kwargs):
        calls.append(args)
        if len(calls) == 10:
            raise ValueError("no")
        return forward(*args, **kwargs)

    net.forward = forward_of_call
    options = {"max_new_tokens": 9, "eos_token_id": None, "do_sample": True}
    stream = Stream()
    with Predictor(Generation(net), ["cpu"], max_batch=2, max_wait_ms=2000) as predict:
        streamed = predict.submit(torch.tensor([[9, 10]]), streamer=stream, **options)
        other = predict.submit(torch.tensor([[11]]), **options)
        assert other.result(60).shape == (1, 10)
        with pytest.raises(RuntimeError, match="would not go on as it was streamed"):
            streamed.result(60)
    assert 2 < len(stream.tokens) < 11
    assert stream.ends == 1


def test_a_stream_ends_with_a_request_that_fails():
    net = made("llama")
    streams = [Stream(), Stream()]
    with Predictor(Generation(net), ["cpu"]) as predict:
        for stream, more in zip(streams, ({}, {"num_beams": 1, "stop_strings": ["w"]}), strict=True):
            with warnings.catch_warnings(action="ignore"), pytest.raises((IndexError, ValueError)):
                predict(torch.tensor([[99]]), max_new_tokens=2, streamer=stream, **more)
    assert [stream.ends for stream in streams] == [1, 1]


ALONE = {
    "beams": ({"num_beams": 3}, "num_beams"),
    "repetition": ({"repetition_penalty": 1.3}, "repetition_penalty"),
    "no limit": ({"max_new_tokens": None}, "no max_new_tokens"),
    "inputs": ({"position_ids": torch.arange(3)[None]}, "position_ids"),
    "padding among bad words": ({"bad_words_ids": [[PAD, 9, 10]]}, "bad_words_ids"),
}


@pytest.mark.parametrize("case", ALONE)
def test_what_may_see_others_is_answered_alone(case):
    """And says so once, at the line that asks."""
    options, reason = ALONE[case]
    net = made("llama")
    requests = [(torch.tensor([[9 + index, 10, 11]]), {"max_new_tokens": 6} | options) for index in range(4)]
    wanted = [net.generate(ids, **GREEDY, **own) for ids, own in requests]
    with (
        warnings.catch_warnings(record=True, action="always") as told,
        Predictor(Generation(net), ["cpu"], max_batch=4, max_wait_ms=50) as predict,
    ):
        found = asked(predict, requests)
        assert batches(predict) == 4
    assert all(map(torch.equal, found, wanted))
    texts = [each for each in told if "answered one at a time" in str(each.message)]
    assert [reason in str(each.message) for each in texts] == [True]
    assert texts[0].filename == __file__


class SeesPadding(transformers.LlamaForCausalLM):
    """Leaves the mask out, as a model does that has none."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        return super().forward(input_ids, **kwargs)


def test_a_model_that_sees_the_padding():
    net = made("llama")
    net.__class__ = SeesPadding
    requests = [(ids, {"max_new_tokens": 6}) for ids in prompts(8)]
    wanted = [net.generate(ids, **GREEDY, **own) for ids, own in requests]
    with Predictor(Generation(net), ["cpu"], max_batch=8, max_wait_ms=2000) as predict:
        with pytest.warns(RuntimeWarning, match="SeesPadding gives a prompt other scores beside others"):
            found = asked(predict, requests)
        assert batches(predict) == 1
        found += asked(predict, requests)
        assert batches(predict) == 1 + 8
    assert all(map(torch.equal, found, wanted * 2))


@pytest.mark.parametrize("ranks", [1, 2])
def test_batches_that_wait_while_such_a_model_is_found(ranks):
    net = made("llama")
    net.__class__ = SeesPadding
    requests = [(ids, {"max_new_tokens": 3 + index % 5}) for index, ids in enumerate(prompts(24))]
    wanted = [net.generate(ids, **GREEDY, **own) for ids, own in requests]
    with (
        Predictor(Generation(net), ["cpu"] * ranks, max_batch=4, max_wait_ms=500) as predict,
        pytest.warns(RuntimeWarning, match="SeesPadding gives a prompt other scores beside others"),
    ):
        found = asked(predict, requests)
    assert all(map(torch.equal, found, wanted))


def test_a_batch_that_is_longer_than_the_positions():
    """Each fits alone: a long prompt with a short text, and the other way round."""
    net = made("gpt2")
    requests = [(torch.arange(8, 28)[None], {"max_new_tokens": 3}), (torch.tensor([[9]]), {"max_new_tokens": 20})]
    options = {"eos_token_id": None, "pad_token_id": PAD}
    wanted = [net.generate(ids, **GREEDY, **own, **options) for ids, own in requests]
    with Predictor(Generation(net), ["cpu"], max_batch=2, max_wait_ms=2000) as predict:
        found = asked(predict, requests, **options)
        assert batches(predict) == 1
    assert all(map(torch.equal, found, wanted))


def test_parts_of_a_placed_model():
    net = made("llama")
    requests = [(ids, {"max_new_tokens": 6}) for ids in prompts(8)]
    wanted = [net.generate(ids, **GREEDY, **own) for ids, own in requests]
    with Predictor(Generation(place(net, ["cpu"] * 2)), in_flight=2, max_batch=4, max_wait_ms=2000) as predict:
        assert all(map(torch.equal, asked(predict, requests), wanted))
        assert batches(predict) == 2


def test_what_cannot_be():
    net = made("llama")
    with pytest.raises(TypeError, match="Linear has no generate of transformers"):
        Generation(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="says itself how requests are joined"):
        Predictor(Generation(net), ["cpu"], split=lambda outputs, calls: outputs)
    with pytest.warns(UserWarning, match=r"Predictor\(mgpu_core.integrations.transformers.Generation"):
        Predictor(net, ["cpu"], method="generate").close()
