"""Models of transformers, cut by the plans that they bring: all is that of the model alone."""

import copy
import gc
import os
import signal
import sys
import threading

import pytest
import torch

from mgpu_core import TensorParallel, TrainStep, parameters_on_meta

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

SMALL = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MODELS = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "gemma3": ("Gemma3", {"head_dim": 8}),
    "phi3": ("Phi3", {"num_key_value_heads": 2}),
    "olmo2": ("Olmo2", {"num_key_value_heads": 2}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
}
IDS = torch.randint(3, 101, (4, 9), generator=torch.Generator().manual_seed(1))
GENERATE = {"max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": 2}
RANKS = pytest.mark.parametrize("ranks", [1, 2, 4])


def made(name, **options):
    torch.manual_seed(0)
    kind, extra = MODELS[name]
    config = getattr(transformers, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")
    net = getattr(transformers, f"{kind}ForCausalLM")(config(**{**SMALL, **extra, **options}))
    if name == "mixtral":
        net.set_experts_implementation("eager")
    return net


def loss_of(net, ids=IDS):
    return net(input_ids=ids, labels=ids).loss


def grads_of(tp):
    """The gradients by the names of the model alone."""
    for each in tp.parameters():
        each.data, each.grad = each.grad.clone(), each.data
    found = tp.full_state_dict()
    for each in tp.parameters():
        each.data, each.grad = each.grad, each.data.clone()
    return found


def assert_same_grads(tp, alone, within):
    found = grads_of(tp)
    for name, each in alone.named_parameters():
        assert torch.allclose(found[name], each.grad, rtol=0, atol=within), name


@RANKS
@pytest.mark.parametrize("name", MODELS)
def test_outputs_gradients_and_five_steps(name, ranks):
    alone = made(name).double()
    tp = TensorParallel(copy.deepcopy(alone), ["cpu"] * ranks)
    assert torch.allclose(tp(input_ids=IDS).logits, alone(input_ids=IDS).logits, rtol=0, atol=1e-12)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (tp, alone)]
    for step in range(5):
        for net, optimizer in zip((tp, alone), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(net).backward()
        if not step:
            assert_same_grads(tp, alone, 1e-7)
        for optimizer in optimizers:
            optimizer.step()
    state = tp.full_state_dict()
    assert all(torch.allclose(state[key], each, rtol=0, atol=5e-6) for key, each in alone.state_dict().items())


@pytest.mark.parametrize("name", MODELS)
def test_in_float32_and_the_state_bit_for_bit(name):
    alone = made(name)
    tp = TensorParallel(copy.deepcopy(alone), ["cpu"] * 4)
    assert torch.allclose(tp(input_ids=IDS).logits, alone(input_ids=IDS).logits, rtol=0, atol=1e-4)
    state = tp.full_state_dict()
    assert list(state) == list(alone.state_dict())
    assert all(torch.equal(state[key], each) for key, each in alone.state_dict().items())
    whole = tp.uncut()
    assert torch.equal(whole(input_ids=IDS).logits, alone(input_ids=IDS).logits)


@RANKS
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "options", [{}, {"do_sample": True}, {"num_beams": 3}, {"num_beams": 3, "do_sample": True}], ids=str
)
def test_generate_token_for_token(name, ranks, options):
    alone = made(name).eval()
    tp = TensorParallel(copy.deepcopy(alone), ["cpu"] * ranks)
    found = []
    for generate in (lambda **given: tp.call("generate", IDS, **given), lambda **given: alone.generate(IDS, **given)):
        torch.manual_seed(3)
        found.append((generate(**GENERATE, **({"do_sample": False} | options)), torch.get_rng_state()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["llama", "phi3", "mixtral"])
def test_gradient_checkpointing(name, ranks):
    alone = made(name).double()
    tp = TensorParallel(copy.deepcopy(alone), ["cpu"] * ranks)
    tp.each(lambda net: net.gradient_checkpointing_enable())
    few = IDS[:2].flip(1)
    first, second = loss_of(tp), loss_of(tp, few)
    first.backward()
    loss_of(alone).backward()
    assert_same_grads(tp, alone, 1e-7)
    second.backward()
    loss_of(alone, few).backward()
    assert_same_grads(tp, alone, 2e-7)


@pytest.mark.parametrize("ranks", [2, 4])
def test_lora_around_planned_layers(ranks):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj", "down_proj", "lm_head"], init_lora_weights=False)
    alone = peft.get_peft_model(made("llama"), config).double()
    tp = TensorParallel(copy.deepcopy(alone), ["cpu"] * ranks)
    assert torch.allclose(tp(input_ids=IDS).logits, alone(input_ids=IDS).logits, rtol=0, atol=1e-6)
    for net in (tp, alone):
        loss_of(net).backward()
    trained = [each for each in tp.parameters() if each.grad is not None]
    assert (
        0
        < sum(each.numel() for each in trained)
        < 3 * sum(each.numel() for each in alone.parameters() if each.requires_grad)
    )
    whole = {name: each.grad for name, each in alone.named_parameters() if each.grad is not None}
    for each in tp._kept.values():
        if each.names[0] in whole:
            parts = [part.grad for part in each.parts]
            found = parts[0] if each.cut is None else each.cut.joined(parts)
            assert torch.allclose(found, whole[each.names[0]], rtol=0, atol=1e-7), each.names[0]
    alone.eval()
    tp.eval()
    options = {**GENERATE, "do_sample": False}
    assert torch.equal(tp.call("generate", input_ids=IDS, **options), alone.generate(input_ids=IDS, **options))


@pytest.mark.parametrize("kind", ["dora", "embedding"])
def test_adapters_that_cannot_be_cut_are_refused_by_name(kind):
    peft = pytest.importorskip("peft")
    target = ["embed_tokens"] if kind == "embedding" else ["q_proj"]
    net = peft.get_peft_model(made("llama"), peft.LoraConfig(target_modules=target, use_dora=kind == "dora"))
    with pytest.raises(ValueError, match=rf"{target[0]} is a .* of a kind that cannot be cut with its layer"):
        TensorParallel(net, ["cpu"] * 2)
    net(input_ids=IDS)


def test_a_cache_that_comes_back_and_one_of_the_users():
    alone = made("llama").eval()
    tp = TensorParallel(copy.deepcopy(alone), ["cpu"] * 2)
    for own in (None, transformers.DynamicCache):
        caches = [None if own is None else own() for _ in range(2)]
        with torch.no_grad():
            for ids in (IDS, IDS[:, :1], IDS[:, 1:3]):
                pair = []
                for index, net in enumerate((tp, alone)):
                    output = net(input_ids=ids, past_key_values=caches[index], use_cache=True)
                    caches[index] = output.past_key_values
                    pair.append(output.logits)
                assert torch.allclose(*pair, rtol=0, atol=1e-5)


class Streamer:
    def __init__(self):
        self.told, self.ends, self.lock = [], 0, threading.Lock()  # which cannot be copied

    def put(self, value):
        self.told.append(value.tolist())

    def end(self):
        self.ends += 1


class Half:
    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores / 2


class AfterFour(Half):
    def __call__(self, input_ids, scores):
        self.calls += 1
        return torch.full((len(input_ids),), self.calls == 4)


def test_the_users_objects_decide_on_rank_0():
    alone = made("llama").eval()
    tp = TensorParallel(copy.deepcopy(alone), ["cpu"] * 3, {"model.layers.*.mlp.gate_proj": "column_gathered"})
    found = []
    for generate in (lambda **given: tp.call("generate", IDS, **given), lambda **given: alone.generate(IDS, **given)):
        torch.manual_seed(0)
        processor, criterion = Half(), AfterFour()
        lists = {
            "logits_processor": transformers.LogitsProcessorList([processor]),
            "stopping_criteria": transformers.StoppingCriteriaList([criterion]),
        }
        found.append((generate(do_sample=True, **GENERATE, **lists), processor.calls, criterion.calls))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:] == (4, 4)
    streamers = Streamer(), Streamer()
    tp.call("generate", IDS[:1], streamer=streamers[0], do_sample=False, **GENERATE)
    alone.generate(IDS[:1], streamer=streamers[1], do_sample=False, **GENERATE)
    assert streamers[0].told == streamers[1].told
    assert streamers[0].ends == 1
    texts = tp.call("generate", IDS, max_time=0.2, max_new_tokens=10000, pad_token_id=0, eos_token_id=None)
    assert 9 < texts.shape[1] < 10000


