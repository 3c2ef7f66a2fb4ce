"""A machine for gpu_check.sh and gpu_check_many.sh: fakes of all that they start."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SYSTEM = "/usr/bin:/bin"

FAKES = {
    "nvidia-smi": 'for i in $(seq "${FAKE_GPUS:-1}"); do echo "Fake GPU, 580.1"; done; exit ${FAKE_GPU:-0}',
    "cmake": """
[[ $1 != --build ]] || { mkdir -p "$2/tests/cpp"; cp "$(dirname "$0")/program" "$2/tests/cpp/$4"; }
exit ${FAKE_CMAKE:-0}""",
    "program": 'echo "12 checks passed"; [[ $0 != *"${FAKE_PROGRAM:-no such program}" ]]',
    "compute-sanitizer": 'echo "== ERROR SUMMARY: ${FAKE_SANITIZER:-0} errors"; exit ${FAKE_SANITIZER:-0}',
    "python3": f"""
case $* in
  *"pip install"*) exit ${{FAKE_PIP:-0}} ;;
  *"-m pytest"*)
    [[ -z ${{FAKE_SLEEP:-}} ]] || {{ echo $$ > "$FAKE_FOLDER/sleeper"; exec sleep "$FAKE_SLEEP"; }}
    echo "${{FAKE_TESTS:-3 passed, 1 skipped in 0.1s}}"
    exit ${{FAKE_PYTEST:-0}} ;;
  *doctor*)
    echo '{{"torch": {{"version": "2.11.0", "cuda": "13.0"}}, "nccl": {{"version": "2.28.9"}}, '
    echo '"python": {{"version": "3.12"}}, "mgpu_core": "0.1.0"}}' ;;
  *bench.py*)
    echo "== pack"
    echo "device cuda, size 4: 0.170 ms, 0.95 x copy"
    echo "* held: device cuda: copy / ours >= 0.9 (0.95)"
    echo "* MISSED: device cuda: copy / ours >= 0.9 (0.80)"
    exit ${{FAKE_BENCH:-0}} ;;
  *many.py*)
    echo "figure: the check is right"
    [[ $* != *"${{FAKE_WRONG:-no such check}}"* ]] ;;
  *"import pytest"*) exit ${{FAKE_NO_PYTEST:-0}} ;;
  *"import json"*) exec {sys.executable} "$@" ;;
  *) exit ${{FAKE_IMPORT:-0}} ;;
esac""",
}


class Machine:
    """A folder with a clone, fakes, and what came of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out, self.clone = folder, folder / "out", folder / "clone"
        shutil.copytree(ROOT / "benchmarks" / "gpu_check", self.clone / "benchmarks" / "gpu_check")
        for script in ("gpu_check.sh", "gpu_check_many.sh"):
            shutil.copy(ROOT / "benchmarks" / script, self.clone / "benchmarks")
        (self.clone / "tests" / "cuda").mkdir(parents=True)
        (self.clone / "tests" / "cuda" / "test_nccl.py").touch()
        (folder / "bin").mkdir()
        for name, body in FAKES.items():
            path = folder / "bin" / name
            path.write_text(f'#!/bin/bash\necho "{name} $*" >> "$FAKE_FOLDER/calls"\n{body}\n')
            path.chmod(0o755)

    def start(self, *arguments: str, script: str = "gpu_check.sh", **fakes: str) -> subprocess.Popen[str]:
        own = {"PATH": f"{self.folder / 'bin'}:{SYSTEM}", "FAKE_FOLDER": str(self.folder), "HOME": str(self.folder)}
        own |= {"GPU_CHECK_WORK": str(self.folder / "work"), "GPU_CHECK_COMMIT": "abc123"}
        command = ["bash", str(self.clone / "benchmarks" / script), *arguments]
        environment, pipe = {**own, **fakes}, subprocess.PIPE
        return subprocess.Popen(command, cwd=self.folder, env=environment, stdout=pipe, stderr=pipe, text=True)

    def run(self, *arguments: str, **fakes: str) -> tuple[int, str]:
        """Exit status and stderr."""
        child = self.start(*arguments, **fakes)
        _, errors = child.communicate(timeout=60)
        return child.returncode, errors

    @property
    def calls(self) -> str:
        return (self.folder / "calls").read_text()

    @property
    def summary(self) -> str:
        return (self.out / "summary.md").read_text()

    @property
    def status(self) -> dict[str, str]:
        """What the summary's table says of each stage."""
        rows = [line.strip("| ").split(" | ") for line in self.summary.splitlines() if line.startswith("| ")]
        return {stage: status for stage, _, status, *_ in rows[1:]}
