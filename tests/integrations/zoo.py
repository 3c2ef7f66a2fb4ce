"""75 architectures, tiny and random: a row each has what builds it, its inputs, and what is not as on one device.

Nets are in float64, in eval mode without noise (batch norm counts), and made on the CPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

ROWS = 4
_HOST = {"generator": torch.Generator("cpu").manual_seed(0), "device": "cpu"}
IDS = torch.randint(3, 60, (ROWS, 8), **_HOST)
IMAGES = torch.randn(ROWS, 3, 32, 32, **_HOST, dtype=torch.float64)
MASKS = torch.randint(0, 5, (ROWS, 32, 32), **_HOST)
CLASSES = MASKS[:, 0, 0]
IMAGE_TOKEN = 63
WITH_IMAGE = torch.cat([torch.full_like(IDS[:, :4], IMAGE_TOKEN), IDS[:, 4:]], 1)  # an image has four tokens

TEXT = {"input_ids": IDS}
TEXT_LABELS = {"labels": IDS}
PICTURE = {"pixel_values": IMAGES}
X = {"x": IMAGES}
GENERATE = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {**SMALL, **TOKENS, "num_key_value_heads": 2, "max_position_embeddings": 64}
VISION = {**SMALL, "image_size": 32, "patch_size": 16}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SEQ2SEQ = {
    f"{part}_{name}": size
    for part in ("encoder", "decoder")
    for name, size in {"layers": 3, "attention_heads": 2, "ffn_dim": 48}.items()
}
SLIDING = ["sliding_attention", "full_attention"] * 2


_PATCHES = {  # rows of patches are no rows of the batch
    "pipeline": (ValueError, "differ in their number of rows"),
    "predictor": (ValueError, "differ in their number of rows"),
}


_NOTHING: Any = {}


class Row(NamedTuple):
    """An architecture."""

    make: Callable[[], nn.Module]
    inputs: dict[str, torch.Tensor]
    labels: dict[str, Any] = _NOTHING  # of a training step; none: the loss is a mean of the outputs' squares
    beside: dict[str, torch.Tensor] = _NOTHING  # of a forward, and not of generate
    package: str = "transformers"
    generate: bool = False
    within: float = 1e-9
    dtype: torch.dtype = torch.float64
    unlike: dict[str, tuple[type[Exception], str]] = _NOTHING  # what a column raises, and words of it


def hf(name: str, **config: Any) -> nn.Module:
    """Return a class of transformers, with a configuration of the class that it names."""
    made = getattr(importlib.import_module("transformers"), name)
    net = made(made.config_class(**config))
    if hasattr(net, "set_experts_implementation"):
        net.set_experts_implementation("eager")
    return net


def config(name: str, **options: Any) -> Any:
    return getattr(importlib.import_module("transformers"), f"{name}Config")(**options)


def lm(kind: str, *, labels: dict[str, Any] = TEXT_LABELS, **options: Any) -> Row:
    """Return the row of a causal language model."""
    make = lambda: hf(f"{kind}ForCausalLM", **DECODER | options)  # noqa: E731
    return Row(make, TEXT, labels, generate=True)


def of(path: str, inputs: dict[str, torch.Tensor], **options: Any) -> Row:
    """Return the row of what a function or class of another package makes."""
    module, _, name = path.rpartition(".")
    made = lambda: getattr(importlib.import_module(module), name)(**options)  # noqa: E731
    return Row(made, inputs, package=module.partition(".")[0])


def vlm(name: str, inputs: dict[str, torch.Tensor], **options: Any) -> Row:
    """Return the row of a model of text and images."""
    return Row(lambda: hf(f"{name}ForConditionalGeneration", **options), inputs, TEXT_LABELS, generate=True)


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(ROWS, *shape, **_HOST, dtype=torch.float64)


class Flux(nn.Module):
    """The ids of positions have no rows."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"attention_head_dim": 16, "num_attention_heads": 2, "axes_dims_rope": (4, 4, 8)}
        self.net = importlib.import_module("diffusers").FluxTransformer2DModel(
            **sizes, patch_size=1, in_channels=4, num_layers=2, num_single_layers=2, joint_attention_dim=32,
            pooled_projection_dim=32,
        )  # fmt: skip

    def forward(self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, **others: Any) -> Any:
        ids = {"img_ids": hidden_states, "txt_ids": encoder_hidden_states}
        places = {name: torch.arange(of.size(1), device=of.device)[:, None].repeat(1, 3) for name, of in ids.items()}
        return self.net(hidden_states, encoder_hidden_states, **others, **places)


