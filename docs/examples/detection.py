"""A detector: targets go in as a nest, boxes, scores and losses come out as one.

    python docs/examples/detection.py
    python docs/examples/detection.py --ranks 3  # three ranks on the CPU
    python docs/examples/detection.py --plot curve.png

The first uses all GPUs, or MGPU_CORE_CPU_RANKS ranks on the CPU.

The model returns a list of dataclasses (one per head) and a dict of losses. Tensors are
joined row by row; the name and the size of a head are equal on all ranks, so they stay.
The losses are one number per picture: their mean, taken outside, is the same for every
number of ranks.
"""

import argparse
from dataclasses import dataclass

import torch
from torch import nn

import mgpu_core

SIZE, BATCH, STEPS = 12, 18, 80


@dataclass
class Detections:
    boxes: (
        torch.Tensor
    )  # (pictures, 4): left, top, right, bottom, as parts of the picture
    scores: torch.Tensor  # (pictures,)
    head: str
    size: int


def scene(generator):
    """Pictures with one bright rectangle, or with none."""
    corner = torch.randint(0, SIZE // 2, (BATCH, 2), generator=generator)
    extent = torch.randint(3, SIZE // 2, (BATCH, 2), generator=generator)
    present = torch.rand(BATCH, generator=generator) < 0.7
    index = torch.arange(SIZE)
    inside = (index >= corner[..., None]) & (
        index < (corner + extent)[..., None]
    )  # (pictures, 2, SIZE)
    bright = inside[:, 1, :, None] & inside[:, 0, None, :] & present[:, None, None]
    images = bright[:, None].float() + 0.1 * torch.randn(
        BATCH, 1, SIZE, SIZE, generator=generator
    )
    return images, {
        "boxes": torch.cat([corner, corner + extent], 1) / SIZE,
        "present": present.float(),
    }


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten()
        )
        self.heads = nn.ModuleDict(
            {name: nn.Linear(4 * SIZE * SIZE, 5) for name in ("coarse", "fine")}
        )

    def forward(self, images, targets=None):
        features = self.body(images)
        found, losses = [], {}
        for name, head in self.heads.items():
            out = head(features)
            found.append(Detections(out[:, :4].sigmoid(), out[:, 4], name, SIZE))
            if targets is not None:
                losses[name] = self.loss(found[-1], targets)
        return found, losses

    @staticmethod
    def loss(found, targets):
        """One number per picture, not one per rank."""
        boxes = nn.functional.l1_loss(
            found.boxes, targets["boxes"], reduction="none"
        ).sum(1)
        scores = nn.functional.binary_cross_entropy_with_logits(
            found.scores, targets["present"], reduction="none"
        )
        return boxes * targets["present"] + scores


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--ranks", type=int, help="ranks on the CPU (default: whatever there is)"
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draw the curve")
    options = parser.parse_args(arguments)
    ranks = options.ranks

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    net = Detector()
    if ranks is None and torch.accelerator.is_available():
        net.to(torch.accelerator.current_accelerator())
    model = mgpu_core.DataParallel(
        net, None if ranks is None else ["cpu"] * ranks
    )  # the one line
    print(f"{len(model.device_ids)} ranks")

    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    history = []
    for step in range(STEPS):
        images, targets = scene(generator)
        found, losses = model(images, targets=targets)
        loss = sum(each.mean() for each in losses.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
        if step % 20 == 0 or step == STEPS - 1:
            parts = ", ".join(
                f"{name} {each.mean():.3f}" for name, each in losses.items()
            )
            print(f"step {step + 1}: loss {loss:.3f} ({parts})")

    coarse, fine = found
    print(
        f"{type(fine).__name__} {coarse.head} and {fine.head}: "
        f"boxes {tuple(fine.boxes.shape)}, size {fine.size}"
    )
    assert coarse.boxes.shape == fine.boxes.shape == (BATCH, 4)
    if options.plot:
        from plotting import plot

        plot(options.plot, "A detector of rectangles", {"loss": history})
    assert sum(history[-10:]) < sum(history[:10]) / 2, "the loss did not go down"


if __name__ == "__main__":
    main()
