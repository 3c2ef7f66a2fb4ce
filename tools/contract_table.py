"""Makes docs/contract.md: each promise of the drop-in and the tests that hold it, from tests/contract.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "tests" / "contract.toml"
TARGET = ROOT / "docs" / "contract.md"

HEAD = """# What the drop-in promises, and which test holds it

Made by `python tools/contract_table.py` from `tests/contract.toml`. Tests in `accelerator/` run in a process of their
own, started by `tests/fakes/on_the_fake.py`.
"""


def promises() -> dict[str, dict[str, list[str]]]:
    """Per section, per promise its tests, as `file::function` below tests/."""
    return tomllib.loads(SOURCE.read_text())


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for section, rows in promises().items():
        parts.append(f"\n## {section}\n\n| promise | tests |\n|---|---|\n")
        parts += [f"| {promise} | {'<br>'.join(map(_link, tests))} |\n" for promise, tests in rows.items()]
    return "".join(parts)


def _link(test: str) -> str:
    path, name = test.split("::")
    return f"[`{name}`](../tests/{path})"


if __name__ == "__main__":
    TARGET.write_text(page())
