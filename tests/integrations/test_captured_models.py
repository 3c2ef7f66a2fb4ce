"""Models that capture values of their layers by hooks, share caches between layers, or keep a state on them."""

import copy
import warnings

import pytest
import torch
from fakes.nets import cpu
from torch import nn

from mgpu_core import Pipeline, TrainStep, balance, place

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:the forward of RecurrentGemma")]
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

ROWS = 4
HOST = {"generator": torch.Generator("cpu").manual_seed(0), "device": "cpu"}
IDS = torch.randint(3, 60, (ROWS, 6), **HOST)
IMAGES = torch.randn(ROWS, 3, 32, 32, **HOST, dtype=torch.float64)
MASKS = torch.randint(0, 5, (ROWS, 32, 32), **HOST)
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
TEXT = {**SMALL, "num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0}
BOTH = ["sliding_attention", "full_attention"] * 2
TOKENS = {"input_ids": IDS, "labels": IDS}


def llava():
    vision = transformers.CLIPVisionConfig(**{**SMALL, "num_hidden_layers": 3}, image_size=32, patch_size=16)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=transformers.LlamaConfig(**TEXT), image_token_id=63
    )
    return transformers.LlavaForConditionalGeneration(config)


def segformer():
    return transformers.SegformerForSemanticSegmentation(
        transformers.SegformerConfig(
            depths=[1] * 4, hidden_sizes=[8, 16, 16, 32], num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=16,
            num_labels=5, classifier_dropout_prob=0.0, drop_path_rate=0.0,
        )
    )  # fmt: skip


def dpt():
    return transformers.DPTForSemanticSegmentation(
        transformers.DPTConfig(
            **SMALL, image_size=32, patch_size=8, backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 16, 16],
            fusion_hidden_size=16, num_labels=5, semantic_classifier_dropout=0.0,
        )
    )  # fmt: skip


def clipseg():
    text = {**SMALL, "vocab_size": 64, "max_position_embeddings": 16, "eos_token_id": 2}
    return transformers.CLIPSegForImageSegmentation(
        transformers.CLIPSegConfig(
            text_config=text, vision_config={**SMALL, "image_size": 32, "patch_size": 8}, projection_dim=16,
            extract_layers=[0, 1, 2], reduce_dim=16, decoder_num_attention_heads=2, decoder_intermediate_size=32,
        )
    )  # fmt: skip


def wav2vec2():
    return transformers.Wav2Vec2ForSequenceClassification(
        transformers.Wav2Vec2Config(
            **SMALL, conv_dim=(16, 16), conv_stride=(5, 2), conv_kernel=(10, 3), num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=2, use_weighted_layer_sum=True, num_labels=5, classifier_proj_size=16,
        )
    )  # fmt: skip


def mixtral():
    net = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**TEXT, num_local_experts=4, output_router_logits=True)
    )
    net.set_experts_implementation("eager")
    return net


def gemma3n():
    sizes = {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "laurel_rank": 4, "head_dim": 8}
    return transformers.Gemma3nForCausalLM(
        transformers.Gemma3nTextConfig(
            **{**TEXT, "intermediate_size": [48] * 4}, **sizes, num_kv_shared_layers=2, layer_types=BOTH,
            activation_sparsity_pattern=[0.0] * 4, sliding_window=8, altup_num_inputs=2,
        )
    )  # fmt: skip


def gemma4():
    sizes = {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "head_dim": 8, "global_head_dim": 8}
    config = transformers.Gemma4TextConfig(**TEXT, **sizes, num_kv_shared_layers=2, layer_types=BOTH, sliding_window=8)
    return transformers.Gemma4ForCausalLM(config)


def recurrent_gemma():
    state = {"lru_width": 32, "attention_window_size": 8, "block_types": ("recurrent", "attention")}
    return transformers.RecurrentGemmaForCausalLM(transformers.RecurrentGemmaConfig(**TEXT, **state))


def bart():
    both = {"layers": 3, "attention_heads": 2, "ffn_dim": 48}
    sizes = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in both.items()}
    config = transformers.BartConfig(d_model=32, vocab_size=64, max_position_embeddings=32, **sizes)
    return transformers.BartForConditionalGeneration(config)