def test_ctrl_c_inside_generate_and_an_error_in_one_rank():
    alone = made("llama").eval()
    tp = TensorParallel(copy.deepcopy(alone), ["cpu"] * 2)
    options = {**GENERATE, "do_sample": False}
    wanted, begun = tp.call("generate", IDS, **options), threading.Event()
    interrupt = threading.Thread(target=lambda: (begun.wait(60), os.kill(os.getpid(), signal.SIGINT)))
    handles = tp.each(lambda net: net.model.layers[1].register_forward_hook(lambda *_: begun.set()))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        tp.call("generate", IDS, max_new_tokens=3000, eos_token_id=None, pad_token_id=0)
    interrupt.join()
    for each in handles:
        each.remove()
    assert torch.equal(tp.call("generate", IDS, **options), wanted)


def test_a_train_step_and_weights_of_files(tmp_path):
    alone = made("llama-tied")
    alone.save_pretrained(tmp_path, max_shard_size="20KB")
    with parameters_on_meta():
        empty = made("llama-tied")
    tp = TensorParallel(empty, ["cpu"] * 2, weights=tmp_path)
    assert torch.allclose(tp(input_ids=IDS).logits, alone(input_ids=IDS).logits, rtol=0, atol=1e-5)
    step = TrainStep(tp, None, torch.optim.AdamW(tp.parameters(), lr=1e-3))
    losses = [step(input_ids=IDS, labels=IDS).item() for _ in range(3)]
    assert losses == sorted(losses, reverse=True)


