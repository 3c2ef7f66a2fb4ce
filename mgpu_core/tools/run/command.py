"""`mgpu run script.py`: a script that uses torch.nn.DataParallel runs as it is, on ours."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from pathlib import Path

from mgpu_core.devices.devices import has_accelerator
from mgpu_core.support.files import check_outputs
from mgpu_core.support.tables import show
from mgpu_core.tools.advise.watching import Watch, watching
from mgpu_core.tools.cpu_ranks import on_cpu_ranks
from mgpu_core.tools.explain.recorder import explain
from mgpu_core.tools.explain.trace import Trace
from mgpu_core.tools.run.advice import advise_training, remade
from mgpu_core.tools.run.names import Replaced, replacing_torch
from mgpu_core.tools.user_script import Program, note_order, script_status

__all__ = ["run"]

_SKIP, _STEPS = 3, 6
_OPTIONS = ("--ranks", "--wrap", "--dim", "--explain", "--advise", "-m")


def run(args: argparse.Namespace) -> int:
    """Run the script; say on stderr which names were replaced, which nets were wrapped, and what stayed torch's.

    Returns:
        The script's exit status; 1 after an error in it, or if nothing was recorded with ``--explain``.
    """
    program = Program.of_module(str(args.script)) if args.is_module else Program(args.script)
    if not program.path.is_file():
        raise FileNotFoundError(f"{program.path}: there is no such script")
    check_outputs([args.explain] if args.explain else [], [program.path])
    here, process = Path.cwd(), os.getpid()
    arguments = args.arguments[1:] if args.arguments[:1] == ["--"] else args.arguments
    note_order("mgpu run", _OPTIONS, args.arguments)
    trace, watch = Trace(), Watch()
    with ExitStack() as stack:
        stack.enter_context(on_cpu_ranks(args.ranks, hide=True))
        replaced = stack.enter_context(replacing_torch(wrap=args.wrap, dim=args.dim))
        if args.advise:
            watch = stack.enter_context(watching(training=True))
        if args.explain:
            trace = stack.enter_context(explain(skip=_SKIP, steps=_STEPS))
        status = script_status(program.path, arguments, program.spec)
    if os.getpid() != process:  # a child that the script has forked came out here
        return status
    lines = _told(replaced, args, status)
    if status and "RANK" not in os.environ and "init_process_group" in program.path.read_text(errors="replace"):
        lines.append(_PROCESSES)
    for line in lines:
        print(f"mgpu run: {line}", file=sys.stderr)
    if args.explain and (not status or trace.steps):  # also after Ctrl-C, or an error late in the script
        saved = _save(trace, here, args.explain)
        status = status or saved
    if args.advise and not status:
        seen = watch.best()
        if seen is None:
            raise ValueError(
                "no net with parameters was called in training mode, so there is nothing to advise on. A call of "
                "net.forward(...) is seen with --wrap auto alone: call the net itself"
            )
        optimizer, name = remade(watch.optimizer_of(seen.bare_net), seen.bare_net)
        with on_cpu_ranks(args.ranks):
            advice = advise_training(seen, optimizer, args.ranks)
        net = type(seen.bare_net).__name__
        show([f"net: {net}, the one that was called most often; optimizer: {name}", *advice.lines])
    return status


_PROCESSES = (
    "note: this script wants a process per device (init_process_group), which torchrun starts; mgpu run drives all "
    "devices from one process, and needs the script without process groups and DistributedDataParallel"
)
_TRAINER = "a Trainer of transformers uses all devices as mgpu_core.integrations.transformers.MultiGPUTrainer"


def _told(replaced: Replaced, args: argparse.Namespace, status: int) -> list[str]:
    """Return the lines on a run: which nets were wrapped, and help where none was, or where the script failed."""
    used = replaced.uses
    has_trainer = "transformers.trainer" in sys.modules
    if status:
        hints = [f"note: {each}" for each in (*replaced.hints, *[_TRAINER] * has_trainer)] if replaced.hints else []
        return [*used, *hints]
    on_host = not has_accelerator()
    if used:
        is_plain = on_host and args.ranks is None and any("as the plain module" in line for line in used)
        note = "note: there is no accelerator, so it ran on one device: --ranks N makes N CPU ranks"
        return [*used, *(f"left: {each}" for each in replaced.left), *[note] * is_plain]
    options = "--ranks N --wrap auto" if on_host and args.ranks is None else "--wrap auto"
    cure = _TRAINER if has_trainer else f"{options} wraps the net of the first optimizer"
    ran = f"ran as python runs it{', on one device, the CPU' * on_host}: nothing was wrapped"
    return [ran, *(f"left: {each}" for each in replaced.left), *[f"note: {cure}"] * (args.wrap == "none")]


def _save(trace: Trace, here: Path, path: Path) -> int:
    """Write the page and print the table; return the status."""
    if not trace.steps:
        print(
            f"mgpu run: error: nothing was recorded: fewer than {_SKIP + 1} steps or forwards of wrappers",
            file=sys.stderr,
        )
        return 1
    trace.save_html(here / path)  # the script may have gone to another folder
    show(["", *trace.lines(), f"written: {path}"])
    return 0
