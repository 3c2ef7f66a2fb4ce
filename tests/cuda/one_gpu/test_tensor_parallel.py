"""A module cut by a plan, two ranks on one device, or one on the GPU and one on the CPU."""

import copy

import pytest
import torch
from fakes.here import alike
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attention

import mgpu_core

WIDTH, WORDS = 16, 24


class Block(nn.Module):
    head_dim = 4

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x):
        q, k, v = (
            each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1)
        )
        x = x + self.out(attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(torch.relu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head.weight = self.words.weight

    def forward(self, tokens):
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def generate(self, tokens, count):
        for _ in range(count):
            chances = self(tokens)[:, -1].float().softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1)], 1)
        return tokens


PLAN = {
    "words": "vocab",
    "blocks.*.qkv": "column_gathered",
    "blocks.*.out": "rowwise_split_input",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
}


@pytest.mark.parametrize("second", ["here", "cpu"])
def test_steps_and_texts(here, second):
    torch.manual_seed(0)
    alone = Decoder().double().to(here.name)
    devices = [here.name, here.name if second == "here" else "cpu"]
    tp = mgpu_core.TensorParallel(copy.deepcopy(alone), devices, PLAN)
    tokens = torch.randint(0, WORDS, (6, 10), device="cpu", generator=torch.Generator("cpu").manual_seed(1)).to(
        here.name
    )
    with here.late():
        for _ in range(3):
            optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (tp, alone)]
            for _ in range(4):
                for net, optimizer in zip((tp, alone), optimizers, strict=True):
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
                    optimizer.step()
                here.poison()
            alike(tp.uncut(), alone)
    with torch.no_grad():
        found = []
        for generate in (lambda *args: tp.call("generate", *args), alone.generate):
            torch.manual_seed(2)
            found.append(generate(tokens, 8))
    assert torch.equal(*found)


def test_twenty_runs_have_one_set_of_bits(here):
    torch.manual_seed(0)
    tp = mgpu_core.TensorParallel(Decoder().to(here.name), here.team(2), PLAN)
    tokens = torch.arange(40, device=here.name).reshape(4, 10) % WORDS
    bits = set()
    for _ in range(20):
        tp.zero_grad()
        tp(tokens).square().mean().backward()
        bits.add(b"".join(each.grad.cpu().numpy().tobytes() for each in tp.parameters()))
    assert len(bits) == 1


def test_a_method_over_ranks_and_two_threads_over_a_placed_net(here):
    torch.manual_seed(0)
    net = Decoder().to(here.name).eval()
    tokens = torch.arange(40, device=here.name).reshape(4, 10) % WORDS
    wrapped = mgpu_core.DataParallel(net, here.team(2))
    with torch.no_grad():
        assert wrapped.call("generate", tokens, 5, pad_value=0).shape == (4, 15)
        wanted = net(tokens)
    placed = mgpu_core.place(copy.deepcopy(net), here.team(2))
    with mgpu_core.Predictor(placed, max_batch=1, max_wait_ms=0) as predict:
        answers = [each.result(30) for each in [predict.submit(row[None]) for row in tokens]]
    torch.testing.assert_close(torch.cat(answers), wanted, rtol=1e-4, atol=1e-4)
