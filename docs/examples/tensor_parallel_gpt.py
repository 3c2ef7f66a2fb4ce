"""A small GPT is fine-tuned with its layers cut over devices, and writes a line.

    python docs/examples/tensor_parallel_gpt.py            # all GPUs
    python docs/examples/tensor_parallel_gpt.py --ranks 2  # two ranks on the CPU
    python docs/examples/tensor_parallel_gpt.py --plot curve.png

It has learnt one Python module on one device, and is fine-tuned on another one. The
number of devices must divide its six heads.
"""

import argparse
import inspect
import json.decoder

import torch
from torch import nn
from torch.nn import functional

import mgpu_core

WIDTH, HEADS, BLOCKS, LENGTH, ROWS = 48, 6, 2, 32, 16
PLAN = {
    "tokens": "vocab",
    "blocks.*.q": "column",
    "blocks.*.k": "column",
    "blocks.*.v": "column",
    "blocks.*.out": "row",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "head": "column_gathered",
}


class Block(nn.Module):
    """Attention and two linear layers, each after a norm and around a residual."""

    head_dim = WIDTH // HEADS  # a rank has heads, and does not know how many

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.norm1(x)
        heads = (
            layer(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, characters):
        super().__init__()
        self.tokens = nn.Embedding(characters, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, characters)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def write(self, line):
        with torch.no_grad():
            while line.shape[1] < LENGTH:
                chances = self(line)[:, -1].softmax(-1)
                line = torch.cat([line, torch.multinomial(chances, 1)], 1)
        return line


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--ranks", type=int, help="ranks on the CPU (default: all GPUs)"
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draw the curve")
    options = parser.parse_args(arguments)
    count = 0 if options.ranks else torch.accelerator.device_count()
    devices = list(range(count)) or ["cpu"] * (options.ranks or 2)

    torch.manual_seed(0)
    texts = [inspect.getsource(each) for each in (argparse, json.decoder)]
    characters = sorted(set("".join(texts)))
    first = torch.accelerator.current_accelerator() if count else torch.device("cpu")
    net = Gpt(len(characters)).to(first)
    history = []

    def train(model, text, steps):
        data = torch.tensor([characters.index(each) for each in text], device=first)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        for number in range(steps):
            begins = torch.randint(len(data) - LENGTH, (ROWS, 1), device=first)
            rows = data[begins + torch.arange(LENGTH + 1, device=first)]
            logits = model(rows[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
            if number % 40 == 0:
                recent = history[-10:]
                print(f"step {number + 1}: loss {sum(recent) / len(recent):.3f}")

    print(f"{len(devices)} ranks")
    train(net, texts[0], 81)  # as any module
    tp = mgpu_core.TensorParallel(net, devices, PLAN)
    train(tp, texts[1], 121)

    line = torch.tensor([[characters.index(each) for each in "    if "]], device=first)
    written = tp.call("write", line)[0].tolist()
    print("".join(characters[each] for each in written).partition("\n")[0])
    if options.plot:
        from plotting import plot

        plot(options.plot, "A small GPT, cut after step 81", {"loss": history})
    assert sum(history[-10:]) / 10 < history[0] / 2, "the loss did not go down"


if __name__ == "__main__":
    main()