def _llava() -> nn.Module:
    parts = {"vision_config": config("CLIPVision", **VISION), "text_config": config("Llama", **DECODER)}
    return hf("LlavaForConditionalGeneration", **parts, image_token_id=IMAGE_TOKEN)


def _mamba(**names: Any) -> dict[str, Any]:
    return {f"mamba_{name}": size for name, size in names.items()}


_MLA = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1,
}  # fmt: skip
_PER_LAYER = {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2}
_GEMMA = {"head_dim": 8, "sliding_window": 4}
_SSM = _mamba(n_heads=4, d_head=16, d_state=8, chunk_size=4, expand=2)
_OLD = {"n_layer": 4, "n_head": 4}
_SPEECH = {
    "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2, "num_labels": 5, "classifier_proj_size": 16,
}  # fmt: skip
_SOUND = {"input_values": IMAGES.flatten(1)[:, :400].contiguous()}

CAUSAL = {
    "falcon": lm("Falcon"),
    "falcon_alibi": lm("Falcon", alibi=True),
    "bloom": lm("Bloom", **_OLD),
    "mpt": lm("Mpt", d_model=32, n_heads=4, n_layers=4, max_seq_len=64, expansion_ratio=2),
    "deepseek_v2": lm("DeepseekV2", **_MLA),
    "deepseek_v3": lm("DeepseekV3", **_MLA),
    "qwen3_moe": lm("Qwen3Moe", head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "qwen3_next": lm(
        "Qwen3Next", head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2,
        linear_num_value_heads=4, layer_types=["linear_attention", "full_attention"] * 2,
    ),
    "gpt_oss": lm("GptOss", head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=4),
    "gemma2": lm("Gemma2", **_GEMMA),
    "gemma3_text": Row(
        lambda: hf("Gemma3ForCausalLM", **DECODER | _GEMMA | {"layer_types": SLIDING}), TEXT, TEXT_LABELS, generate=True
    ),
    "gemma3n_text": lm(
        "Gemma3n", **_GEMMA, **_PER_LAYER, laurel_rank=4, layer_types=SLIDING, intermediate_size=[48] * 4,
        activation_sparsity_pattern=[0.0] * 4, altup_num_inputs=2,
    ),
    "mamba": lm("Mamba", state_size=8),
    "mamba2": lm("Mamba2", state_size=8, num_heads=4, head_dim=16, n_groups=2, chunk_size=4),
    "jamba": lm(
        "Jamba", num_experts=4, num_experts_per_tok=2, attn_layer_period=2, attn_layer_offset=1,
        use_mamba_kernels=False,
        **_mamba(d_state=8, dt_rank=4),
    ),
    "falcon_h1": lm("FalconH1", **_SSM, **_mamba(d_ssm=64)),
    "cohere2": lm("Cohere2", sliding_window=4, layer_types=SLIDING),
    "olmoe": lm("Olmoe", num_experts=4, num_experts_per_tok=2),
    "phimoe": lm("Phimoe", num_local_experts=4, num_experts_per_tok=2),
    "gpt_neox": lm("GPTNeoX"),
    "gptj": lm("GPTJ", n_embd=32, n_positions=64, rotary_dim=4, **_OLD),
    "opt": lm("OPT", ffn_dim=48, word_embed_proj_dim=32),
    "recurrent_gemma": lm(
        "RecurrentGemma", lru_width=32, attention_window_size=4, block_types=("recurrent", "attention")
    ),
    "rwkv": lm(
        "Rwkv", attention_hidden_size=32, context_length=64, labels={"labels": IDS, "use_cache": False}
    )._replace(
        unlike={"predictor": (RuntimeError, "writes its parameter")}  # it scales weights in evaluation
    ),
    "llama4_text": lm("Llama4", head_dim=8, num_local_experts=4, intermediate_size_mlp=48, attention_chunk_size=4),
    "glm4": lm("Glm4", head_dim=8),
    "starcoder2": lm("Starcoder2"),
    "phi": lm("Phi"),
    "xlnet": Row(
        lambda: hf("XLNetLMHeadModel", d_model=32, d_inner=48, **_OLD, **TOKENS), TEXT, TEXT_LABELS, generate=True,
        dtype=torch.float32, within=1e-5,  # its own code makes positions in float32
    ),
    "ernie4_5": lm("Ernie4_5", head_dim=8),
    "granitemoe": lm("GraniteMoe", num_local_experts=4, num_experts_per_tok=2),
    "minimax": lm("MiniMax", head_dim=8, num_local_experts=4, block_size=4),
    "bamba": lm("Bamba", attn_layer_indices=[1, 3], **_SSM),
    "zamba2": lm(
        "Zamba2", **_mamba(d_state=8, ngroups=1), n_mamba_heads=4, chunk_size=4, num_mem_blocks=1,
        layers_block_type=["mamba", "hybrid"] * 2, use_mamba_kernels=False, adapter_rank=4,
    ),
    "gemma4_text": lm("Gemma4", **_GEMMA, **_PER_LAYER, global_head_dim=8, layer_types=SLIDING),
}  # fmt: skip

_CLASSIFIED = {**SMALL, **TOKENS, **NO_DROPOUT, "max_position_embeddings": 64, "num_labels": 5}
ENCODERS = {
    "modernbert": Row(
        lambda: hf(
            "ModernBertForMaskedLM", **SMALL, **TOKENS, cls_token_id=1, sep_token_id=2, local_attention=4
        ), TEXT, TEXT_LABELS,
    ),
    "deberta_v2": Row(
        lambda: hf(
            "DebertaV2ForSequenceClassification", **_CLASSIFIED, relative_attention=True, pos_att_type=["c2p", "p2c"]
        ), TEXT, {"labels": CLASSES},
    ),
    "roberta_cls": Row(lambda: hf("RobertaForSequenceClassification", **_CLASSIFIED), TEXT, {"labels": CLASSES}),
    "longformer": Row(
        lambda: hf("LongformerForSequenceClassification", **_CLASSIFIED, attention_window=[4] * 4),
        TEXT, {"labels": CLASSES},
    ),
    "bigbird": Row(
        lambda: hf("BigBirdForSequenceClassification", **_CLASSIFIED, attention_type="original_full"),
        TEXT, {"labels": CLASSES},
    ),
}  # fmt: skip

_SEQ2SEQ = {**SEQ2SEQ, "d_model": 32, "max_position_embeddings": 64, "decoder_start_token_id": 0}
_DECODED = {"decoder_input_ids": IDS}
BOTH = {
    "whisper": Row(
        lambda: hf(
            "WhisperForConditionalGeneration", **_SEQ2SEQ, **TOKENS, num_mel_bins=8, max_source_positions=16,
            max_target_positions=32, begin_suppress_tokens=None,
        ), {"input_features": _noise(8, 32)}, TEXT_LABELS, _DECODED, generate=True,
    ),
    "marian": Row(lambda: hf("MarianMTModel", **_SEQ2SEQ, **TOKENS), TEXT, TEXT_LABELS, _DECODED, generate=True),
    "t5gemma": Row(
        lambda: hf(
            "T5GemmaForConditionalGeneration", vocab_size=64,
            **{part: DECODER | _GEMMA | {"layer_types": SLIDING} for part in ("encoder", "decoder")},
        ), TEXT, TEXT_LABELS, _DECODED, generate=True,
    ),
}  # fmt: skip

_IS_IMAGE = (WITH_IMAGE == IMAGE_TOKEN).long()
_GRIDS = torch.tensor([[1, 4, 4]] * ROWS, device="cpu")
VLMS = {
    "llava": Row(_llava, {"input_ids": WITH_IMAGE, **PICTURE}, TEXT_LABELS, generate=True),
    "qwen2_vl": vlm(
        "Qwen2VL",
        {
            "input_ids": WITH_IMAGE, "pixel_values": _noise(16, 96).flatten(0, 1), "image_grid_thw": _GRIDS,
            "mm_token_type_ids": _IS_IMAGE,
        },
        text_config={
            **DECODER, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        },
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4},
        image_token_id=IMAGE_TOKEN, video_token_id=62, vision_start_token_id=61, vision_end_token_id=60,
    )._replace(unlike=_PATCHES),
    "gemma3_vlm": vlm(
        "Gemma3", {"input_ids": WITH_IMAGE, "token_type_ids": _IS_IMAGE, **PICTURE},
        text_config={**DECODER, **_GEMMA, "layer_types": SLIDING}, vision_config={**VISION, "patch_size": 8},
        mm_tokens_per_image=4, image_token_index=IMAGE_TOKEN,
    ),
    "idefics3": vlm(
        "Idefics3", {"input_ids": WITH_IMAGE, "pixel_values": IMAGES[:, None]},
        text_config={"model_type": "llama", **DECODER}, vision_config={**VISION, "patch_size": 8},
        image_token_id=IMAGE_TOKEN, scale_factor=2,
    ),
    "blip2": vlm(
        "Blip2", {"input_ids": WITH_IMAGE, **PICTURE}, vision_config=VISION, num_query_tokens=4,
        text_config={"model_type": "opt", **DECODER, "ffn_dim": 48, "word_embed_proj_dim": 32},
        qformer_config={**SMALL, "vocab_size": 64, "encoder_hidden_size": 32}, image_token_index=IMAGE_TOKEN,
    ),
}  # fmt: skip

