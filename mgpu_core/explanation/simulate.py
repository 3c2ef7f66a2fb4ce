"""`mgpu simulate`: a recorded step at sizes that you do not have.  Step time, efficiency, bottleneck; a plot.

``predict`` makes the prediction, with the formulas of ``cost``; this file is the command line and its table.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mgpu_core.explanation.cost import ALGORITHMS, StepProfile
from mgpu_core.explanation.example_steps import EXAMPLES, NOTE
from mgpu_core.explanation.fit import this_host
from mgpu_core.explanation.predict import SCALINGS, Plan, Prediction, predict_step
from mgpu_core.explanation.scene import plural
from mgpu_core.explanation.simulate_plot import draw
from mgpu_core.explanation.tables import columns
from mgpu_core.explanation.topology import FORM, GPUS_PER_NODE, HostMemory, Machine, known_names, parse_topology
from mgpu_core.extras import require
from mgpu_core.files import check_outputs, check_picture, write_whole

__all__ = ["add_arguments", "render", "run", "simulate"]

FORMAT = "mgpu_core simulation 1"
_EXAMPLE = "resnet50"
_FROM_CPU = """\
note: this step was recorded on CPU ranks, so its compute times are a CPU's. Record it on the kind of GPU whose cluster
you ask about: mgpu explain --profile. For this machine's CPU ranks: --topology host."""
_TITLES = (
    *("GPUs", "step ms", "compute", "exposed", "update", "broadcast", "input", "host"),
    *("rows/s", "efficiency", "bottleneck"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mgpu simulate`."""
    add = parser.add_argument
    add("step", nargs="?", type=Path, metavar="STEP.json", help="a recorded step; without one, an example is taken")
    add("--example", choices=tuple(EXAMPLES), help=f"instead of a file; its times are assumed (default: {_EXAMPLE})")
    add("--gpus", default="8,64,1024", metavar="LIST", help="how many GPUs (default: %(default)s)")
    add("--topology", default="nvlink4+ib-ndr400", help=f"{FORM}; {known_names()}; or host: CPU ranks of this machine")
    add("--gpus-per-node", type=int, metavar="N", help=f"of a topology with links (default: {GPUS_PER_NODE})")
    add("--scaling", choices=SCALINGS, default="weak", help="keep the rows of each GPU (weak), or of all (strong)")
    add("--algorithm", choices=ALGORITHMS, default="auto", help="of the all-reduce (default: %(default)s)")
    add("--no-overlap", action="store_true", help="all-reduce after backward, without overlap")
    add("--plot", type=Path, metavar="FILE.png", help="draw step time and efficiency (needs matplotlib)")
    add("--json", type=Path, metavar="FILE", help="write the predictions")


def run(args: argparse.Namespace) -> int:
    """Print the table, and write the files asked for."""
    check_outputs([path for path in (args.plot, args.json) if path], [args.step] if args.step else [])
    if args.plot is not None:
        check_picture(args.plot)
        require("matplotlib", "a picture")
    gpus = _counts(args.gpus)
    profile = _profile(args)
    plan = Plan(_machine(args), args.scaling, not args.no_overlap, args.algorithm)
    found = simulate(profile, gpus, plan)
    if args.json is not None:
        _write(args.json, profile, plan, found)
    if args.plot is not None:
        draw(_title(profile, plan), found, args.plot)
    print(render(profile, plan, found), end="")
    if not args.step:
        print(f"\n{NOTE}")
    if profile.device == "cpu" and not isinstance(plan.machine, HostMemory):
        print(f"\n{_FROM_CPU}")
    return 0


def simulate(profile: StepProfile, gpus: Sequence[int], plan: Plan) -> list[Prediction]:
    """Return one prediction per number of GPUs.

    Raises:
        ValueError: numbers that the machine cannot have, or fewer rows than GPUs.
    """
    return [predict_step(profile, count, plan) for count in gpus]


def render(profile: StepProfile, plan: Plan, found: Sequence[Prediction]) -> str:
    """Return title, table and legend, ending with a newline."""
    rows = [_TITLES, *map(_cells, found)]
    numbers = columns([row[:-1] for row in rows], left=0)
    lines = [f"  {line}  {row[-1]}" for line, row in zip(numbers, rows, strict=True)]
    note = (
        "  compute: forward and backward; exposed: all-reduce that nothing hides; broadcast: of the module, where\n"
        "  each step has one; efficiency: relative to 1 GPU. All in ms."
    )
    return "\n".join([_title(profile, plan), "", *lines, "", note]) + "\n"


def _cells(each: Prediction) -> tuple[str, ...]:
    parts = (each.compute_s, each.exposed_s, each.update_s, each.broadcast_s, each.input_s, each.host_s)
    times = (each.step_s, *parts)
    rate = f"{each.rows_per_second:,.0f}"
    return str(each.gpus), *(f"{1e3 * s:.3f}" for s in times), rate, f"{each.efficiency:.1%}", each.bottleneck


def _title(profile: StepProfile, plan: Plan) -> str:
    machine = plan.machine
    where = machine.name if isinstance(machine, HostMemory) else f"{machine.name}, {machine.gpus_per_node} GPUs a node"
    recorded = f"{profile.rows} rows on {plural(profile.ranks, 'rank')}"
    after = "" if plan.overlap else " after backward"
    return f"{profile.name}, {recorded}; {where}; {plan.scaling} scaling, all-reduce {plan.algorithm}{after}"


def _counts(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[1-9][0-9]{0,6}", part) for part in parts):
        raise ValueError(f"--gpus {text}: wanted whole numbers above 0, such as 8,64,1024")
    return sorted({int(part) for part in parts})


def _machine(args: argparse.Namespace) -> Machine:
    if args.topology != "host":
        return parse_topology(args.topology, GPUS_PER_NODE if args.gpus_per_node is None else args.gpus_per_node)
    if args.gpus_per_node is not None:
        raise ValueError("--gpus-per-node: host is this machine's memory, and has no nodes of GPUs")
    return this_host()


def _profile(args: argparse.Namespace) -> StepProfile:
    if args.step and args.example:
        raise ValueError(f"{args.step} and --example {args.example} are two steps: name one of them")
    return _read(args.step) if args.step else EXAMPLES[args.example or _EXAMPLE]


def _read(path: Path) -> StepProfile:
    try:
        return StepProfile.from_json(path.read_text())
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: there is no such file; mgpu explain --profile {path} writes one") from None
    except OSError as error:
        raise OSError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _write(path: Path, profile: StepProfile, plan: Plan, found: Sequence[Prediction]) -> None:
    content = {
        "format": FORMAT,
        "step": json.loads(profile.to_json()),
        "topology": plan.machine.name,
        "scaling": plan.scaling,
        "overlap": plan.overlap,
        "algorithm": plan.algorithm,
        "predictions": [
            asdict(each)
            | {"step_s": each.step_s, "rows_per_second": each.rows_per_second, "bottleneck": each.bottleneck}
            for each in found
        ],
    }
    write_whole(path, lambda stream: stream.write((json.dumps(content, indent=2) + "\n").encode()))
