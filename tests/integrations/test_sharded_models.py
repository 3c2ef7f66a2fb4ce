"""Models with their parameters in shards: five steps are those of one device, also with checkpoints and adapters."""

import copy
import warnings

import pytest
import torch
from fakes.nets import cpu
from torch import nn

from mgpu_core import TrainStep
from mgpu_core.optim import AdamW

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

ROWS, STEPS = 8, 5
GENERATOR = torch.Generator("cpu").manual_seed(0)
HOST = {"generator": GENERATOR, "device": "cpu"}
IDS = torch.randint(3, 97, (STEPS, ROWS, 9), **HOST)
IMAGES = torch.randn(STEPS, ROWS, 3, 16, 16, **HOST, dtype=torch.float64)
CLASSES = torch.randint(0, 3, (STEPS, ROWS), **HOST)
SIZES = {"hidden_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4}
TEXT = {**SIZES, "intermediate_size": 96, "vocab_size": 97, "pad_token_id": 0}
DECODER = {**TEXT, "num_key_value_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def mixtral():
    config = transformers.MixtralConfig(**DECODER, num_local_experts=4, output_router_logits=False)
    net = transformers.MixtralForCausalLM(config)
    net.set_experts_implementation("eager")
    return net


def gpt2():
    quiet = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
    config = transformers.GPT2Config(n_embd=48, n_layer=6, n_head=4, vocab_size=97, n_positions=32, **quiet)
    return transformers.GPT2LMHeadModel(config)


def t5():
    config = {"num_layers": 3, "num_heads": 4, "d_model": 48, "d_ff": 96, "d_kv": 12, "vocab_size": 97}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**config, decoder_start_token_id=0, dropout_rate=0)
    )


def bart():
    layers = {"encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"d_model": 48, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "vocab_size": 97}
    config = transformers.BartConfig(**layers, **sizes, dropout=0.0, max_position_embeddings=64)
    return transformers.BartForConditionalGeneration(config)


def opt():
    config = {**SIZES, "word_embed_proj_dim": 48, "ffn_dim": 96, "vocab_size": 97, "max_position_embeddings": 64}
    return transformers.OPTForCausalLM(transformers.OPTConfig(**config, dropout=0.0, attention_dropout=0.0))


def albert(groups):
    config = {**TEXT, "embedding_size": 24, "num_hidden_groups": groups}
    return transformers.AlbertForMaskedLM(transformers.AlbertConfig(**config, **NO_DROPOUT))


def vit():
    config = {**SIZES, "intermediate_size": 96, "image_size": 16, "patch_size": 4, "num_labels": 3}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**config, **NO_DROPOUT))


MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER)),
    "tied": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER, tie_word_embeddings=True)),
    "phi": lambda: transformers.PhiForCausalLM(transformers.PhiConfig(**DECODER)),
    "neox": lambda: transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(**TEXT, hidden_dropout=0.0, attention_dropout=0.0)
    ),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**DECODER)),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**TEXT, **NO_DROPOUT)),
    "gpt2": gpt2,
    "t5": t5,
    "bart": bart,
    "opt": opt,
    "vit": vit,
    "mixtral": mixtral,
    "albert": lambda: albert(1),
    "albert of two": lambda: albert(2),
}
WAYS = ("plain", "checkpoint", "reentrant", "lora", "frozen")
ADAPTED = {"gpt2": ["c_attn"], "t5": ["q", "v"], "neox": ["query_key_value"], "llama": None}


def made(name, way):
    torch.manual_seed(0)
    net = MODELS[name]()
    net = net.double().train()
    net.config.use_cache = False
    if way == "lora":
        peft = pytest.importorskip("peft")
        net = peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=ADAPTED[name], init_lora_weights=False))
        net = net.double()
    if way in ("checkpoint", "reentrant"):
        if not net.supports_gradient_checkpointing:
            pytest.skip("it has no checkpoints")
        net.gradient_checkpointing_enable({"use_reentrant": way == "reentrant"})
        if way == "reentrant" and name != "vit":
            net.enable_input_require_grads()
    if way == "frozen":
        for number, each in enumerate(net.parameters()):
            each.requires_grad_(number % 3 != 1)
    return net


def batch(name, step):
    if name == "vit":
        return {"pixel_values": IMAGES[step]}, CLASSES[step]
    if name in ("t5", "bart"):
        return {"input_ids": IDS[step], "decoder_input_ids": IDS[step].flip(1)}, IDS[step]
    return {"input_ids": IDS[step]}, IDS[step]


def loss_of(output, target):
    """In float64: the models' own losses are computed in float32."""
    return nn.functional.cross_entropy(output.logits.flatten(0, -2), target.flatten())


def trained(net):
    return [each for each in net.parameters() if each.requires_grad]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_five_steps_are_those_of_one_device(name, way, ranks):
    if way == "lora" and name not in ADAPTED:
        pytest.skip("adapters are on four families")
    net = made(name, way)
    one = copy.deepcopy(net)
    devices, where = cpu(ranks), next(one.parameters()).device
    step = TrainStep(net, loss_of, AdamW(trained(net), lr=1e-2), devices, shard="parameters", bucket_nbytes=1)
    optimizer = torch.optim.AdamW(trained(one), lr=1e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*(use_reentrant|requires_grad=True|lr_scheduler|attention mask)")
        for number in range(STEPS):
            inputs, target = batch(name, number)
            loss = step(target, **inputs)
            optimizer.zero_grad()
            wanted = loss_of(one(**{key: each.to(where) for key, each in inputs.items()}), target.to(where))
            wanted.backward()
            optimizer.step()
            assert float(loss) == pytest.approx(float(wanted), rel=1e-9)
    with step.full_parameters():
        for (path, mine), theirs in zip(net.named_parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=0, atol=1e-9, msg=path)
