"""Files that the pages name are there."""

import re
from pathlib import Path

import pytest

import mgpu_core

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
BESIDE = [ROOT / folder for folder in ("", "mgpu_core", "csrc", "csrc/backends/cuda", "docs", "tests", "benchmarks")]
PATH = re.compile(r"`([\w./*-]+/[\w.*-]*(?:\.(?:py|cpp|h|cu|cuh|md|sh|toml)|/))`")
ELSEWHERE = {"doc/PERFORMANCE.md", "src/graph/topo.h"}  # of nccl-tests and NCCL


def paths_of(page):
    """Files and folders of the project, as the page names them."""
    return sorted(set(PATH.findall(page.read_text())) - ELSEWHERE)


def is_there(page, path):
    return any(next(folder.glob(path.rstrip("/")), None) is not None for folder in [page.parent, *BESIDE])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_files_that_a_page_names_are_there(page):
    assert [path for path in paths_of(page) if not path.startswith("/") and not is_there(page, path)] == []


def test_a_file_that_is_not_there_is_found():
    assert PATH.findall("`parallel/scatter/rows.py`, `a/ranks/`, `a.py` and `x/y`") == [
        "parallel/scatter/rows.py",
        "a/ranks/",
    ]
    assert is_there(PAGES[0], "parallel/apply.py")
    assert not is_there(PAGES[0], "parallel/scatter/rows.py")


@pytest.mark.parametrize("name", mgpu_core.__all__)
def test_a_public_name_is_on_a_page_of_the_api(name):
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    is_error = name in mgpu_core.errors.__all__ and "automodule:: mgpu_core.errors" in pages
    assert is_error or re.search(rf":: (?:\w+\.)*{name}\b", pages)
