"""Runs the cases of tests/cuda/one_gpu, each in a process of its own: `python cases.py OUT.jsonl [-k EXPRESSION]`.

A hang or a crash, and an error that leaves the GPU unusable, cost that case alone.  OUT.jsonl gets a line of JSON for
each case as it ends: its name, how it ended, its seconds, and the end of what one that failed has printed.

Exit status: 0 all passed or were skipped; 1 a case failed, or no time was left for it.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "tests/cuda/one_gpu"
CASE_SECONDS = 60.0  # of a process; most of it is the import of torch and the start of CUDA's libraries
MOST_JOBS = 12  # processes that share a GPU and its memory
PYTEST = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", ""]
CUT_OFF = "cut off"  # with the time of all
STATUS = {0: "passed", 1: "FAILED", 5: "skipped"}  # by pytest's exit status; 5: no test was chosen


def collected(expression: str, by: str) -> list[str]:
    """Return the ids of the cases, or their files."""
    command = [*PYTEST, "--collect-only", FOLDER, *(["-k", expression] if expression else [])]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    ids = [line for line in listed.stdout.splitlines() if "::" in line]
    if not ids:
        raise RuntimeError(f"no case was found:\n{listed.stdout[-2000:]}{listed.stderr[-2000:]}")
    return list(dict.fromkeys(each.partition("::")[0] for each in ids)) if by == "file" else ids


class Runs:
    """The cases that are left, shared by threads that run one at a time each.

    Args:
        cases: ids or files.
        seconds: after which no case is begun, and those that run are ended.
        jobs: how many run at a time: they share the cores.
        out: gets a line for each.
    """

    def __init__(self, cases: Sequence[str], seconds: float, jobs: int, out: TextIO) -> None:
        self._threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}
        self._left, self._out, self._end = deque(cases), out, time.monotonic() + seconds
        self._lock = threading.Lock()
        self.statuses: Counter[str] = Counter()

    def work(self) -> None:
        """Run cases until none is left."""
        while True:
            with self._lock:
                if not self._left:
                    return
                case = self._left.popleft()
            seconds = min(CASE_SECONDS, self._end - time.monotonic())
            begin = time.monotonic()
            status, said = run(case, seconds, self._threads) if seconds > 1 else ("not run", "")
            self._tell(case, status, time.monotonic() - begin, said)

    def _tell(self, case: str, status: str, seconds: float, said: str) -> None:
        with self._lock:
            self.statuses[status] += 1
            name = case.removeprefix(f"{FOLDER}/")
            figures = [line for line in said.splitlines() if line.startswith("figure: ")]
            failed = status not in ("passed", "skipped")
            result = {"case": name, "status": status, "seconds": round(seconds, 1), "figures": figures}
            print(json.dumps(result | ({"said": said[-3000:]} if failed else {})), file=self._out, flush=True)
            print(*figures, f"{status:7} {seconds:6.1f} s  {name}", sep="\n", flush=True)
            if failed:
                print(f"--- {name}\n{said[-3000:]}", flush=True)


def run(case: str, seconds: float, threads: Mapping[str, str]) -> tuple[str, str]:
    """Run a case in a process; return how it ended, and what it said.

    Args:
        case: its id, or a file.
        seconds: after which it is ended.
        threads: variables for its process: how many threads torch may use on the CPU.
    """
    child = subprocess.Popen(
        [*PYTEST, case], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env=os.environ | threads,
    )  # fmt: skip
    try:
        said, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGABRT)  # with PYTHONFAULTHANDLER it says where its threads are
        try:
            said, _ = child.communicate(timeout=3)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            said, _ = child.communicate()
        return "FAILED" if seconds == CASE_SECONDS else CUT_OFF, f"{said}\nno end within {seconds:.0f} s"
    if child.returncode == 0 and not re.search(r"[1-9]\d* passed", said):
        return "skipped", said
    return STATUS.get(child.returncode, "FAILED"), f"{said}\nexit status {child.returncode}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and runs the cases; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("-k", dest="expression", default="", help="these cases alone, as for pytest")
    jobs = min(MOST_JOBS, os.cpu_count() or 1)
    parser.add_argument("-j", dest="jobs", type=int, default=jobs, help="processes at a time")
    parser.add_argument("--by", choices=("case", "file"), default="case", help="what has a process of its own")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all of them together")
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    cases = collected(options.expression, options.by)
    with options.out.open("w") as out:
        runs = Runs(cases, options.seconds - (time.monotonic() - begin), options.jobs, out)
        threads = [threading.Thread(target=runs.work) for _ in range(options.jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print("cases:", ", ".join(f"{count} {status}" for status, count in sorted(runs.statuses.items())))
    return int(bool(set(runs.statuses) - {"passed", "skipped"}))


if __name__ == "__main__":
    sys.exit(main())
