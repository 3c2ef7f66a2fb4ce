"""The examples run on 1, 2 and 3 ranks, and every block of code in the guides runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parent.parent.parent / "docs"
SEVERAL_PROCESSES = DOCS / "examples" / "several_processes.py"  # has tests of its own, in tests/processes
SMALL_GPT = DOCS / "examples" / "small_gpt.py"
SERVE = DOCS / "examples" / "serve.py"  # is tested in tests/inference
PLOTTING = DOCS / "examples" / "plotting.py"
ALL = sorted(set((DOCS / "examples").glob("*.py")) - {PLOTTING})
EXAMPLES = [path for path in ALL if path not in (SEVERAL_PROCESSES, SMALL_GPT, SERVE)]
LOSS = re.compile(r": (?:loss|energy distance) (\d+\.\d+)")
GUIDE = (DOCS / "migration.md").read_text()
# Their code runs elsewhere, in the file of tests named: from top to bottom, with other programs, or as a notebook.
ELSEWHERE = {
    "advise.md": "tools/advise/test_page.py",
    "device_map.md": "integrations/test_pages.py",
    "explain.md": "docs/test_readme.py",
    "fine_tuning.md": "integrations/test_pages.py",
    "notebook_two_gpus.md": "notebooks/test_pages.py",
    "notebooks.md": "notebooks/test_pages.py",
    "serving.md": "inference/test_serving.py",
}
GUIDES = {
    path.name: path.read_text()
    for path in sorted(DOCS.glob("*.md"))
    if "```python" in path.read_text() and path.name not in ELSEWHERE
}
BLOCKS = [
    (name, block)
    for name, text in GUIDES.items()
    for block in re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
]


def run(path, *arguments, **variables):
    """Its output; small operations, so one thread each."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, str(path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_guides_name_all_examples():
    page = (DOCS / "examples.md").read_text()
    for path in ALL:
        assert page.count(f"(examples/{path.name})") == 1
    for path in (*EXAMPLES, SMALL_GPT):
        assert page.count(f"(pictures/example_{path.stem}.png)") == 1
        assert (DOCS / "pictures" / f"example_{path.stem}.png").stat().st_size < 60_000
    for name in ("detection", "image_classifier", "text_classification"):
        assert f"(examples/{name}.py)" in GUIDE
    assert f"(examples/{SEVERAL_PROCESSES.name})" in GUIDES["train_step.md"]
    assert f"(examples/{SMALL_GPT.name})" in GUIDES["pipeline.md"]


def test_a_small_gpt_learns_over_three_stages():
    told = run(SMALL_GPT)
    losses = [float(loss) for loss in LOSS.findall(told)]
    assert len(losses) == 6
    assert losses[-1] < 0.75 * losses[0]
    assert "part  forward + backward" in told


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_learns(path, ranks):
    told = run(path, "--ranks", str(ranks))
    assert told.startswith(f"{ranks} ranks")
    losses = [float(loss) for loss in LOSS.findall(told)]
    assert len(losses) > 3
    assert losses[-1] < losses[0] / 2


def test_example_draws_its_curve(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curve.png"
    run(DOCS / "examples" / "image_classifier.py", "--ranks", "2", "--plot", str(picture))
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_example_runs_on_what_there_is():
    assert "4 ranks" in run(DOCS / "examples" / "detection.py", MGPU_CORE_CPU_RANKS="4", CUDA_VISIBLE_DEVICES="")


def test_the_guides_have_code():
    names = [name for name, _ in BLOCKS]
    assert names.count("migration.md") >= 9
    assert names.count("train_step.md") >= 2


@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_block_of_a_guide_runs(index, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # one saves a file
    name, source = BLOCKS[index]
    line = GUIDES[name][: GUIDES[name].index(source)].count("\n")
    exec(compile("\n" * line + source, str(DOCS / name), "exec"), {"__name__": f"block_{index}"})


LINKS = [link for text in GUIDES.values() for link in re.findall(r"\]\(([^)#:]+)[)#]", text)]


@pytest.mark.parametrize("link", LINKS)
def test_link_of_the_guide_leads_somewhere(link):
    assert (DOCS / link).exists()
