"""`mgpu simulate`: a recorded step at sizes that you do not have.  Step time, efficiency, bottleneck; a plot.

``predict`` makes the prediction, with the formulas of ``cost``; this file is the command line and its table.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mgpu_core.support.extras import require
from mgpu_core.support.files import check_outputs, check_picture, write_whole
from mgpu_core.support.tables import Lines, Table, show, text_of
from mgpu_core.tools.explain.cost import StepProfile
from mgpu_core.tools.explain.example_steps import EXAMPLES, NOTE
from mgpu_core.tools.explain.fit import this_host
from mgpu_core.tools.explain.predict import Plan, Prediction, predict_step
from mgpu_core.tools.explain.predict_pipeline import predict_pipeline
from mgpu_core.tools.explain.predict_tensor_parallel import predict_tensor_parallel
from mgpu_core.tools.explain.scene import plural
from mgpu_core.tools.explain.simulate_plot import draw
from mgpu_core.tools.explain.topology import (
    GPUS_PER_NODE,
    HostMemory,
    Machine,
    Topology,
    parse_topology,
)

__all__ = ["render", "run", "simulate"]

FORMAT = "mgpu_core simulation 1"
_EXAMPLE = "resnet50"
_FROM_CPU = """\
note: this step was recorded on CPU ranks, so its compute times are a CPU's. Record it on the kind of GPU whose cluster
you ask about: mgpu explain --profile. For this machine's CPU ranks: --topology host."""
_GPUS, _STAGES, _CHUNKS = "8,64,1024", "2,4,8", "4,16,64"
_PIPELINE_TITLES = ("GPUs", "chunks", "step ms", "idle", "bubble", "rows/s", "speed-up")
_PARTS_TITLES = ("GPUs", "step ms", "compute", "joints", "steps/s", "speed-up")
_TITLES = (
    *("GPUs", "step ms", "compute", "exposed", "update", "broadcast", "input", "host"),
    *("rows/s", "efficiency", "bottleneck"),
)


def run(args: argparse.Namespace) -> int:
    """Print the table, and write the files asked for."""
    check_outputs([path for path in (args.plot, args.json) if path], [args.step] if args.step else [])
    if args.plot is not None:
        check_picture(args.plot)
        require("matplotlib", "a picture")
    profile, machine = _profile(args), _machine(args)
    if args.pipeline and args.tensor_parallel:
        raise ValueError("--pipeline and --tensor-parallel cut a net in two ways: name one of them")
    if not args.pipeline:
        _refuse(args, "without --pipeline", "chunks", "schedule", "border_nbytes")
    if not args.tensor_parallel:
        _refuse(args, "without --tensor-parallel", "joints", "joint_nbytes")
    if args.pipeline:
        return _run_pipeline(args, profile, machine)
    if args.tensor_parallel:
        return _run_tensor_parallel(args, profile, machine)
    gpus = _counts("--gpus", args.gpus or _GPUS)
    plan = Plan(machine, args.scaling or "weak", not args.no_overlap, args.algorithm or "auto")
    found = simulate(profile, gpus, plan)
    if args.json is not None:
        _write(args.json, profile, plan, found)
    if args.plot is not None:
        draw(_title(profile, plan), found, args.plot)
    show(_lines(profile, plan, found))
    _print_notes(args, profile, machine)
    return 0


def _print_notes(args: argparse.Namespace, profile: StepProfile, machine: Machine) -> None:
    if not args.step:
        print(f"\n{NOTE}")
    if profile.device == "cpu" and not isinstance(machine, HostMemory):
        print(f"\n{_FROM_CPU}")


def _run_pipeline(args: argparse.Namespace, profile: StepProfile, machine: Machine) -> int:
    machine = _links(args, machine, "--pipeline")
    if args.border_nbytes is not None:
        profile = replace(profile, border_nbytes=args.border_nbytes)
    gpus, chunks = _counts("--gpus", args.gpus or _STAGES), _counts("--chunks", args.chunks or _CHUNKS)
    schedule = args.schedule or "1f1b"
    found = [predict_pipeline(profile, each, count, machine, schedule) for each in gpus for count in chunks]
    title = f"{profile.name}, {profile.rows / profile.ranks:g} rows; {machine.name}; pipeline, {schedule}"
    if args.json is not None:
        _write_json(args.json, profile, {"topology": machine.name, "schedule": schedule}, list(map(asdict, found)))
    rows = [
        (f"{each.gpus}", f"{each.chunks}", f"{each.step_s * 1e3:.3f}", f"{each.idle:.1%}", f"{each.bubble:.1%}",
         f"{each.rows_per_second:,.0f}", f"{each.speedup:.2f}")
        for each in found
    ]  # fmt: skip
    about = (
        "idle: of the stages' time in forward and backward; bubble: the schedule's own part of it, with equal times;"
    )
    show(_lines_on_parts(title, [_PIPELINE_TITLES, *rows], about))
    _print_notes(args, profile, machine)
    return 0


