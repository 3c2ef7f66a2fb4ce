"""Reports of a training: lines and a progress bar while it runs, a PNG and a JSON file when it is done.

`Report` is silent, for tests and benchmarks; `ConsoleReport` is the command line's. matplotlib and tqdm are extras:
the first is asked for before a training starts, the second is used where it is there and someone can see it.
"""

import contextlib
import json
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from mgpu_core.files import write_whole
from mgpu_core.mnist.config import Config
from mgpu_core.mnist.history import Epoch, History


class Report:
    """A report that shows nothing; override the methods of interest."""

    def line(self, text: str) -> None:
        """Show one line: the settings, a resume, a file written."""

    def epoch(self, record: Epoch, epochs: int) -> None:
        """Show an epoch, of `epochs` in all, that is done and saved."""

    @contextlib.contextmanager
    def steps(self, number: int, count: int) -> Iterator[Callable[[], object]]:
        """Wrap the `count` steps of epoch `number`; call the yielded function after each."""
        yield lambda: None


class ConsoleReport(Report):
    """Lines on stdout; a progress bar on stderr if that is a terminal and tqdm is installed."""

    def line(self, text: str) -> None:
        """Print `text` at once, also into a pipe."""
        print(text, flush=True)

    def epoch(self, record: Epoch, epochs: int) -> None:
        """Print loss, test accuracy and speed."""
        self.line(
            f"epoch {record.number}/{epochs}  loss {record.loss:.4f}  accuracy {record.accuracy:.2%}  "
            f"{record.images_per_second:,.0f} images/s"
        )

    @contextlib.contextmanager
    def steps(self, number: int, count: int) -> Iterator[Callable[[], object]]:
        """Show the progress bar of one epoch, and take it away."""
        if sys.stderr is None or not sys.stderr.isatty():
            yield lambda: None
            return
        try:
            from tqdm.auto import tqdm
        except ImportError:
            yield lambda: None
            return
        with tqdm(total=count, desc=f"epoch {number}", unit="step", leave=False) as bar:
            yield bar.update


def write_plot(path: Path, config: Config, history: History) -> None:
    """Draw loss (each step, and each epoch's mean) and test accuracy (percent) over the epochs into a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    losses, accuracies = figure.subplots(1, 2)
    for epoch in history.epochs:
        xs = [epoch.number - 1 + (step + 1) / len(epoch.step_losses) for step in range(len(epoch.step_losses))]
        losses.plot(xs, epoch.step_losses, color="tab:blue", alpha=0.35, linewidth=0.8)
    numbers = [epoch.number for epoch in history.epochs]
    # The mean of an epoch belongs to its middle; its test comes at its end.
    middles = [number - 0.5 for number in numbers]
    losses.plot(middles, [epoch.loss for epoch in history.epochs], "o-", color="tab:blue", label="mean of the epoch")
    losses.set(title="training loss (cross-entropy)", xlabel="epoch", ylim=(0, None))
    losses.legend()
    accuracies.plot(numbers, [100 * epoch.accuracy for epoch in history.epochs], "o-", color="tab:green")
    accuracies.set(title="test accuracy, %", xlabel="epoch")
    for axes in (losses, accuracies):
        axes.grid(alpha=0.3)
        axes.locator_params(axis="x", integer=True)
    figure.suptitle(f"{config.model}, {config.team(history.devices)}, {config.pace()}")
    write_whole(path, lambda stream: figure.savefig(stream, format="png", dpi=120))


def write_json(path: Path, config: Config, history: History, digits: str) -> None:
    """Write settings, environment, curves and counters, as strict JSON."""
    content = {
        "format": "mgpu_core.mnist history 1",
        "settings": {name: _plain(value) for name, value in asdict(config).items()} | {"digits_sha256": digits},
        "environment": _environment(history),
        "resumed_after": history.resumed_after,
        "epochs": [asdict(epoch) for epoch in history.epochs],
        "counters": [
            {"operation": operation, "algorithm": algorithm, "rank": rank, "calls": calls, "nbytes": nbytes}
            for (operation, algorithm, rank), (calls, nbytes) in sorted(history.counters.items())
        ],
    }
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    write_whole(path, lambda stream: stream.write(text.encode()))


def _plain(value: object) -> Any:
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    return value if value is None or isinstance(value, int | float) else str(value)


def _environment(history: History) -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mgpu_core": metadata.version("mgpu-core"),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "devices": [str(device) for device in history.devices],
        "device_names": sorted({_device_name(device) for device in history.devices}),
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return platform.machine()
    name = getattr(getattr(torch, device.type, None), "get_device_name", None)  # not every accelerator has names
    return device.type if name is None else str(name(device))
