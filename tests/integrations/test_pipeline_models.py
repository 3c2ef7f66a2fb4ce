"""Models of transformers over several devices: losses, gradients and steps are those of micro-batches in turn."""

import copy
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from mgpu_core import Pipeline, TrainStep, parameters_on_meta, place

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:the forward of")]
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

ROWS = 8
GENERATOR = torch.Generator().manual_seed(0)
IDS = torch.randint(3, 101, (ROWS, 9), generator=GENERATOR)
IMAGES = torch.randn(ROWS, 3, 16, 16, generator=GENERATOR, dtype=torch.float64)
CLASSES = torch.randint(0, 5, (ROWS,), generator=GENERATOR)
TEXT = {"input_ids": IDS, "labels": IDS}
PICTURES = {"pixel_values": IMAGES, "labels": CLASSES}


class Clip(nn.Module):
    """The text model is defined first, and the vision model called first; no two rows meet in this loss."""

    def __init__(self):
        super().__init__()
        small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 2}
        text = {**small, "vocab_size": 101, "max_position_embeddings": 16, "eos_token_id": 2}
        vision = {**small, "image_size": 16, "patch_size": 4}
        config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
        self.clip = transformers.CLIPModel(config)

    def forward(self, input_ids, pixel_values):
        output = self.clip(input_ids=input_ids, pixel_values=pixel_values)
        return output.logits_per_image.diagonal().square().mean()


def llama(**options):
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=4,
            vocab_size=101, pad_token_id=0, **options,
        )
    )  # fmt: skip


def gpt2():
    config = {"n_embd": 32, "n_layer": 6, "n_head": 2, "vocab_size": 101, "n_positions": 32}
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**config, **no_dropout))


def mixtral():
    net = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=2, num_key_value_heads=2,
            num_local_experts=4, vocab_size=101,
        )
    )  # fmt: skip
    net.set_experts_implementation("eager")
    return net


def t5():
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=32, num_layers=4, num_heads=2, d_ff=64, d_kv=16, vocab_size=101, decoder_start_token_id=0,
            dropout_rate=0,
        )
    )  # fmt: skip


def bart():
    both = {"layers": 6, "attention_heads": 2, "ffn_dim": 64}
    sizes = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in both.items()}
    none = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0)
    config = transformers.BartConfig(d_model=32, vocab_size=101, max_position_embeddings=32, **sizes, **none)
    return transformers.BartForConditionalGeneration(config)


def vit():
    none = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0)
    small = {"hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.ViTConfig(**small, image_size=16, patch_size=4, num_labels=5, **none)
    return transformers.ViTForImageClassification(config)


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    batch: dict[str, Any]


CASES = {
    "llama": Case(llama, TEXT),
    "llama_tied": Case(lambda: llama(tie_word_embeddings=True), TEXT),
    "gpt2": Case(gpt2, TEXT),
    "mixtral": Case(mixtral, TEXT),
    "t5": Case(t5, {**TEXT, "use_cache": False}),
    "bart": Case(bart, {**TEXT, "use_cache": False}),
    "clip": Case(Clip, {"input_ids": IDS, "pixel_values": IMAGES}),
    "vit": Case(vit, PICTURES),
}


def made(name):
    torch.manual_seed(0)
    return CASES[name].make().double().train()


def cut(batch, chunks):
    return [
        {name: each.tensor_split(chunks)[i] if isinstance(each, torch.Tensor) else each for name, each in batch.items()}
        for i in range(chunks)
    ]


def loss_of(output):
    return output if isinstance(output, torch.Tensor) else output.loss


def step_alone(net, optimizer, batch, chunks):
    """Step over micro-batches, one after the other; return the loss."""
    optimizer.zero_grad()
    total = 0.0
    for part in cut(batch, chunks):
        rows = len(next(iter(part.values())))
        loss = loss_of(net(**part)) * rows / ROWS
        loss.backward()
        total += float(loss.detach())
    return total


def assert_same(net, alone, of):
    for (name, own), wanted in zip(net.named_parameters(), alone.parameters(), strict=True):
        own, wanted = of(own), of(wanted)
        assert (own is None) == (wanted is None), name
        assert own is None or torch.allclose(own, wanted, rtol=0, atol=1e-9), name


@pytest.mark.parametrize(
    ("stages", "chunks", "schedule"), [(2, 4, "1f1b"), (3, 3, "gpipe"), (3, 4, "1f1b"), (2, 1, "1f1b")]
)
@pytest.mark.parametrize("name", CASES)
def test_five_steps(name, stages, chunks, schedule):
    net, batch = made(name), CASES[name].batch
    alone = copy.deepcopy(net)
    pipe = Pipeline(net, ["cpu"] * stages, chunks=chunks, schedule=schedule)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (net, alone)]
    step = TrainStep(pipe, None, optimizers[0], workers="threads")
    for _ in range(5):
        wanted = step_alone(alone, optimizers[1], batch, chunks)
        assert float(step(**batch)) == pytest.approx(wanted, rel=1e-6)  # some compute the loss in float32
        assert_same(net, alone, lambda each: each.grad)
        optimizers[1].step()
    assert_same(net, alone, lambda each: each)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("how", ["always", "their own", "their own, reentrant"])
