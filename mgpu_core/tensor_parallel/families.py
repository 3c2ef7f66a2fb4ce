"""Plans of model families that bring none: by the class of a module, its layers below and their words.

Each entry is a block whose outputs are whole: the first call of a :class:`mgpu_core.TensorParallel` compares it with
the same block uncut.  Attention of which a rank can have its own heads is cut by columns and a row; where all heads
share a bias, a cache of positions or one fused layer, its layers are gathered, or stay whole.
"""

from __future__ import annotations

from typing import Any

from torch.nn import Linear, Module

__all__ = ["HEAD_COUNTS", "family_plan", "heads_of", "is_transposed"]

_HEAD_SIZES = ("head_dim", "attention_head_size")  # attributes of attention modules

HEAD_COUNTS = (
    *("heads", "num_heads", "n_heads", "n_head", "nhead", "num_attention_heads"),
    *("kv_heads", "num_kv_heads", "n_kv_heads", "num_key_value_heads"),
)
"""Attributes of attention modules that say how many heads their layers have: each rank has its part of them."""

_PACKAGES = ("transformers", "diffusers", "timm", "torchvision")  # whose classes these are


def _attention(*columns: str, row: str) -> dict[str, str]:
    return dict.fromkeys(columns, "column") | {row: "row"}


_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_OUT_PROJ = _attention(*_PROJECTIONS, row="out_proj")
_O_PROJ = _attention(*_PROJECTIONS, row="o_proj")
_SELF = _attention("self.query", "self.key", "self.value", row="output.dense")
_FC = {"fc1": "column", "fc2": "row"}
_DENSE = {"intermediate.dense": "column", "output.dense": "row"}
_GATHERED = "column_gathered"

_BLOCKS: dict[str, dict[str, str]] = {
    # Decoders of text.
    "BloomMLP": {"dense_h_to_4h": "column", "dense_4h_to_h": "row"},
    "FalconAttention": {"query_key_value": _GATHERED, "dense": _GATHERED},
    "FalconMLP": {"dense_h_to_4h": _GATHERED, "dense_4h_to_h": _GATHERED},
    "GPT2Attention": {"c_attn": _GATHERED, "c_proj": _GATHERED},
    "GPT2MLP": {"c_fc": "column", "c_proj": "row"},
    "MptMLP": {"up_proj": "column", "down_proj": "row"},
    "OPTAttention": _OUT_PROJ,
    "OPTDecoderLayer": _FC,
    "RecurrentGemmaMlp": {"gate_proj": "column", "up_proj": "column", "down_proj": "row"},
    # Encoders of text.
    "AlbertLayer": {"ffn": "column", "ffn_output": "row"},
    "BertAttention": _SELF,
    "BertLayer": _DENSE,
    "BigBirdLayer": _DENSE,
    "CamembertAttention": _SELF,
    "CamembertLayer": _DENSE,
    "DebertaV2Layer": _DENSE,
    "DistilBertSelfAttention": _attention("q_lin", "k_lin", "v_lin", row="out_lin"),
    "ElectraAttention": _SELF,
    "ElectraLayer": _DENSE,
    "FFN": {"lin1": "column", "lin2": "row"},  # of DistilBERT
    "LongformerLayer": _DENSE,
    "RobertaAttention": _SELF,
    "RobertaLayer": _DENSE,
    "XLMRobertaAttention": _SELF,
    "XLMRobertaLayer": _DENSE,
    # Encoders and decoders.
    "BartAttention": _OUT_PROJ,
    "BartDecoderLayer": _FC,
    "BartEncoderLayer": _FC,
    "M2M100Attention": _OUT_PROJ,
    "M2M100DecoderLayer": _FC,
    "M2M100EncoderLayer": _FC,
    "MarianAttention": _OUT_PROJ,
    "MarianDecoderLayer": _FC,
    "MarianEncoderLayer": _FC,
    "MBartAttention": _OUT_PROJ,
    "MBartDecoderLayer": _FC,
    "MBartEncoderLayer": _FC,
    "PegasusAttention": _OUT_PROJ,
    "PegasusDecoderLayer": _FC,
    "PegasusEncoderLayer": _FC,
    "T5DenseActDense": {"wi": "column", "wo": "row"},
    "T5DenseGatedActDense": {"wi_0": "column", "wi_1": "column", "wo": "row"},
    # Sound.
    "HubertAttention": _OUT_PROJ,
    "HubertFeedForward": {"intermediate_dense": "column", "output_dense": "row"},
    "Wav2Vec2Attention": _OUT_PROJ,
    "Wav2Vec2FeedForward": {"intermediate_dense": "column", "output_dense": "row"},
    "WhisperAttention": _OUT_PROJ,
    "WhisperDecoderLayer": _FC,
    "WhisperEncoderLayer": _FC,
    # Images, and images with text.
    "Blip2MLP": _FC,
    "Blip2QFormerAttention": _attention("attention.query", "attention.key", "attention.value", row="output.dense"),
    "Blip2QFormerLayer": {"intermediate_query.dense": "column", "output_query.dense": "row"},
    "CLIPAttention": _OUT_PROJ,
    "CLIPMLP": _FC,
    "CLIPSegAttention": _OUT_PROJ,
    "CLIPSegMLP": _FC,
    "ConvNextLayer": {"pwconv1": "column", "pwconv2": "row"},
    "DPTViTLayer": _DENSE,
    "DetrCrossAttention": _O_PROJ,
    "DetrMLP": _FC,
    "DetrSelfAttention": _O_PROJ,
    "Dinov2MLP": _FC,
    "Mask2FormerMaskedAttentionDecoderLayer": _FC,
    "Mask2FormerPixelDecoderEncoderLayer": _FC,
    "SamAttention": _OUT_PROJ,
    "SamMLPBlock": {"lin1": "column", "lin2": "row"},
    "SiglipAttention": _OUT_PROJ,
    "SiglipMLP": _FC,
    "SwinMLP": _FC,
    "ViTAttention": _O_PROJ,
    "ViTMLP": _FC,
    # diffusers, timm and torchvision.
    "Attention": _attention("to_q", "to_k", "to_v", row="to_out.0"),
    "CNBlock": {"block.3": "column", "block.5": "row"},
    "Mlp": _FC,
    "MLPBlock": {"0": "column", "3": "row"},
    "PixArtAlphaTextProjection": {"linear_1": "column", "linear_2": "row"},
}