def _lines_on_parts(title: str, rows: Sequence[Sequence[str]], about: str) -> Lines:
    """Return the table of a net that is cut, with its legend."""
    speed_up = "  speed-up: relative to 1 GPU, which must hold the whole net."
    return [title, "", Table(rows, (), "  "), "", f"  {about}", speed_up]


def _links(args: argparse.Namespace, machine: Machine, way: str) -> Topology:
    """Return the links of a net that is cut; refuse options that mean nothing there."""
    _refuse(args, f"with {way}", "scaling", "algorithm", "no_overlap", "plot")
    if isinstance(machine, HostMemory):
        raise ValueError("--topology host: parts on CPU ranks share the cores, which is not predicted; run it")
    return machine


def _run_tensor_parallel(args: argparse.Namespace, profile: StepProfile, machine: Machine) -> int:
    links = _links(args, machine, "--tensor-parallel")
    given = {name: getattr(args, name) for name in ("joints", "joint_nbytes") if getattr(args, name) is not None}
    profile = replace(profile, **given)
    gpus = _counts("--gpus", args.gpus or _STAGES)
    found = [predict_tensor_parallel(profile, each, links) for each in gpus]
    if args.json is not None:
        _write_json(args.json, profile, {"topology": machine.name}, list(map(asdict, found)))
    rows = [
        (f"{each.gpus}", f"{each.step_s * 1e3:.3f}", f"{each.compute_s * 1e3:.3f}", f"{each.joint_s * 1e3:.3f}",
         f"{each.steps_per_second:,.1f}", f"{each.speedup:.2f}")
        for each in found
    ]  # fmt: skip
    title = f"{profile.name}, {profile.joints} joints; {machine.name}; tensor parallel"
    about = "compute: forward and backward; joints: the all-reduces after cut layers, in both; all in ms."
    show(_lines_on_parts(title, [_PARTS_TITLES, *rows], about))
    _print_notes(args, profile, machine)
    return 0


def _refuse(args: argparse.Namespace, when: str, *names: str) -> None:
    for name in names:
        if getattr(args, name) not in (None, False):
            raise ValueError(f"--{name.replace('_', '-')} means nothing {when}")


def simulate(profile: StepProfile, gpus: Sequence[int], plan: Plan) -> list[Prediction]:
    """Return one prediction per number of GPUs.

    Raises:
        ValueError: numbers that the machine cannot have, or fewer rows than GPUs.
    """
    return [predict_step(profile, count, plan) for count in gpus]


def render(profile: StepProfile, plan: Plan, found: Sequence[Prediction]) -> str:
    """Return title, table and legend, ending with a newline."""
    return text_of(_lines(profile, plan, found)) + "\n"


def _lines(profile: StepProfile, plan: Plan, found: Sequence[Prediction]) -> Lines:
    note = (
        "  compute: forward and backward; exposed: all-reduce that nothing hides; broadcast: of the module, where\n"
        "  each step has one; efficiency: relative to 1 GPU. All in ms."
    )
    table = Table([_TITLES, *map(_cells, found)], {len(_TITLES) - 1}, "  ")
    return [_title(profile, plan), "", table, "", note]


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


def _counts(option: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[1-9][0-9]{0,6}", part) for part in parts):
        raise ValueError(f"{option} {text}: wanted whole numbers above 0, such as 8,64,1024")
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
    about = {
        "topology": plan.machine.name,
        "scaling": plan.scaling,
        "overlap": plan.overlap,
        "algorithm": plan.algorithm,
    }
    computed = ("step_s", "rows_per_second", "bottleneck")
    predictions = [asdict(each) | {name: getattr(each, name) for name in computed} for each in found]
    _write_json(path, profile, about, predictions)


def _write_json(path: Path, profile: StepProfile, about: dict[str, Any], predictions: list[dict[str, Any]]) -> None:
    content = {"format": FORMAT, "step": json.loads(profile.to_json()), **about, "predictions": predictions}
    write_whole(path, lambda stream: stream.write((json.dumps(content, indent=2) + "\n").encode()))
