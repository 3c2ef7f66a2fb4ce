"""`mgpu simulate`: a recorded step on GPUs that you do not have, over links that you name.

``predict`` makes the prediction; this file is the command line and its table.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from mgpu_core.support.tables import Table, show
from mgpu_core.tools.explain.predict import Prediction, predict_step
from mgpu_core.tools.explain.scene import plural
from mgpu_core.tools.explain.step_profile import StepProfile
from mgpu_core.tools.explain.topology import parse_topology

__all__ = ["run"]

_UNCONFIRMED = """\
No machine has confirmed such a prediction yet: of this model, only rings were compared with published figures
(docs/cost_model.md)."""
_FROM_CPU = """\
note: this step was recorded on CPU ranks, so its compute times are a CPU's. Record it on the kind of GPU whose cluster
you ask about: mgpu explain --profile."""
_LEGEND = """\
  compute: forward and backward; exposed: all-reduce that nothing hides; broadcast: of the module, where
  each step has one; efficiency: relative to 1 GPU. All in ms."""
_TITLES = (
    *("GPUs", "step ms", "compute", "exposed", "update", "broadcast", "input", "host"),
    *("rows/s", "efficiency", "bottleneck"),
)


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    profile, topology = _read(args.step), parse_topology(args.topology, args.gpus_per_node)
    predictions = [predict_step(profile, gpus, topology, args.scaling) for gpus in _counts(args.gpus)]
    recorded = f"{profile.rows} rows on {plural(profile.ranks, 'rank')}"
    where = f"{topology.name}, {topology.gpus_per_node} GPUs a node"
    title = f"{profile.name}, {recorded}; {where}; {args.scaling} scaling"
    table = Table([_TITLES, *map(_cells, predictions)], {len(_TITLES) - 1}, "  ")
    show([title, "", table, "", _LEGEND, "", _UNCONFIRMED])
    if profile.device == "cpu":
        print(f"\n{_FROM_CPU}")
    return 0


def _cells(step: Prediction) -> tuple[str, ...]:
    parts = (step.compute_s, step.exposed_s, step.update_s, step.broadcast_s, step.input_s, step.host_s)
    times = (step.step_s, *parts)
    rate = f"{step.rows_per_second:,.0f}"
    return str(step.gpus), *(f"{1e3 * s:.3f}" for s in times), rate, f"{step.efficiency:.1%}", step.bottleneck


def _counts(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[1-9][0-9]{0,6}", part) for part in parts):
        raise ValueError(f"--gpus {text}: wanted whole numbers above 0, such as 8,64,1024")
    return sorted({int(part) for part in parts})


def _read(path: Path) -> StepProfile:
    try:
        return StepProfile.from_json(path.read_text())
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: there is no such file; mgpu explain --profile {path} writes one") from None
    except OSError as error:
        raise OSError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
