"""What scripts, tests and pages ask of the core is there: nothing else runs those that need a GPU."""

import re
from pathlib import Path

import pytest

from mgpu_core import _core

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "ci", "docs", "mgpu_core", "tests", "tools")
KINDS = {".md", ".py", ".sh"}
USE = re.compile(r"(?<![\w.])_core\.([a-z]\w*)")
NAMES_OF_FILES = {"cpp", "pyi", "so"}


def uses():
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    texts = {path: path.read_text() for path in paths if path.suffix in KINDS or path.parent.name == "ci"}
    del texts[Path(__file__)]
    return {(str(path.relative_to(ROOT)), name) for path, text in texts.items() for name in USE.findall(text)}


def test_every_name_exists():
    found = uses()
    assert ("benchmarks/gpu_check/usable.py", "device_count") in found
    assert [use for use in sorted(found) if use[1] not in NAMES_OF_FILES and not hasattr(_core, use[1])] == []


@pytest.mark.parametrize(
    ("text", "names"), [("from x import _core\n_core.old_name()", ["old_name"]), ("torch._core.x", [])]
)
def test_what_counts_as_a_use(text, names):
    assert USE.findall(text) == names