def is_transposed(layer: Module) -> bool:
    """Return whether a layer is transformers' Conv1D, a linear layer whose weight is (inputs, outputs)."""
    return type(layer).__name__ == "Conv1D" and type(layer).__module__ == "transformers.pytorch_utils"


def is_linear(layer: Module) -> bool:
    """Return whether a layer is linear; one of PEFT around such a layer is."""
    layer = getattr(layer, "base_layer", layer)
    return isinstance(layer, Linear) or is_transposed(layer)


def heads_of(layer: Any, around: Module) -> int | None:
    """Return how many heads a layer has, by the size of one in the module around; ``None``: nothing says so."""
    sizes = [getattr(around, name, None) for name in _HEAD_SIZES]
    size = next((size for size in sizes if isinstance(size, int)), None)
    width = getattr(layer, "out_features", None)
    return None if size is None or width is None or width % size else width // size


def family_plan(net: Module, ranks: int) -> dict[str, str]:
    """Return the plan of the blocks of a module that are known; empty where none is.

    A block without one of its linear layers, as of another version of its package, is left whole.  The layers of one
    are gathered whose heads cannot be divided among the ranks, or have other layers, too.
    """
    plan: dict[str, str] = {}
    for path, module in net.named_modules():
        block = _BLOCKS.get(type(module).__name__, {})
        layers = dict(module.named_modules()) if block else {}
        linear = {name for name, layer in layers.items() if is_linear(layer)}
        if type(module).__module__.partition(".")[0] not in _PACKAGES or not linear >= block.keys():
            continue
        columns = [(layers[name.rpartition(".")[0]], layers[name]) for name, word in block.items() if word == "column"]
        counts = [heads_of(layer, around) for around, layer in columns]
        counts += [vars(around).get(name) for around, _ in columns for name in HEAD_COUNTS]
        heads = [count for count in counts if type(count) is int]
        others = [name for name in linear if not any(f"{name}.".startswith(f"{layer}.") for layer in block)]
        is_even = not heads or (not others and all(count % ranks == 0 for count in heads))
        plan |= {f"{path}.{name}".strip("."): word if is_even else _GATHERED for name, word in block.items()}
    return plan