WITH_IMAGES = torch.cat([torch.full_like(IDS[:, :4], 63), IDS[:, 4:]], 1)  # four patches
CASES = {
    "llava": (llava, {"input_ids": WITH_IMAGES, "pixel_values": IMAGES, "labels": IDS}),
    "segformer": (segformer, {"pixel_values": IMAGES, "labels": MASKS}),
    "dpt": (dpt, {"pixel_values": IMAGES, "labels": MASKS}),
    "clipseg": (clipseg, {"input_ids": IDS, "pixel_values": IMAGES, "labels": (MASKS > 2).double()}),
    "wav2vec2": (wav2vec2, {"input_values": IMAGES.flatten(1)[:, :400], "labels": MASKS[:, 0, 0]}),
    "mixtral": (mixtral, TOKENS),
    "gemma3n": (gemma3n, TOKENS),
    "gemma4": (gemma4, TOKENS),
    "recurrent_gemma": (recurrent_gemma, TOKENS),
    "bart": (bart, TOKENS),
}


def made(name):
    torch.manual_seed(0)
    return CASES[name][0]().double().eval()  # without dropout


def moved(batch, device):
    return {name: each.to(device) for name, each in batch.items()}


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_three_steps_are_those_of_micro_batches_one_after_the_other(name, stages):
    net, batch = made(name), moved(CASES[name][1], cpu(1)[0])
    alone = made(name).to(cpu(1)[0])
    step = TrainStep(Pipeline(net, cpu(stages), chunks=2), None, torch.optim.SGD(net.parameters(), lr=0.0))
    for _ in range(3):
        alone.zero_grad()
        total = 0.0
        for part in (0, 1):
            loss = alone(**{key: each.chunk(2)[part] for key, each in batch.items()}).loss / 2
            loss.backward()
            total += float(loss.detach())
        assert float(step(**batch)) == pytest.approx(total, rel=1e-6)  # some compute the loss in float32
        for (path, one), other in zip(net.named_parameters(), alone.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None), path
            assert one.grad is None or torch.allclose(one.grad.cpu(), other.grad.cpu(), rtol=0, atol=1e-7), path


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_a_placed_model_has_the_loss_of_one_device_where_the_inputs_are(name, stages):
    net, batch = made(name), moved(CASES[name][1], cpu(1)[0])
    wanted = float(net.to(cpu(1)[0])(**batch).loss)
    place(net, cpu(stages))
    with torch.no_grad():
        for _ in range(2):
            loss = net(**batch).loss
            assert loss.device == torch.device(cpu(1)[0])
            assert float(loss) == pytest.approx(wanted, rel=1e-6)


class Features(nn.Module):
    """The last layer but one, as many probes take it."""

    def __init__(self):
        super().__init__()
        self.bert = transformers.BertModel(transformers.BertConfig(**SMALL, vocab_size=64))

    def forward(self, ids):
        return self.bert(ids, output_hidden_states=True).hidden_states[-2]


@pytest.mark.parametrize("chunks", [1, 2])
def test_hidden_states_do_not_grow_with_calls(chunks):
    torch.manual_seed(0)
    net = Features().double().eval()
    whole = copy.deepcopy(net).to(cpu(1)[0])
    pipe, ids = Pipeline(net, cpu(2), chunks=chunks), IDS.to(cpu(1)[0])
    with torch.no_grad(), warnings.catch_warnings(action="error"):
        for _ in range(3):
            assert torch.allclose(pipe(ids).cpu(), whole(ids).cpu(), rtol=0, atol=1e-12)
    again = Pipeline(whole.bert, cpu(2), chunks=chunks)
    with torch.no_grad():
        assert [len(again(ids, output_hidden_states=True).hidden_states) for _ in range(3)] == [5] * 3


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_the_first_generate_of_a_placed_model(parts):
    config = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "ffn_dim": 48}
    torch.manual_seed(0)
    alone = transformers.OPTForCausalLM(
        transformers.OPTConfig(**config, vocab_size=101, word_embed_proj_dim=32, max_position_embeddings=64)
    ).eval()  # its layers are called in another order than that of their definition
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    wanted = alone.cpu().generate(IDS, **options)
    net = place(alone.to(cpu(1)[0]), cpu(parts))
    for _ in range(2):
        assert torch.equal(net.generate(IDS.to(cpu(1)[0]), **options).cpu(), wanted)


def test_a_static_cache_whose_prefill_comes_in_pieces():
    torch.manual_seed(0)
    net = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)).cpu().eval()
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "cache_implementation": "static"}
    wanted = net.generate(IDS, **options, prefill_chunk_size=3)
    place(net, cpu(2))
    assert torch.equal(net.generate(IDS.to(cpu(1)[0]), **options, prefill_chunk_size=3).cpu(), wanted)


@pytest.mark.parametrize("name", ["bart", "gemma3n", "mixtral"])
def test_balance_measures_models_with_their_caches(name):
    net, batch = made(name).to(cpu(1)[0]), moved(CASES[name][1], cpu(1)[0])
    assert len(balance(net, batch | {"use_cache": True}, 2).split) == 1
