"""A small GPT learns the characters of a Python module, in bfloat16.

    python docs/examples/gpt.py
    python docs/examples/gpt.py --ranks 3  # three ranks on the CPU
    python docs/examples/gpt.py --plot curve.png

The first uses all GPUs, or MGPU_CORE_CPU_RANKS ranks on the CPU.

Two calls make one update, of their mean gradient, whose norm is clipped. Parameters,
sums and updates are float32; forward and loss run under autocast. ``small_gpt.py`` cuts
such a net over the devices of a pipeline instead.
"""

import argparse
import inspect

import torch
from torch import nn
from torch.nn import functional

import mgpu_core

WIDTH, HEADS, BLOCKS, LENGTH, ROWS, STEPS, ACCUMULATE = 64, 4, 2, 32, 16, 122, 2


class Gpt(nn.Module):
    def __init__(self, characters):
        super().__init__()
        self.tokens = nn.Embedding(characters, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        block = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, BLOCKS, nn.LayerNorm(WIDTH), False)
        self.head = nn.Linear(WIDTH, characters)

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, tokens.device)
        x = self.tokens(tokens) + self.positions[:length]
        return self.head(self.blocks(x, mask, is_causal=True))


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

    net = Gpt(len(characters))
    if options.ranks is None and torch.accelerator.is_available():
        net.to(torch.accelerator.current_accelerator())
    optimizer = mgpu_core.optim.AdamW(net.parameters(), lr=3e-3)
    step = mgpu_core.TrainStep(
        net,
        loss_fn,
        optimizer,
        None if options.ranks is None else ["cpu"] * options.ranks,
        accumulate=ACCUMULATE,
        amp_dtype=torch.bfloat16,
        clip_norm=1.0,
    )
    print(f"{len(step.plan())} ranks")

    history = []
    for number in range(STEPS):
        history.append(step(*batch()).item())  # every second call updates
        if number % 30 == 0:
            recent = history[-20:]
            print(f"step {number + 1}: loss {sum(recent) / len(recent):.3f}")

    device = next(net.parameters()).device
    line = [characters.index(each) for each in "    def "]
    with torch.no_grad():
        while len(line) < LENGTH:
            likely = net(torch.tensor([line], device=device))[0, -1].softmax(0)
            line.append(int(likely.multinomial(1)))
    print("".join(characters[each] for each in line).partition("\n")[0])
    if options.plot:
        from plotting import plot

        plot(options.plot, "A small GPT in bfloat16", {"loss": history})
    assert sum(recent) / len(recent) < history[0] / 2, "the loss did not go down"


if __name__ == "__main__":
    main()
