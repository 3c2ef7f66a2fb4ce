"""`mgpu advise script.py`: measures one device against many on the model that a script defines.

With `--inference` it runs the whole script, watches which net it calls for inference, and measures Predictors of it.

Options may stand before and after the script; after it, `--ranks` and unknown options are the script's, and so is
everything after `--`. So argparse gets two turns: the words before the script, then those after it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mgpu_core.devices.devices import CPU, DeviceLike, as_devices, default_devices
from mgpu_core.support.extras import require
from mgpu_core.support.files import check_outputs, check_picture, write_whole
from mgpu_core.support.progress import Progress
from mgpu_core.support.tables import show
from mgpu_core.tools.advise.benchmark import stopwatch
from mgpu_core.tools.advise.inference import advise_inference
from mgpu_core.tools.advise.measure import advised
from mgpu_core.tools.advise.plan import CPU_RANKS, AdvicePlan, plan_of
from mgpu_core.tools.advise.script import Chosen, Found, ScriptFailed, check_names, found_in, run_script, run_to_end
from mgpu_core.tools.advise.watching import watching
from mgpu_core.tools.cpu_ranks import on_cpu_ranks
from mgpu_core.tools.options import ADVISE_USAGE, advise_options
from mgpu_core.tools.user_script import as_script, note_order, top_level_names

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Print the advice, and write the files asked for.

    Returns:
        0; the script's own status if it failed; 1 if no way can be recommended.
    """
    script, arguments, args = _split(args)
    if not script.is_file():
        raise FileNotFoundError(f"{script}: there is no such script")
    check_outputs([path for path in (args.json, args.plot) if path], [script])
    here = Path.cwd()  # the script may go to another folder
    if args.plot is not None:
        check_picture(args.plot)
        require("matplotlib", "a picture")
    devices, batches = _devices(args), _batches(args.batches)
    if args.inference:
        return _run_inference(script, arguments, devices, batches, args)
    if args.callers is not None:
        raise ValueError("--callers needs --inference")
    _nbytes(args.device_memory)  # before the script runs
    chosen = Chosen(args.net, args.loss, args.sample, args.loader)
    defined = top_level_names(script)
    if defined is not None:
        check_names(defined, chosen, script)  # before minutes of a script have passed
    with as_script(script, arguments), on_cpu_ranks(args.ranks, hide=True):
        try:
            training = found_in(run_script(script), chosen, script)
        except ScriptFailed as failure:
            return int(failure.args[0])
        plan = _plan(training, devices, batches, args)
        with Progress("mgpu advise") as progress:
            advice = advised(plan, stopwatch(plan.distinct_devices), progress)
    _show(script, advice, args, here)
    return 0 if advice.recommendation.way else 1


def _show(script: Path, advice: Any, args: argparse.Namespace, here: Path) -> None:
    """Write the files asked for, and print the advice."""
    if args.json is not None:
        write_whole(here / args.json, lambda file: file.write(advice.to_json().encode()))
    if args.plot is not None:
        advice.plot(here / args.plot)
    first, *others = advice.lines
    show([f"{script}: {first}", *others])
    for path in filter(None, (args.json, args.plot)):
        print(f"written: {path}")


def _run_inference(
    script: Path,
    arguments: list[str],
    devices: Sequence[DeviceLike] | None,
    batches: Sequence[int] | None,
    args: argparse.Namespace,
) -> int:
    """Run the script to its end, measure the net that it called most often, and print the advice."""
    for name in ("net", "loss", "sample", "loader", "device_memory", "plot"):
        if getattr(args, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} has no effect with --inference: leave it out")
    callers = 16 if args.callers is None else args.callers
    if callers < 1 or not args.seconds > 0:
        raise ValueError(f"--callers and --seconds must be above 0, not {callers} and {args.seconds:g}")
    here = Path.cwd()
    with as_script(script, arguments), on_cpu_ranks(args.ranks, hide=True):
        try:
            with watching() as watch:
                ranks = as_devices(default_devices() or [CPU] * CPU_RANKS if devices is None else devices)
                run_to_end(script)
        except ScriptFailed as failure:
            return int(failure.args[0])
        seen = watch.best()
        if seen is None:
            raise ValueError(
                f"{script} calls no torch.nn.Module with parameters in eval mode or without gradients, and no Predictor"
            )
        options = {"batches": batches, "callers": callers, "seconds": args.seconds}
        try:
            with Progress("mgpu advise") as progress:
                advice = advise_inference(seen.bare_net, seen.call, ranks, **options, report=progress)
        except TypeError as error:  # an argument that cannot be split into rows
            raise ValueError(str(error)) from error
    _show(script, advice, args, here)
    return 0 if advice.sentences else 1


def _split(args: argparse.Namespace) -> tuple[Path, list[str], argparse.Namespace]:
    """Return the script, its arguments, and all options."""
    parser = argparse.ArgumentParser(
        prog="mgpu advise", usage=ADVISE_USAGE, description="See `mgpu advise --help`.", allow_abbrev=False
    )
    advise_options(parser)
    words = list(args.words)
    if words[:1] == ["--"]:
        words = words[1:]
    if not words:
        parser.error("a script is wanted")
    script, rest = Path(words[0]), words[1:]
    end = rest.index("--") if "--" in rest else len(rest)
    args, others = parser.parse_known_args(rest[:end], args)
    note_order("mgpu advise", ["--ranks"], others)
    return script, [*others, *rest[end + 1 :]], args


def _devices(args: argparse.Namespace) -> list[DeviceLike] | None:
    if args.ranks is not None and args.devices is not None:
        raise ValueError("--ranks and --devices both say which devices there are: leave one out")
    if args.devices is None:
        return None if args.ranks is None else [CPU] * args.ranks
    return [int(each) if each.isdecimal() else each for each in _parts(args.devices)]


def _batches(text: str | None) -> list[int] | None:
    if text is None:
        return None
    if not all(re.fullmatch("[1-9][0-9]{0,8}", each) for each in _parts(text)):
        raise ValueError(f"--batches {text}: wanted whole numbers above 0, such as 16,64,256")
    return [int(each) for each in _parts(text)]


def _nbytes(text: str | None) -> int | None:
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]iB)", text)
    if not match:
        raise ValueError(f"--device-memory {text}: wanted a number and KiB, MiB, GiB or TiB, such as 24GiB")
    return int(float(match[1]) * 1024 ** (1 + "KMGT".index(match[2][0])))


def _parts(text: str) -> list[str]:
    return [each.strip() for each in text.split(",")]


def _plan(
    training: Found, devices: Sequence[DeviceLike] | None, batches: Sequence[int] | None, args: argparse.Namespace
) -> AdvicePlan:
    """Return the plan; a mistake of the caller becomes one line, whatever its class."""
    sample: Any = tuple(training.sample) if isinstance(training.sample, list) else training.sample
    try:
        return plan_of(
            training.net, training.loss_fn, sample, device_ids=devices, batches=batches, optimizer=None,
            loader=training.loader, repeats=args.repeats, seconds=args.seconds,
            device_nbytes=_nbytes(args.device_memory),
        )  # fmt: skip
    except TypeError as error:
        raise ValueError(str(error)) from error
