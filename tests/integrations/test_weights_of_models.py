"""Files of models of transformers go to parts under the names that from_pretrained reads, in the dtype asked for."""

import pytest
import torch

from mgpu_core import TensorParallel, parameters_on_meta, place

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
transformers.logging.set_verbosity_error()

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
    "num_key_value_heads": 4, "pad_token_id": 0,
}  # fmt: skip
IDS = torch.randint(3, 60, (2, 6), generator=torch.Generator().manual_seed(0))


def llama():
    return transformers.LlamaForCausalLM, transformers.LlamaConfig(**SMALL)


def gpt2():
    return transformers.GPT2LMHeadModel, transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64)


def llava():
    seen = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    seen |= {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 4, "projection_dim": 32}
    text = {**SMALL, "model_type": "llama"}
    config = transformers.LlavaConfig(vision_config=seen, text_config=text, image_token_index=60)
    return transformers.LlavaForConditionalGeneration, config


def qwen3_moe():
    extra = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig(**SMALL, **extra)


def with_old_buffers(state):
    return state | {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in range(2)}


def of_the_base(state):
    """As the gpt2 of the hub: without transformer., and with the masks that attention once had."""
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 4, 4) for layer in range(2)}
    return {name.removeprefix("transformer."): each for name, each in state.items()} | masks


def written(made, folder, change=dict):
    """Write a model in the names of the hub; return its class, its config and itself as it comes back."""
    torch.manual_seed(0)
    kind, config = made()
    kind(config).eval().save_pretrained(folder)
    state = safetensors.load_file(folder / "model.safetensors")
    safetensors.save_file(change(state), folder / "model.safetensors", metadata={"format": "pt"})
    return kind, config, kind.from_pretrained(folder).eval()


@pytest.mark.parametrize(
    ("made", "change", "how"),
    [
        *((llama, change, how) for change in (dict, with_old_buffers) for how in (place, TensorParallel)),
        (gpt2, of_the_base, place),
        (llava, dict, place),
    ],
)
def test_names_are_those_that_from_pretrained_reads(made, change, how, tmp_path):
    kind, config, wanted = written(made, tmp_path, change)
    with parameters_on_meta():
        net = kind(config).eval()
    net = how(net, ["cpu"] * 2, weights=tmp_path)
    assert torch.allclose(net(input_ids=IDS).logits, wanted(input_ids=IDS).logits, rtol=0, atol=1e-5)


def test_a_base_model_reads_the_files_of_one_with_a_head(tmp_path):
    _, config, wanted = written(llama, tmp_path)

    def without_head(name):
        return None if name == "lm_head.weight" else name.removeprefix("model.")

    with parameters_on_meta():
        net = transformers.LlamaModel(config).eval()
    place(net, ["cpu"] * 2, weights=tmp_path, rename=without_head)
    assert torch.equal(net(input_ids=IDS).last_hidden_state, wanted.model(input_ids=IDS).last_hidden_state)


def test_the_dtype_that_is_asked_for_makes_the_model_of_from_pretrained(tmp_path):
    kind, config, _ = written(llama, tmp_path)
    wanted = kind.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    with parameters_on_meta():
        net = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    place(net, ["cpu"] * 2, weights=tmp_path)
    assert {name: each.dtype for name, each in net.named_buffers()} == {
        name: each.dtype for name, each in wanted.named_buffers()
    }
    assert torch.equal(net(input_ids=IDS).logits, wanted(input_ids=IDS).logits)
    with parameters_on_meta():
        rounded = kind(config)
    with pytest.raises(
        ValueError, match=r"inv_freq of LlamaRotaryEmbedding would be rounded.*from_config\(config, dtype"
    ):
        rounded.to(torch.bfloat16)


def test_experts_that_are_joined_while_they_load_are_refused_with_the_way_out(tmp_path):
    kind, config, wanted = written(qwen3_moe, tmp_path / "hub")
    with parameters_on_meta():
        net = kind(config).eval()
    with pytest.raises(ValueError, match="experts that it joins, need from_pretrained, and once save_pretrained"):
        place(net, ["cpu"] * 2, weights=tmp_path / "hub")
    wanted.save_pretrained(tmp_path / "own", save_original_format=False)
    place(net, ["cpu"] * 2, weights=tmp_path / "own")
    assert torch.allclose(net(input_ids=IDS).logits, wanted(input_ids=IDS).logits, rtol=0, atol=1e-5)
