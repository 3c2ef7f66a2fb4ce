"""A small GPT learns a Python module with its parameters in shards, and is saved.

    python docs/examples/sharded_gpt.py            # all GPUs
    python docs/examples/sharded_gpt.py --ranks 2  # two ranks on the CPU
    python docs/examples/sharded_gpt.py --plot curve.png

Each GPU keeps a part of every block, and has the whole block while it computes with it.
CPU ranks share one memory, so nothing is saved there; the numbers are the same.
"""

import argparse
import inspect
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import mgpu_core

WIDTH, HEADS, BLOCKS, LENGTH, ROWS, STEPS = 48, 4, 4, 32, 16, 121


class Block(nn.Module):
    """Attention and two linear layers, each after a norm and around a residual."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        q, k, v = heads.chunk(3, 1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, characters):
        super().__init__()
        self.tokens = nn.Embedding(characters, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))  # these come and go
        self.head = nn.Linear(WIDTH, characters)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        return self.head(x)


def loss_fn(logits, target):
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--ranks", type=int, help="ranks on the CPU (default: whatever there is)"
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draw the curve")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    text = inspect.getsource(argparse)
    characters = sorted(set(text))
    data = torch.tensor([characters.index(each) for each in text])

    def batch():
        begins = torch.randint(len(data) - LENGTH - 1, (ROWS, 1))
        rows = data[begins + torch.arange(LENGTH + 1)]
        return rows[:, :-1], rows[:, 1:]

    net = Gpt(len(characters))  # on the host: it need not fit on one GPU
    optimizer = mgpu_core.optim.AdamW(net.parameters(), lr=3e-3)
    step = mgpu_core.TrainStep(
        net,
        loss_fn,
        optimizer,
        None if options.ranks is None else ["cpu"] * options.ranks,
        shard="parameters",
        amp_dtype=torch.bfloat16,
        clip_norm=1.0,
    )
    print(f"{len(step.plan())} ranks")

    history = []
    for number in range(STEPS):
        history.append(step(*batch()).item())
        if number % 30 == 0:
            recent = history[-10:]
            print(f"step {number + 1}: loss {sum(recent) / len(recent):.3f}")

    net.eval()
    print(f"step {STEPS}, rows of its own: loss {step.evaluate(*batch()).item():.3f}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "gpt.pt")
        with step.full_parameters("cpu") as whole:  # has no memory outside of this
            torch.save(whole.state_dict(), path)
        again = Gpt(len(characters)).eval()
        again.load_state_dict(torch.load(path, weights_only=True))
    x, y = batch()
    saved = loss_fn(again(x), y).item()
    assert abs(saved - step.evaluate(x, y).item()) < 0.05, "the file is not the net"
    step.close()  # the net is whole again, on the first device
    if options.plot:
        from plotting import plot

        plot(options.plot, "A small GPT in shards", {"loss": history})
    assert sum(recent) / len(recent) < history[0] / 2, "the loss did not go down"


if __name__ == "__main__":
    main()
