"""A GAN: two steps over two nets learn the points of a ring of eight clusters.

    python docs/examples/gan.py
    python docs/examples/gan.py --ranks 3  # three ranks on the CPU
    python docs/examples/gan.py --plot curve.png

The first uses all GPUs, or MGPU_CORE_CPU_RANKS ranks on the CPU.

The step of the discriminator has the discriminator alone. The step of the generator has
both nets, and an optimizer of the generator's parameters. Losses of a GAN say little,
so the energy distance between made and real points is shown: 0 for equal distributions.
"""

import argparse
import math

import torch
from torch import nn

import mgpu_core

NOISE, WIDTH, ROWS, STEPS = 8, 64, 128, 400


def ring(rows):
    """Points of eight clusters on a circle."""
    angles = torch.randint(8, (rows,)) * math.tau / 8
    centres = torch.stack([angles.cos(), angles.sin()], 1)
    return centres + 0.05 * torch.randn(rows, 2)


def net(inputs, outputs):
    return nn.Sequential(
        nn.Linear(inputs, WIDTH),
        nn.LeakyReLU(0.2),
        nn.Linear(WIDTH, WIDTH),
        nn.LeakyReLU(0.2),
        nn.Linear(WIDTH, outputs),
    )


def energy_distance(made, real):
    between, in_made, in_real = (
        torch.cdist(one, other).mean()
        for one, other in ((made, real), (made, made), (real, real))
    )
    return float(2 * between - in_made - in_real)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--ranks", type=int, help="ranks on the CPU (default: whatever there is)"
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draw the curves")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    generator, discriminator = net(NOISE, 2), net(2, 1)
    if options.ranks is None and torch.accelerator.is_available():
        for each in (generator, discriminator):
            each.to(torch.accelerator.current_accelerator())
    device_ids = None if options.ranks is None else ["cpu"] * options.ranks
    loss_fn = nn.functional.binary_cross_entropy_with_logits
    adam = {"lr": 1e-3, "betas": (0.5, 0.99)}
    judge = mgpu_core.TrainStep(
        discriminator,
        loss_fn,
        mgpu_core.optim.Adam(discriminator.parameters(), **adam),
        device_ids,
    )
    fool = mgpu_core.TrainStep(
        nn.Sequential(generator, discriminator),
        loss_fn,
        mgpu_core.optim.Adam(generator.parameters(), **adam),
        device_ids,
    )
    print(f"{len(judge.plan())} ranks")

    device = next(generator.parameters()).device
    ones, zeros = torch.ones(ROWS, 1), torch.zeros(ROWS, 1)
    history = {"discriminator": [], "generator": [], "energy distance": []}
    for step in range(STEPS):
        with torch.no_grad():
            made = generator(torch.randn(ROWS, NOISE).to(device)).cpu()
        discriminator.requires_grad_(True)
        loss = judge(torch.cat([ring(ROWS), made]), torch.cat([ones, zeros]))
        discriminator.requires_grad_(False)  # the other step computes no gradient of it
        history["discriminator"].append(loss.item())
        history["generator"].append(fool(torch.randn(ROWS, NOISE), ones).item())
        history["energy distance"].append(energy_distance(made, ring(ROWS)))
        if step % 50 == 0 or step == STEPS - 1:
            recent = history["energy distance"][-50:]
            print(f"step {step + 1}: energy distance {sum(recent) / len(recent):.3f}")

    if options.plot:
        from plotting import plot

        plot(options.plot, "A GAN learns eight clusters", history)
    assert recent[-1] < history["energy distance"][0] / 2, "it did not learn"


if __name__ == "__main__":
    main()
