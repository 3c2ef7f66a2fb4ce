"""The options of every command but `bench`, apart from the code that runs it: a help text needs no torch.

Each function adds the options of the command of its name. Those of `bench` are in `bench/options.py`.
"""

import argparse
import threading
from pathlib import Path

from mgpu_core.tools.explain.predict import SCALINGS
from mgpu_core.tools.explain.topology import FORM, GPUS_PER_NODE, known_names

__all__ = ["advise", "advise_options", "doctor", "explain", "lesson", "mnist", "run", "simulate"]

ADVISE_USAGE = "mgpu advise [options] script.py [options] [--] [arguments of the script]"


def advise(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mgpu advise`, and the words from the script on, which are parsed later."""
    parser.usage = ADVISE_USAGE
    _ranks(parser)
    advise_options(parser)
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="script.py", help="defines a net, a loss, a batch")


def advise_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that may stand before and after the script."""
    add = parser.add_argument
    add("--net", metavar="NAME", help="of the net in the script (default: net or model)")
    add("--loss", metavar="NAME", help="of the loss function (default: loss_fn, criterion or loss; it may be None)")
    add("--sample", metavar="NAME", help="of one batch, (inputs..., target) (default: sample, batch, or the loader's)")
    add("--loader", metavar="NAME", help="of an iterable of batches, measured too (default: loader or train_loader)")
    add("--devices", metavar="LIST", help="one per rank, such as 0,1 or cpu,cpu (default: all there are)")
    add("--batches", metavar="LIST", help="rows, such as 16,64,256 (default: the sample's, a quarter, four times)")
    add("--repeats", type=int, default=7, metavar="N", help="of each measurement (default: %(default)s)")
    add("--seconds", type=float, default=60.0, metavar="S", help="for all of it (default: %(default)s)")
    add("--device-memory", metavar="SIZE", help="of one device, such as 24GiB (default: as the GPUs say)")
    add("--inference", action="store_true", help="run the script, and measure Predictors of the net that it calls")
    add("--callers", type=int, metavar="N", help="threads that ask for one row each, with --inference (default: 16)")
    add("--json", type=Path, metavar="FILE", help="write all numbers")
    add("--plot", type=Path, metavar="FILE.png", help="draw speed-up by batch (needs matplotlib)")


def _ranks(parser: argparse.ArgumentParser) -> None:
    """Add the one `--ranks`, which stands before a script: behind it, it is the script's."""
    parser.add_argument("--ranks", type=int, metavar="N", help="run on N CPU ranks; accelerators are hidden")


def doctor(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mgpu doctor`."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the report as JSON")
    form.add_argument("--report", action="store_true", help="print it to be pasted into an issue, without home folders")
    parser.add_argument(
        "--p2p",
        action="store_true",
        help="test which GPUs reach each other's memory, and how fast (some seconds a pair; the verdict is kept)",
    )


