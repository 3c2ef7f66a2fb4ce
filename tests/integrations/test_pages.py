"""The guides on frameworks: their code runs as it is, and compares its own numbers with one device's."""

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
DOCS = Path(__file__).parents[2] / "docs"
PAGES = {path.stem: path for path in (DOCS / "integrations").glob("*.md")}
PACKAGES = {"pyg": "torch_geometric"}


def test_each_framework_has_a_page():
    assert sorted(PAGES) == sorted(["accelerate", "lightning", "pyg", "skorch", "timm", "torchmetrics", "transformers"])


def test_the_package_imports_no_framework():
    frameworks = {"accelerate", "lightning", "skorch", "timm", "torch_geometric", "torchmetrics", "transformers"}
    command = f"import mgpu_core.integrations, mgpu_core.data_parallel, sys; print({frameworks} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-P", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def blocks_of(text):
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", sorted(PAGES))
def test_its_code_runs(page, tmp_path, monkeypatch, capsys):
    with warnings.catch_warnings(action="ignore"):
        pytest.importorskip(PACKAGES.get(page, page))
    monkeypatch.chdir(tmp_path)
    text = PAGES[page].read_text()
    blocks = blocks_of(text)
    assert text.startswith("# ")
    assert "```diff" in text
    assert blocks
    for code in blocks:
        exec(compile(code, f"{page}.md", "exec"), {"__name__": "page"})


@pytest.mark.parametrize("page", ["device_map", "fine_tuning"])
def test_a_guide_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    blocks = blocks_of((DOCS / f"{page}.md").read_text())
    assert len(blocks) >= 4
    names = {"__name__": "page"}
    for code in blocks:
        exec(compile(code, f"{page}.md", "exec"), names)
