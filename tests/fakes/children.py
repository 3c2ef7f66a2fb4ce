"""Programs that tests run in processes of their own, and that print ``right`` when all was right."""

import subprocess


def finish(child: "subprocess.Popen[str]", seconds: float = 100) -> None:
    """Wait for the end of a child and require that it printed the line ``right`` and ended well.

    The line may stand anywhere: what a library prints by C's stdio into a pipe, as NCCL its version, is written out
    only when the process ends.
    """
    try:
        said, _ = child.communicate(timeout=seconds)
    finally:
        child.kill()
    assert (child.returncode, "right" in said.splitlines()) == (0, True), said[-3000:]