def explain(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mgpu explain`."""
    add = parser.add_argument
    add("--skip", type=int, default=3, metavar="N", help="steps that pass first (default: %(default)s)")
    add("--steps", type=int, default=6, metavar="N", help="steps to record (default: %(default)s)")
    add("--html", type=Path, metavar="FILE", help="write the animated page")
    add("--trace", type=Path, metavar="FILE.json", help="write a trace for ui.perfetto.dev")
    add("--profile", type=Path, metavar="FILE.json", help="write the last step for `mgpu simulate`")
    add("script", type=Path, help="a Python script that uses mgpu_core")
    add("arguments", nargs=argparse.REMAINDER, help="of the script").required = False


def lesson(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `mgpu lesson` and their options."""
    words = parser.add_subparsers(dest="word", required=True, metavar="ACTION")
    words.add_parser("list", help="the lessons")
    _lesson(words, "show", "print the text of a lesson")
    running = _lesson(words, "run", "run the code of a lesson and draw its picture")
    _ranks(running)
    running.add_argument("--picture", type=Path, metavar="FILE.png", help="where to (default: lesson_NN.png, here)")
    _lesson(words, "start", "write the exercises of a lesson to lesson_NN.py, here")
    _lesson(words, "solution", "print the solution of a lesson's exercises")
    checking = _lesson(words, "check", "check the answers to a lesson's exercises")
    _ranks(checking)
    checking.add_argument("file", nargs="?", type=Path, metavar="FILE", help="default: lesson_NN.py, here")
    text = "that one exercise may take (default: %(default)g)"
    checking.add_argument("--limit", type=_seconds, default=30.0, metavar="SECONDS", help=text)


def _lesson(
    words: "argparse._SubParsersAction[argparse.ArgumentParser]", word: str, text: str
) -> argparse.ArgumentParser:
    parser = words.add_parser(word, help=text, description=text)
    parser.add_argument("number", type=int, metavar="N", help="the lesson's number")
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds that a clock can count, not {text}")
    return seconds


def mnist(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mgpu mnist`, for the fields of its `Config`, with the same defaults."""
    add = parser.add_argument
    add("--model", default="simplenet", metavar="NAME", help="simplenet or cnn (default: %(default)s)")
    text = "step (TrainStep), drop-in (DataParallel) or plain (default: %(default)s)"
    add("--engine", default="step", metavar="NAME", help=text)
    add("--device-ids", type=_device_ids, metavar="LIST", help="a device per rank: 0,1 or cpu,cpu (default: all GPUs)")
    _ranks(parser)
    add("--batch", type=int, default=64, metavar="N", help="rows per step (default: %(default)s)")
    add("--accumulate", type=int, default=1, metavar="K", help="batches per update (default: %(default)s)")
    text = "bfloat16 or float16: forward in this dtype, by the step engine (default: full precision)"
    add("--amp", metavar="DTYPE", help=text)
    add("--lr", type=float, default=0.01, metavar="X", help="step length of SGD (default: %(default)s)")
    add("--epochs", type=int, default=5, metavar="N", help="in all, resumed ones too (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="weights and order (default: %(default)s)")
    text = "builtin, download or a folder with MNIST's files"
    add("--data", dest="source", default="builtin", metavar="SOURCE", help=text)
    add("--save", type=Path, metavar="FILE", help="write a checkpoint after each epoch")
    add("--resume", type=Path, metavar="FILE", help="go on from a checkpoint, bit for bit")
    add("--plot", type=Path, metavar="FILE.png", help="draw the curves at the end")
    add("--explain", type=Path, metavar="FILE.html", help="write a page that plays some of the steps")


def _device_ids(text: str) -> tuple[int | str, ...]:
    """`"0,cpu,cuda:1"` to `(0, "cpu", "cuda:1")`. Whether they exist is asked later."""
    entries = [entry.strip() for entry in text.split(",")]
    return tuple(int(entry) if entry.isdecimal() else entry for entry in entries)


def run(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mgpu run`."""
    add = parser.add_argument
    _ranks(parser)
    text = "auto: wrap the first optimizer's net, if the script does not"
    add("--wrap", choices=("none", "auto"), default="none", help=text)
    add("--dim", type=int, default=0, metavar="N", help="the dimension of the rows, for --wrap auto (default: 0)")
    add("--explain", type=Path, metavar="FILE.html", help="record a step, and write the page that plays it")
    add("--advise", action="store_true", help="afterwards measure one device against many on the net that was trained")
    add("-m", dest="is_module", action="store_true", help="the script is the name of a module, as for `python -m`")
    add("script", type=Path, help="a Python script that uses torch.nn.DataParallel")
    add("arguments", nargs=argparse.REMAINDER, help="of the script").required = False


def simulate(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mgpu simulate`."""
    add = parser.add_argument
    add("step", type=Path, metavar="STEP.json", help="a recorded step: mgpu explain --profile STEP.json")
    add("--gpus", default="8,64,1024", metavar="LIST", help="how many GPUs (default: %(default)s)")
    add("--topology", default="nvlink4+ib-ndr400", help=f"{FORM}; {known_names()} (default: %(default)s)")
    add("--gpus-per-node", type=int, default=GPUS_PER_NODE, metavar="N", help="of the topology (default: %(default)s)")
    text = "keep the rows of each GPU (weak), or of all (strong; default: %(default)s)"
    add("--scaling", choices=SCALINGS, default="weak", help=text)
