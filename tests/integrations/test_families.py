"""Models without a plan of their own, cut by that of their family: outputs, a step, and the whole module back."""

import pytest
import torch
from integrations import zoo

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

from mgpu_core import TensorParallel  # noqa: E402
from mgpu_core.tensor_parallel.families import family_plan  # noqa: E402
from mgpu_core.trees.nested import tensors_in  # noqa: E402

OF_THE_ZOO = (
    *("bloom", "falcon", "falcon_alibi", "mpt", "opt", "recurrent_gemma", "deberta_v2", "roberta_cls", "longformer"),
    *("bigbird", "whisper", "marian", "blip2", "detr", "mask2former", "swin", "convnext", "sam", "dpt", "clipseg"),
    *("wav2vec2", "wav2vec2_wls", "unet2d_cond", "dit", "flux", "vae", "tv_vit_b_16", "tv_convnext_tiny"),
    *("timm_deit", "timm_maxvit", "timm_mixer", "timm_xcit"),
)

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {**SIZES, "intermediate_size": 48}
WORDS = {**WIDE, "vocab_size": 64}
PICTURE = {"image_size": 32, "patch_size": 8}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
HALVES = {
    **{f"{half}_{name}": size for half in ("encoder", "decoder") for name, size in (("layers", 2), ("ffn_dim", 48))},
    **{f"{half}_attention_heads": 4 for half in ("encoder", "decoder")},
    "vocab_size": 64,
    "d_model": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}
HUBERT = {
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}
TWO = {"text_config": {**WORDS, "max_position_embeddings": 64, "eos_token_id": 2}, "vision_config": {**WIDE, **PICTURE}}

IDS = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TEXT, BOTH = {"input_ids": IDS}, {"input_ids": IDS, "decoder_input_ids": IDS}
OTHERS = {
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}, TEXT),
    "t5": ("T5ForConditionalGeneration", T5, BOTH),
    "t5-gated": ("T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu"}, BOTH),
    "bert": ("BertForMaskedLM", WORDS, TEXT),
    "xlm-roberta": ("XLMRobertaForMaskedLM", WORDS, TEXT),
    "camembert": ("CamembertForMaskedLM", WORDS, TEXT),
    "electra": ("ElectraForMaskedLM", {**WORDS, "embedding_size": 32}, TEXT),
    "distilbert": (
        "DistilBertForMaskedLM", {"vocab_size": 64, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}, TEXT,
    ),
    "albert": ("AlbertForMaskedLM", {**WORDS, "embedding_size": 16}, TEXT),
    "bart": ("BartForConditionalGeneration", HALVES, BOTH),
    "mbart": ("MBartForConditionalGeneration", HALVES, BOTH),
    "m2m100": ("M2M100ForConditionalGeneration", HALVES, BOTH),
    "pegasus": ("PegasusForConditionalGeneration", HALVES, BOTH),
    "vit": ("ViTForImageClassification", {**WIDE, **PICTURE}, {"pixel_values": IMAGES}),
    "dinov2": ("Dinov2ForImageClassification", {**SIZES, **PICTURE, "mlp_ratio": 2}, {"pixel_values": IMAGES}),
    "clip": ("CLIPModel", {**TWO, "projection_dim": 16}, {**TEXT, "pixel_values": IMAGES}),
    "siglip": ("SiglipModel", TWO, {**TEXT, "pixel_values": IMAGES}),
    "hubert": ("HubertModel", {**WIDE, **HUBERT}, {"input_values": torch.randn(2, 400, dtype=torch.float64)}),
}  # fmt: skip


def made(name):
    """Return a net and its inputs, the same for each call."""
    if name in zoo.ZOO:
        return zoo.made(name), zoo.ZOO[name].inputs | zoo.ZOO[name].beside
    kind, options, inputs = OTHERS[name]
    torch.manual_seed(0)
    return zoo.hf(kind, **options).double().eval(), inputs


def floats(output):
    return [each for each in tensors_in(output) if each.is_floating_point()]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", [*OF_THE_ZOO, *OTHERS])
def test_a_step_of_a_family_is_that_of_one_device(name, ranks):
    alone, inputs = made(name)
    assert family_plan(alone, ranks)
    tp = TensorParallel(made(name)[0], ["cpu"] * ranks)
    outputs = [floats(net(**inputs)) for net in (tp, alone)]
    for one, other in zip(*outputs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9, equal_nan=True)
    for net, tensors in zip((tp, alone), outputs, strict=True):
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        sum(each.square().mean() for each in tensors if each.requires_grad).backward()
        optimizer.step()
    wanted = alone.state_dict()
    for key, value in tp.full_state_dict().items():
        torch.testing.assert_close(value, wanted[key], rtol=1e-6, atol=1e-9, msg=lambda text, key=key: f"{key}: {text}")
    whole = tp.uncut()
    for one, other in zip(floats(whole(**inputs)), floats(alone(**inputs)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7, equal_nan=True)  # some compute in float32


def test_a_block_with_other_layers_than_its_family_has():
    """Convolutions, which stay whole; heads of which some come from layers that the plan does not know."""
    timm = pytest.importorskip("timm")
    diffusers = pytest.importorskip("diffusers")
    net = torch.nn.Sequential(timm.layers.Mlp(8, 16, use_conv=True), timm.layers.Mlp(8, 16))
    assert family_plan(net, 2) == {"1.fc1": "column", "1.fc2": "row"}
    attention = {"query_dim": 32, "heads": 4, "dim_head": 8}
    for more, word in ({}, "column"), ({"added_kv_proj_dim": 32}, "column_gathered"):
        net = diffusers.models.attention_processor.Attention(**attention, **more)
        assert family_plan(net, 2)["to_q"] == word


def test_generate_by_the_plan_of_a_family():
    net, _ = made("gpt2")
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    wanted = net.generate(IDS, **options)
    assert torch.equal(TensorParallel(net, ["cpu"] * 2).call("generate", IDS, **options), wanted)


@pytest.mark.parametrize(
    ("name", "words"), [("tv_deeplab", "no linear layers to cut"), ("mamba", r"pass plan=, such as \{")]
)
def test_a_model_of_no_family_is_refused_with_what_can_be_done(name, words):
    with pytest.raises(ValueError, match=words):
        TensorParallel(zoo.made(name), ["cpu"] * 2)