_SEGMENTS = {"labels": MASKS}
_SWIN = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [1, 2, 1, 1],
    "num_heads": [1, 2, 2, 2],
    "window_size": 2,
}
_RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1] * 4}
IMAGED = {
    "segformer": Row(
        lambda: hf(
            "SegformerForSemanticSegmentation", depths=[1] * 4, hidden_sizes=[8, 16, 16, 32],
            num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=16, num_labels=5, drop_path_rate=0.0,
        ), PICTURE, _SEGMENTS,
    ),
    "detr": Row(
        lambda: hf(
            "DetrForObjectDetection", **SEQ2SEQ, d_model=32, num_queries=6, num_labels=5,
            backbone_config={**_RESNET, "out_features": ["stage4"]},
        ), PICTURE,
    ),
    "mask2former": Row(
        lambda: hf(
            "Mask2FormerForUniversalSegmentation", feature_size=32, mask_feature_size=32, hidden_dim=32, num_queries=6,
            encoder_feedforward_dim=16, dim_feedforward=16, encoder_layers=2, decoder_layers=3, num_attention_heads=2,
            num_labels=5, backbone_config={
                "model_type": "swin", **_SWIN, "out_features": ["stage1", "stage2", "stage3", "stage4"]
            },
        ), PICTURE,
    ),
    "swin": Row(lambda: hf("SwinForImageClassification", **_SWIN, num_labels=5), PICTURE, {"labels": CLASSES}),
    "convnext": Row(
        lambda: hf("ConvNextForImageClassification", hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 2, 1], num_labels=5),
        PICTURE, {"labels": CLASSES},
    ),
    "sam": Row(
        lambda: hf(
            "SamModel", vision_config={**VISION, "patch_size": 8, "output_channels": 16, "global_attn_indexes": [1, 3],
            "window_size": 2, "num_pos_feats": 8,
        },
            prompt_encoder_config={"hidden_size": 16, "image_size": 32, "patch_size": 8, "mask_input_channels": 4},
            mask_decoder_config={"hidden_size": 16, "mlp_dim": 24, "num_attention_heads": 2, "iou_head_hidden_dim": 16},
        ), {**PICTURE, "input_points": _noise(1, 2, 2).abs() * 8},
    ),
    "dpt": Row(
        lambda: hf(
            "DPTForSemanticSegmentation", **VISION | {"patch_size": 8}, backbone_out_indices=[0, 1, 2, 3],
            neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=16, num_labels=5,
        ), PICTURE, _SEGMENTS,
    ),
    "clipseg": Row(
        lambda: hf(
            "CLIPSegForImageSegmentation", projection_dim=16, extract_layers=[0, 1, 2], reduce_dim=16,
            decoder_num_attention_heads=2, decoder_intermediate_size=32, vision_config={**VISION, "patch_size": 8},
            text_config={**SMALL, "vocab_size": 64, "max_position_embeddings": 16, "eos_token_id": 2},
        ), {**TEXT, **PICTURE}, {"labels": (MASKS > 2).double()},
    ),
}  # fmt: skip

