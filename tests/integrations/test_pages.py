"""The guides of docs/integrations: their code runs as it is, and compares its own numbers with one device's."""

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
PAGES = {path.stem: path for path in (Path(__file__).parents[2] / "docs" / "integrations").glob("*.md")}
PACKAGES = {"pyg": "torch_geometric"}


def test_each_framework_has_a_page():
    assert sorted(PAGES) == sorted(["accelerate", "lightning", "pyg", "skorch", "timm", "torchmetrics", "transformers"])


def test_the_package_imports_no_framework():
    frameworks = {"accelerate", "lightning", "skorch", "timm", "torch_geometric", "torchmetrics", "transformers"}
    command = f"import mgpu_core.integrations, mgpu_core.wrapper, sys; print({frameworks} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-P", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("page", sorted(PAGES))
def test_its_code_runs(page, tmp_path, monkeypatch, capsys):
    with warnings.catch_warnings(action="ignore"):
        pytest.importorskip(PACKAGES.get(page, page))
    monkeypatch.chdir(tmp_path)
    text = PAGES[page].read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert text.startswith("# ")
    assert "```diff" in text
    assert blocks
    for code in blocks:
        exec(compile(code, f"{page}.md", "exec"), {"__name__": "page"})
