"""The page's code runs, and what it names is there."""

import re
from pathlib import Path

import pytest

from mgpu_core.tools.advise import reasons
from mgpu_core.tools.advise.strategies import NAMES

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "advise.md").read_text()


def test_the_example_runs(capsys):
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    (block,) = [each for each in blocks if "mgpu_core.advise(" in each]
    exec(compile(block.replace("seconds=5", "seconds=0.1, repeats=1"), "advise.md", "exec"), {})
    assert "recommendation: " in capsys.readouterr().out


REASONS = [each for name, each in vars(reasons).items() if name in reasons.__all__ and isinstance(each, str)]


@pytest.mark.parametrize("name", [*NAMES, *(each for each in REASONS if each != reasons.UNKNOWN)])
def test_the_page_has_a_row_for(name):
    assert f"\n| `{name}` | " in PAGE


def test_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (DOCS / link).exists()
