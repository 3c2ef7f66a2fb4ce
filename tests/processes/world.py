"""Real processes of a gloo group for a test: forked from a server that has imported torch, so that they start at once.

`run(script, ...)` calls `script(process, *args)` in each of them, in a folder of its own, and returns what they return.
"""

import faulthandler
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import torch
from torch import distributed

SECONDS = 60.0
GROUP_SECONDS = 30.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch._dynamo", "torch.distributed", "mgpu_core"])  # all that takes its time


class Ended:
    """What a process that did not return has left: its exit status."""

    def __init__(self, status):
        self.status = status


def run(script, *args, processes=2, may_end=False):
    """What `script(process, *args)` returns in each process; raises what one of them raises.

    With `may_end` a process may die; its entry in the list is then `Ended`.
    """
    index = inspect.getfile(script), script.__name__  # whatever name pytest has imported it by
    with tempfile.TemporaryDirectory() as folder:
        ends = [_context.Pipe(duplex=False) for _ in range(processes)]
        started = [
            _context.Process(target=_process, args=(sends, index, process, processes, folder, args), daemon=True)
            for process, (_, sends) in enumerate(ends)
        ]
        try:
            for each in started:
                each.start()
            for _, sends in ends:
                sends.close()
            return [_answer(each, receives, may_end) for each, (receives, _) in zip(started, ends, strict=True)]
        finally:
            for each in started:
                each.kill()
                each.join()


def _answer(process, receives, may_end):
    ready = wait([receives, process.sentinel], SECONDS)
    assert ready, "a process hangs"
    try:
        kind, value = pickle.loads(receives.recv_bytes())
    except EOFError:
        process.join(SECONDS)
        assert may_end, f"a process ended with {process.exitcode}"
        return Ended(process.exitcode)
    assert kind == "returned", value
    return value


def _script_at(path, name):
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def _process(sends, index, process, processes, folder, args):
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.dump_traceback_later(SECONDS - 5, file=sys.__stderr__)
    torch.set_num_threads(1)
    torch.manual_seed(process)
    try:
        store = distributed.FileStore(str(Path(folder) / "store"), processes)
        distributed.init_process_group(
            "gloo", store=store, rank=process, world_size=processes, timeout=timedelta(seconds=GROUP_SECONDS)
        )
        answer = "returned", _script_at(*index)(process, *args)
    except BaseException:
        answer = "raised", traceback.format_exc()
    sends.send_bytes(pickle.dumps(answer))  # tensors whole: torch's own way is to share memory, which ends with us
    sends.close()
    sys.stdout.flush()
    os._exit(0)