def test_layers_that_run_again(name, how):
    net, batch = made(name), CASES[name].batch
    alone = copy.deepcopy(net)
    if how != "always":  # inside a layer it may be reentrant
        getattr(net, "clip", net).gradient_checkpointing_enable({"use_reentrant": "reentrant" in how})
    pipe = Pipeline(net, ["cpu"] * 3, chunks=3, checkpoint="always" if how == "always" else "never")
    step = TrainStep(pipe, None, torch.optim.SGD(net.parameters(), lr=0.0), workers="threads")
    wanted = step_alone(alone, torch.optim.SGD(alone.parameters(), lr=0.0), batch, 3)
    assert float(step(**batch)) == pytest.approx(wanted, rel=1e-6)
    assert_same(net, alone, lambda each: each.grad)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("t5", "clip")])
def test_a_loop_of_ones_own(name, stages):
    net, batch = made(name), CASES[name].batch
    alone = copy.deepcopy(net)
    pipe = Pipeline(net, ["cpu"] * stages, chunks=3)
    inputs = {key: each for key, each in batch.items() if key != "labels"} | {"return_dict": True}
    if "input_ids" in inputs:
        inputs["use_cache"] = False
    output, wanted = pipe(**inputs).logits, alone(**inputs).logits
    assert torch.allclose(output, wanted, rtol=0, atol=1e-9)
    output.square().mean().backward()
    wanted.square().mean().backward()
    assert_same(net, alone, lambda each: each.grad)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_parts_by_bytes(name, stages):
    net = made(name)
    place(net, ["cpu"] * stages)
    parts = [0] * stages
    placement = net.forward.placement
    for each in net.parameters():
        parts[placement.stage_of(each)] += each.nbytes
    assert max(parts) <= 1.3 * sum(parts) / stages


def test_two_threads_generate_at_once():
    net = made("llama").eval()
    alone = copy.deepcopy(net)
    place(net, ["cpu"] * 2)
    options = {"max_new_tokens": 6, "do_sample": False}
    wanted = [alone.generate(IDS[row : row + 2], **options) for row in (0, 2)]
    found: list[Any] = [None, None]

    def generate(index):
        found[index] = net.generate(IDS[2 * index : 2 * index + 2], **options)

    threads = [threading.Thread(target=generate, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(*each) for each in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_weights_of_a_folder_that_save_pretrained_wrote(kind, tmp_path):
    pytest.importorskip("safetensors")
    net = made(kind).eval()
    net.save_pretrained(tmp_path / "original", max_shard_size="50KB")
    net.save_pretrained(tmp_path / "converted", save_original_format=False)
    with parameters_on_meta():
        empty = type(net)(net.config).double().eval()
    if kind == "mixtral":
        with pytest.raises(ValueError, match=r"experts\.gate_up_proj.*save_original_format=False"):
            place(empty, ["cpu"] * 2, weights=tmp_path / "original")
    else:
        assert len(list((tmp_path / "original").glob("*.safetensors"))) > 2
        other = copy.deepcopy(empty)
        assert torch.equal(place(other, ["cpu"] * 2, weights=tmp_path / "original")(IDS).logits, net(IDS).logits)
    place(empty, ["cpu"] * 2, weights=tmp_path / "converted")
    assert torch.equal(empty(IDS).logits, net(IDS).logits)
