"""Contrastive learning: two views of a digit attract each other, and repel all others.

    python docs/examples/contrastive.py
    python docs/examples/contrastive.py --ranks 3  # three ranks on the CPU
    python docs/examples/contrastive.py --plot curve.png

The first uses all GPUs, or MGPU_CORE_CPU_RANKS ranks on the CPU.

The loss compares each row with all rows of the batch, so no rank can compute it on its
own rows: ``loss_on="gathered"``. It is the same for every number of ranks. Labels are
used at the end alone: a digit is named by its nearest neighbour's label.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional

import mgpu_core
from mgpu_core.tools.mnist import digits

BATCH, EPOCHS, TEMPERATURE = 128, 4, 0.1


class Encoder(nn.Module):
    """Both views of each digit, (rows, 2, 28, 28), become vectors of length 1."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 5, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 32),
        )

    def forward(self, views):
        vectors = self.layers(views.flatten(0, 1).unsqueeze(1))
        return functional.normalize(vectors, dim=1).unflatten(0, (-1, 2))


def info_nce(vectors, own):
    """Which of all second views belongs to a first one?"""
    likeness = vectors[:, 0] @ vectors[:, 1].T / TEMPERATURE
    return functional.cross_entropy(likeness, own)


def view(images):
    """Shift each image by some pixels, and darken a part of the pixels."""
    rows = torch.arange(len(images))[:, None, None]
    down, right = (torch.arange(28) + torch.randint(-2, 3, (2, len(images), 1))) % 28
    shifted = images[rows, down[:, :, None], right[:, None, :]]
    return shifted * (torch.rand_like(shifted) < 0.8)


def nearest_neighbour(encoder, data):
    """Return the share of test digits whose nearest training digit is the same."""
    device = next(encoder.parameters()).device
    with torch.no_grad():
        known, asked = (
            encoder((each.images / 255).expand(-1, 2, -1, -1).to(device))[:, 0].cpu()
            for each in (data.train, data.test)
        )
    guessed = data.train.labels[(asked @ known.T).argmax(1)]
    return (guessed == data.test.labels).float().mean().item()


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--ranks", type=int, help="ranks on the CPU (default: whatever there is)"
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draw the curve")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    data = digits.load()
    encoder = Encoder()
    if options.ranks is None and torch.accelerator.is_available():
        encoder.to(torch.accelerator.current_accelerator())
    step = mgpu_core.TrainStep(
        encoder,
        info_nce,
        mgpu_core.optim.AdamW(encoder.parameters(), lr=2e-3),
        None if options.ranks is None else ["cpu"] * options.ranks,
        loss_on="gathered",
    )
    print(f"{len(step.plan())} ranks")

    before = nearest_neighbour(encoder, data)
    history = []
    for epoch in range(EPOCHS):
        losses = []
        for rows in torch.randperm(data.train.count).split(BATCH):
            if len(rows) < BATCH:  # with fewer other digits the loss is smaller
                break
            images = data.train.images[rows, 0] / 255
            views = torch.stack([view(images), view(images)], 1)
            losses.append(step(views, torch.arange(len(rows))).item())
        history += losses
        print(f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.3f}")

    right = nearest_neighbour(encoder, data)
    print(f"nearest neighbours: {right:.1%} right, {before:.1%} before training")
    if options.plot:
        from plotting import plot

        plot(options.plot, "Contrastive learning of digits", {"loss": history})
    assert history[-1] < history[0] / 2, "the loss did not go down"


if __name__ == "__main__":
    main()
