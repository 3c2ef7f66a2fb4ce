"""Lessons, a guide and examples as notebooks: each runs from top to bottom, and a lesson shows its picture."""

import importlib.util
from pathlib import Path

import pytest

from mgpu_core.tools.lessons.blocks import blocks_of

pytestmark = pytest.mark.slow

pytest.importorskip("jupytext")
pytest.importorskip("ipykernel")
nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("notebooks", ROOT / "tools" / "notebooks.py")
notebooks = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(notebooks)
SOURCES = [*notebooks.LESSONS, *notebooks.GUIDES, *notebooks.EXAMPLES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebooks")
    assert [path.stem for path in notebooks.write_all(folder)] == [path.stem for path in SOURCES]
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_notebook_runs(source, folder, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(folder / f"{source.stem}.ipynb", 4)
    nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(folder)}}).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    if source in notebooks.LESSONS:
        assert any("image/png" in output.get("data", {}) for output in code[-1].outputs)
    elif source in notebooks.EXAMPLES:
        assert "loss" in "".join(output.get("text", "") for output in code[-1].outputs)
    else:
        assert "of the first 1,000 right" in code[-1].outputs[0]["text"]
        assert any("<iframe " in output.get("data", {}).get("text/html", "") for output in code[-2].outputs)


@pytest.mark.timeout(300)
def test_the_page_on_notebooks_shows_what_it_says(tmp_path):
    blocks = blocks_of((ROOT / "docs" / "notebooks.md").read_text())
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(block.source) for block in blocks])
    nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [cell.outputs[-1]["data"]["text/html"] for cell in notebook.cells]
    wanted = ["<iframe ", "workers", "queue ms", "recommendation: ", "Backends of the core"]
    assert [word for word, html in zip(wanted, shown, strict=True) if word not in html] == []
