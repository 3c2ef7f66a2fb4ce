"""A text classifier with keywords: an ``attention_mask``, a flag, a replicated table.

    python docs/examples/text_classification.py
    python docs/examples/text_classification.py --ranks 3  # three ranks on the CPU
    python docs/examples/text_classification.py --plot curve.png

The first uses all GPUs, or MGPU_CORE_CPU_RANKS ranks on the CPU.

The last forward has one row. torch.nn.DataParallel fails there, on several GPUs with a
keyword flag.
"""

import argparse

import torch
from torch import nn

import mgpu_core

WORDS, LABELS, LENGTH, BATCH, STEPS = 50, 3, 12, 17, 80


def texts(rows, generator):
    """Each label has words that it prefers; padding is word 0."""
    labels = torch.randint(LABELS, (rows,), generator=generator)
    lengths = torch.randint(4, LENGTH + 1, (rows, 1), generator=generator)
    mask = torch.arange(LENGTH) < lengths
    words = torch.randint(1, WORDS, (rows, LENGTH), generator=generator)
    typical = (
        1
        + labels[:, None]
        + LABELS * torch.randint(0, 5, (rows, LENGTH), generator=generator)
    )
    words = torch.where(
        torch.rand(rows, LENGTH, generator=generator) < 0.6, typical, words
    )
    return words * mask, mask, labels


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16, padding_idx=0)
        self.last = nn.Linear(16, LABELS)

    def forward(self, words, *, attention_mask, weights, return_pooled=False):
        weight = (
            weights[words] * attention_mask
        )  # `weights` has one number per word, not per row
        pooled = (self.embedding(words) * weight[..., None]).sum(1) / weight.sum(
            1, keepdim=True
        )
        logits = self.last(pooled)
        return (
            {"logits": logits, "pooled": pooled}
            if return_pooled
            else {"logits": logits}
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
    generator = torch.Generator().manual_seed(1)
    net = Classifier()
    if ranks is None and torch.accelerator.is_available():
        net.to(torch.accelerator.current_accelerator())
    model = mgpu_core.DataParallel(
        net, None if ranks is None else ["cpu"] * ranks
    )  # the one line
    print(f"{len(model.device_ids)} ranks")

    weights = mgpu_core.Replicate(
        torch.rand(WORDS, generator=generator) + 0.5
    )  # whole, to every rank
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    history = []
    for step in range(STEPS):
        words, mask, labels = texts(BATCH, generator)
        logits = model(words, attention_mask=mask, weights=weights)["logits"]
        loss = nn.functional.cross_entropy(logits, labels.to(logits.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
        if step % 20 == 0 or step == STEPS - 1:
            print(f"step {step + 1}: loss {loss:.3f}")

    words, mask, _ = texts(1, generator)  # fewer rows than ranks, with a flag
    out = model(words, attention_mask=mask, weights=weights, return_pooled=True)
    print("one row:", {name: tuple(each.shape) for name, each in out.items()})
    assert out["pooled"].shape == (1, 16)
    if options.plot:
        from plotting import plot

        plot(options.plot, "A text classifier with masks", {"loss": history})
    assert sum(history[-10:]) < sum(history[:10]) / 2, "the loss did not go down"


if __name__ == "__main__":
    main()
