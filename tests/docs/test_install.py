"""The page on installing names every extra that there is, and no other."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_install_names_all_extras():
    page = (ROOT / "docs" / "install.md").read_text()
    named = {name for names in re.findall(r"'\.\[([\w,]+)\]'", page) for name in names.split(",")}
    assert named == set(EXTRAS)
