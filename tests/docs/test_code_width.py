"""Code in the pages is at most 88 columns wide, as the site's column; output, in `text` blocks, may be wider."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGES = [
    *ROOT.glob("README*.md"),
    ROOT / "benchmarks" / "README.md",
    *(path for path in ROOT.glob("docs/**/*.md") if "_generated" not in path.parts),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def too_long(text):
    code = "\n".join(block for kind, block in FENCE.findall(text) if kind != "text")
    return [line for line in code.splitlines() if len(line) > 88]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_is_at_most_88_columns_wide(page):
    assert too_long(page.read_text()) == []


def test_a_long_line_is_found():
    long = "x" * 89
    assert too_long(f"```sh\n{long}\n```\n```text\n{long}\n```\n{long}\n") == [long]
