"""The code of a page: its python blocks in order, and the output that each must print."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Block", "blocks_of"]

_FENCE = re.compile(r"^```(python|text)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ (.+)$", flags=re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A python block of a page.

    Attributes:
        line: of the page, on which its first line stands; from 1.
        heading: under which it stands.
        expected: its output, from the text block that follows; `None`: it may print anything.
    """

    source: str
    line: int
    heading: str
    expected: str | None


def blocks_of(text: str) -> list[Block]:
    """Return the python blocks of a page.  A text block is the output of the python block before it.

    Raises:
        ValueError: a text block without a python block, or a second one for the same.
    """
    blocks: list[Block] = []
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 2
        if match[1] == "python":
            blocks.append(Block(match[2], line, _heading_at(text, match.start()), None))
        elif not blocks or blocks[-1].expected is not None:
            raise ValueError(f"line {line}: a text block must follow the python block whose output it is")
        else:
            last = blocks.pop()
            blocks.append(Block(last.source, last.line, last.heading, match[2]))
    return blocks


def _heading_at(text: str, index: int) -> str:
    outside_code = _FENCE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text[:index])
    headings = _HEADING.findall(outside_code)
    return str(headings[-1]) if headings else ""