def live_caches():
    return sum(isinstance(each, transformers.DynamicCache) for each in gc.get_objects())


def test_memory_and_threads_stay_flat():
    tp = TensorParallel(made("llama").eval(), ["cpu"] * 2)
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}

    def calls(count):
        for _ in range(4 * count):
            with torch.no_grad():
                tp(input_ids=IDS)
        for _ in range(count):
            tp.call("generate", IDS, **options)

    calls(10)
    gc.collect()
    threads, known = threading.active_count(), live_caches()
    calls(50)
    assert threading.active_count() <= threads
    gc.collect()
    assert live_caches() <= known


@pytest.mark.parametrize(
    ("options", "ranks", "message"),
    [
        ({"num_key_value_heads": 1}, 2, r"self_attn\.k_proj has 1 heads, which cannot be divided among 2 ranks"),
        ({}, 3, r"self_attn\.q_proj has 4 heads, which cannot be divided among 3 ranks"),
    ],
)
def test_heads_that_cannot_be_divided(options, ranks, message):
    net = made("llama", **options)
    with pytest.raises(ValueError, match=message):
        TensorParallel(net, ["cpu"] * ranks)
    net(input_ids=IDS)


def calls_of(work):
    """Return how many functions of Python and C this thread calls in it."""
    count = [0]

    def noted(frame, event, argument):
        count[0] += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(noted)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count[0]


def test_a_forward_makes_few_python_calls():
    alone = made("llama", num_hidden_layers=8).eval()
    tp = TensorParallel(copy.deepcopy(alone), ["cpu"] * 2)
    of_ranks = []

    def counted(forward):
        def call(*args, **kwargs):
            found = []
            of_ranks.append(calls_of(lambda: found.append(forward(*args, **kwargs))))
            return found[0]

        return call

    with torch.no_grad():
        for _ in range(3):
            tp(input_ids=IDS)
            alone(input_ids=IDS)
        plain = calls_of(lambda: alone(input_ids=IDS))
        tp.each(lambda net: net.__dict__.update(forward=counted(net.forward)))
        callers = calls_of(lambda: tp(input_ids=IDS))
    assert len(of_ranks) == 2
    assert sum(of_ranks) / 2 <= 1.3 * plain
    assert (callers + sum(of_ranks)) / 2 <= 1.5 * plain


def opt():
    options = {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 32}
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "pad_token_id")
    config = transformers.OPTConfig(**options, **{name: SMALL[name] for name in names})
    layers = {f"*.self_attn.{name}_proj": word for name, word in zip("qkv", ["column"] * 3, strict=True)}
    plan = {f"model.decoder.layers.{name}": word for name, word in (layers | {"*.self_attn.out_proj": "row"}).items()}
    return transformers.OPTForCausalLM(config), plan, lambda net: net(input_ids=IDS).logits


def dit():
    diffusers = pytest.importorskip("diffusers")
    sizes = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8, "patch_size": 2}
    net = diffusers.DiTTransformer2DModel(**sizes, in_channels=4, out_channels=4, num_embeds_ada_norm=10)
    x = torch.randn(2, 4, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plan = {f"transformer_blocks.*.attn1.to_{name}": "column" for name in "qkv"}
    labels = {"timestep": torch.tensor([3, 4]), "class_labels": torch.tensor([1, 2])}
    return net, plan | {"transformer_blocks.*.attn1.to_out.0": "row"}, lambda net: net(x, **labels)[0]


@pytest.mark.parametrize("kind", [opt, dit])
@pytest.mark.parametrize("ranks", [2, 4])
def test_models_that_count_their_heads_by_a_plan_of_the_user(kind, ranks):
    torch.manual_seed(0)
    net, plan, called = kind()
    alone = net.double().eval()
    tp = TensorParallel(copy.deepcopy(alone), ["cpu"] * ranks, plan)
    assert torch.allclose(called(tp), called(alone), rtol=0, atol=1e-12)
