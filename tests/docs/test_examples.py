"""The examples run on 1, 2 and 3 ranks, and so does every block of code in the migration guide."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent.parent / "docs"
EXAMPLES = sorted((DOCS / "examples").glob("*.py"))
GUIDE = (DOCS / "migration.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", GUIDE, flags=re.MULTILINE | re.DOTALL)


def run(path, *arguments, **variables):
    """Its output; small operations, so one thread each."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-P", str(path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_there_are_three_examples_and_the_guide_names_them():
    assert [path.stem for path in EXAMPLES] == ["detection", "image_classifier", "text_classification"]
    for path in EXAMPLES:
        assert f"(examples/{path.name})" in GUIDE


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_learns(path, ranks):
    told = run(path, "--ranks", str(ranks))
    assert told.startswith(f"{ranks} ranks")
    losses = [float(loss) for loss in re.findall(r": loss (\d+\.\d+)", told)]
    assert len(losses) > 3
    assert losses[-1] < losses[0] / 2


def test_example_runs_on_what_there_is():
    assert "4 ranks" in run(EXAMPLES[0], MGPU_CORE_CPU_RANKS="4", CUDA_VISIBLE_DEVICES="")


def test_the_guide_has_code():
    assert len(BLOCKS) >= 9


@pytest.mark.parametrize("place", range(len(BLOCKS)))
def test_block_of_the_guide_runs(place):
    source = BLOCKS[place]
    line = GUIDE[: GUIDE.index(source)].count("\n")
    exec(compile("\n" * line + source, str(DOCS / "migration.md"), "exec"), {"__name__": f"block_{place}"})


LINKS = re.findall(r"\]\(([^)#]+)\)", GUIDE)


@pytest.mark.parametrize("link", LINKS)
def test_link_of_the_guide_leads_somewhere(link):
    assert (DOCS / link).exists()