SPEECH = {
    "wav2vec2": Row(lambda: hf("Wav2Vec2ForSequenceClassification", **SMALL, **_SPEECH), _SOUND, {"labels": CLASSES}),
    "wav2vec2_wls": Row(
        lambda: hf("Wav2Vec2ForSequenceClassification", **SMALL, **_SPEECH, use_weighted_layer_sum=True),
        _SOUND, {"labels": CLASSES},
    ),
}  # fmt: skip

_TIMES = torch.tensor([1.0, 20.0, 300.0, 40.0], device="cpu", dtype=torch.float64)
DIFFUSION = {
    "unet2d_cond": of(
        "diffusers.UNet2DConditionModel",
        {"sample": _noise(4, 8, 8), "timestep": _TIMES, "encoder_hidden_states": _noise(5, 16)},
        sample_size=8, block_out_channels=(16, 32), layers_per_block=1, cross_attention_dim=16, norm_num_groups=8,
        attention_head_dim=4, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ),
    "dit": of(
        "diffusers.DiTTransformer2DModel",
        {"hidden_states": _noise(4, 8, 8), "timestep": _TIMES.long(), "class_labels": CLASSES},
        num_attention_heads=2, attention_head_dim=16, in_channels=4, num_layers=3, sample_size=8, norm_num_groups=8,
        num_embeds_ada_norm=10,
    ),
    "flux": Row(
        Flux, {
            "hidden_states": _noise(16, 4), "encoder_hidden_states": _noise(5, 32), "pooled_projections": _noise(32),
            "timestep": _TIMES / 1000,
        }, package="diffusers",
    ),
    "vae": of(
        "diffusers.AutoencoderKL", {"sample": IMAGES}, block_out_channels=(8, 16), norm_num_groups=4, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    ),
}  # fmt: skip

