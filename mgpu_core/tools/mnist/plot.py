"""The picture of a training; matplotlib is an extra, which is asked for before the training starts."""

from pathlib import Path

from mgpu_core.support.files import write_whole


def write_plot(path: Path, title: str, losses: list[float], accuracies: list[float]) -> None:
    """Draw the loss of each step, and the test accuracy (0..1) after each epoch, over the epochs into a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps, epochs = range(1, len(losses) + 1), range(1, len(accuracies) + 1)
    left.plot([len(epochs) * step / len(steps) for step in steps], losses, color="tab:blue")
    left.set(title="training loss (cross-entropy)", xlabel="epoch", ylim=(0, None))
    right.plot(epochs, [100 * accuracy for accuracy in accuracies], "o-", color="tab:green")
    right.set(title="test accuracy, %", xlabel="epoch")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.locator_params(axis="x", integer=True)
    figure.suptitle(title)
    write_whole(path, lambda stream: figure.savefig(stream, format="png", dpi=120))
