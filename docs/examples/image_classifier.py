"""An image classifier: a small CNN on made-up pictures, with a smaller last batch.

    python docs/examples/image_classifier.py
    python docs/examples/image_classifier.py --ranks 3  # three ranks on the CPU
    python docs/examples/image_classifier.py --plot curve.png

The first uses all GPUs, or MGPU_CORE_CPU_RANKS ranks on the CPU.

With torch.nn.DataParallel, 11 rows on 8 GPUs would use 6 of them. Here sizes differ by
at most one.
"""

import argparse

import torch
from torch import nn

import mgpu_core

CLASSES, SIZE, PICTURES, BATCH, EPOCHS = 4, 8, 203, 32, 6


def pictures(generator):
    """One pattern per class, and noise."""
    patterns = torch.randn(CLASSES, 1, SIZE, SIZE, generator=generator)
    labels = torch.randint(CLASSES, (PICTURES,), generator=generator)
    return patterns[labels] + 1.5 * torch.randn(
        PICTURES, 1, SIZE, SIZE, generator=generator
    ), labels


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(8 * SIZE * SIZE // 4, CLASSES),
    )


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--ranks", type=int, help="ranks on the CPU (default: whatever there is)"
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draw the curve")
    options = parser.parse_args(arguments)
    ranks = options.ranks

    torch.manual_seed(0)
    images, labels = pictures(torch.Generator().manual_seed(1))
    net = cnn()
    if ranks is None and torch.accelerator.is_available():
        net.to(torch.accelerator.current_accelerator())
    model = mgpu_core.DataParallel(
        net, None if ranks is None else ["cpu"] * ranks
    )  # the one line
    print(f"{len(model.device_ids)} ranks, last batch of {PICTURES % BATCH}")

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    history = []
    for epoch in range(EPOCHS):
        total = 0.0
        for rows in torch.randperm(PICTURES).split(BATCH):
            out = model(images[rows])
            loss = nn.functional.cross_entropy(out, labels[rows].to(out.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(rows)
        history.append(total / PICTURES)
        print(f"epoch {epoch + 1}: loss {history[-1]:.3f}")

    model.eval()
    with torch.inference_mode():
        right = (model(images).argmax(1).cpu() == labels).float().mean()
    print(f"{right:.0%} right")
    if options.plot:
        from plotting import plot

        plot(options.plot, "A small CNN on noisy patterns", {"loss": history}, "epoch")
    assert history[-1] < history[0] / 2, "the loss did not go down"


if __name__ == "__main__":
    main()