TORCHVISION = {
    "tv_googlenet": of("torchvision.models.googlenet", X, num_classes=5, aux_logits=False, init_weights=False),
    "tv_densenet121": of("torchvision.models.DenseNet", X, num_classes=5, growth_rate=4, block_config=(2, 3, 4, 2)),
    "tv_efficientnet_b0": of("torchvision.models.efficientnet_b0", X, num_classes=5),
    "tv_vit_b_16": of(
        "torchvision.models.VisionTransformer", X, num_classes=5, image_size=32, patch_size=16, num_layers=4,
        num_heads=2, hidden_dim=32, mlp_dim=48,
    ),
    "tv_deeplab": of("torchvision.models.segmentation.deeplabv3_resnet50", X, num_classes=5, weights_backbone=None),
    "tv_convnext_tiny": of("torchvision.models.convnext_tiny", X, num_classes=5),
}  # fmt: skip

_TIMM = {"img_size": 32, "num_classes": 5}
_TIMM_VIT = {**_TIMM, "embed_dim": 32, "depth": 4}
TIMM = {
    "timm_deit": of("timm.create_model", X, model_name="deit_tiny_distilled_patch16_224", **_TIMM_VIT, num_heads=2),
    "timm_maxvit": of("timm.create_model", X, model_name="maxvit_rmlp_pico_rw_256", **_TIMM),
    "timm_regnety": of("timm.create_model", X, model_name="regnety_002", num_classes=5),
    "timm_mixer": of("timm.models.MlpMixer", X, **_TIMM, patch_size=16, embed_dim=32, num_blocks=4),
    "timm_eva02": of(
        "timm.create_model", X, model_name="eva02_tiny_patch14_224", **_TIMM_VIT, num_heads=2, patch_size=16
    ),
    "timm_xcit": of("timm.create_model", X, model_name="xcit_nano_12_p16_224", **_TIMM_VIT),
    "timm_coatnet": of("timm.create_model", X, model_name="coatnet_pico_rw_224", **_TIMM),
}
ZOO = CAUSAL | ENCODERS | BOTH | VLMS | IMAGED | SPEECH | DIFFUSION | TORCHVISION | TIMM


def made(name: str) -> nn.Module:
    """Return the net of a row, the same for each call."""
    row = ZOO[name]
    pytest.importorskip(row.package)
    with torch.device("cpu"):
        torch.manual_seed(0)
        net = row.make().to(row.dtype).eval()
    for each in net.modules():
        if isinstance(each, _BatchNorm):
            each.train()
    return net
