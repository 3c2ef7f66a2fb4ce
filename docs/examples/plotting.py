"""Draw the curves of an example, where it got ``--plot FILE.png``; needs matplotlib."""

from matplotlib.figure import Figure


def plot(path, title, curves, over="step"):
    """Draw each curve over its steps, from 1; ``curves`` are lists by name."""
    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    for name, values in curves.items():
        axes.plot(range(1, len(values) + 1), values, label=name)
    axes.set(title=title, xlabel=over, ylim=(0, None))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=90)
