"""A small GPT learns the characters of this very file, over three stages of a pipeline.

    python docs/examples/small_gpt.py              # three stages on the CPU
    python docs/examples/small_gpt.py --devices 0,1,2

The embedding and the head share one Parameter: the first and the last stage use it, and
it stays one.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import mgpu_core

WIDTH, HEADS, BLOCKS, LENGTH, ROWS, STEPS = 64, 4, 6, 48, 32, 120


class Block(nn.Module):
    """Attention and two linear layers, each after a norm and around a residual."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        heads = (
            self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        )
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class SmallGpt(nn.Module):
    def __init__(self, characters):
        super().__init__()
        self.tokens = nn.Embedding(characters, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, characters, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.1)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(logits, target):
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", help="one per stage, such as 0,1,2 (default: CPU)")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the curve")
    options = parser.parse_args()
    devices = options.devices
    device_ids = list(map(int, devices.split(","))) if devices else ["cpu"] * 3

    torch.manual_seed(0)
    text = Path(__file__).read_text()
    characters = sorted(set(text))
    data = torch.tensor([characters.index(each) for each in text])

    def batch():
        begins = torch.randint(len(data) - LENGTH - 1, (ROWS, 1))
        rows = data[begins + torch.arange(LENGTH + 1)]
        return rows[:, :-1], rows[:, 1:]

    net = SmallGpt(len(characters))
    split, table = mgpu_core.balance(net, batch()[0], len(device_ids))
    print(table)
    pipe = mgpu_core.Pipeline(net, device_ids, split_points=split, chunks=8)
    optimizer = mgpu_core.optim.AdamW(net.parameters(), lr=3e-3)
    step = mgpu_core.TrainStep(pipe, loss_fn, optimizer)

    history = []
    for number in range(STEPS):
        history.append(float(step(*batch())))  # all micro-batches, and the update
        if number % 20 == 19:
            print(f"step {number + 1}: loss {sum(history[-20:]) / 20:.2f}")
    if options.plot:
        from plotting import plot

        plot(options.plot, "A small GPT over three stages", {"loss": history})
    assert history[-1] < 0.6 * history[0]


if __name__ == "__main__":
    main()
