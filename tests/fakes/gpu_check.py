"""A clone with the mechanism of the GPU checks alone, and stages of the test's own."""

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SYSTEM = "/usr/bin:/bin"

SCRIPT = """
set -uo pipefail
readonly SCRIPT=check.sh NEEDED_GPUS=1 TOTAL_SECONDS=60
readonly STAGES=(facts one two beside)
declare -A LIMIT=([facts]=10 [one]=20 [two]=20 [beside]=20)
declare -A SHOWS=([facts]="the machine" [one]="the first" [two]="the second" [beside]="at the same time")
source "$(dirname "${BASH_SOURCE[0]}")/gpu_check/common.sh"
other() { stage beside; }
run_stages() {
  stage facts
  second_lane other
  stage one
  wait_for_second_lane
  stage two
}
main "$@"
"""

STAGES = """
echo "$1 $GPU_CHECK_LIMIT $MGPU_BENCH_COMMIT" >> "$CALLS"
case $1 in
  facts) echo "torch: 2.11.0"; exit 0 ;;
  *) eval "${!1:-exit 0}" ;;
esac
"""


class Machine:
    """A folder with the clone, a fake nvidia-smi, and what came of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out, self.clone = folder, folder / "out", folder / "clone"
        checks = self.clone / "benchmarks" / "gpu_check"
        checks.mkdir(parents=True)
        shutil.copy(ROOT / "benchmarks" / "gpu_check" / "common.sh", checks)
        (checks.parent / "check.sh").write_text(SCRIPT)
        (checks / "stages.sh").write_text(STAGES)
        (folder / "bin").mkdir()
        smi = folder / "bin" / "nvidia-smi"
        smi.write_text('#!/bin/bash\nfor i in $(seq "${FAKE_GPUS:-1}"); do echo "Fake GPU, 580.1"; done\n')
        smi.chmod(0o755)

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        """Start the check; a variable with the name of a stage is what that stage does."""
        own = {"PATH": f"{self.folder / 'bin'}:{SYSTEM}", "CALLS": str(self.folder / "calls"), "HOME": str(self.folder)}
        own |= {"GPU_CHECK_WORK": str(self.folder / "work"), "GPU_CHECK_COMMIT": "abc123", "GIT_DIR": os.devnull}
        command = ["bash", str(self.clone / "benchmarks" / "check.sh"), *arguments]
        environment, pipe = {**own, **variables}, subprocess.PIPE
        return subprocess.Popen(command, cwd=self.folder, env=environment, stdout=pipe, stderr=pipe, text=True)

    def run(self, *arguments: str, **variables: str) -> tuple[int, str]:
        """Exit status and stderr."""
        child = self.start(*arguments, **variables)
        _, errors = child.communicate(timeout=60)
        return child.returncode, errors

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()

    @property
    def summary(self) -> str:
        return (self.out / "summary.md").read_text()

    @property
    def status(self) -> dict[str, str]:
        """What the summary's table says of each stage."""
        rows = [line.strip("| ").split(" | ") for line in self.summary.splitlines() if line.startswith("| ")]
        return {stage: status for stage, _, status, *_ in rows[1:]}

    def logs(self) -> list[str]:
        with tarfile.open(self.out / "logs.tgz") as archive:
            return sorted(archive.getnames())
