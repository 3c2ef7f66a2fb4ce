"""Tables of text between lines of text: plain, as Markdown, as HTML, or drawn where a terminal shows them."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from mgpu_core.support.html import html_table, html_text

__all__ = ["Lines", "Table", "html_of", "human_nbytes", "human_seconds", "show", "text_of"]


@dataclass(frozen=True)
class Table:
    """Rows of cells; ``str()`` of it has aligned columns.

    Attributes:
        rows: the first is the header.
        words: the columns that are aligned left; the others hold numbers.
        indent: in front of each line.
        markdown: whether ``str()`` is Markdown.
    """

    rows: Sequence[Sequence[object]]
    words: Collection[int] = (0,)
    indent: str = ""
    markdown: bool = False

    def __str__(self) -> str:
        rows = [[str(cell) for cell in row] for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        padded = [[self._padded(*each) for each in zip(range(len(row)), row, widths, strict=True)] for row in rows]
        if not self.markdown:
            return "\n".join((self.indent + "  ".join(row)).rstrip() for row in padded)
        rule = ["-" * (width - 1) + "-:"[index not in self.words] for index, width in enumerate(widths)]
        return "\n".join(f"| {' | '.join(row)} |" for row in (padded[0], rule, *padded[1:]))

    def _padded(self, index: int, cell: str, width: int) -> str:
        return cell.ljust(width) if index in self.words else cell.rjust(width)

    def draw(self) -> None:
        """Print it on a terminal, as wide as that is."""
        from rich import box
        from rich.console import Console
        from rich.table import Table as Drawing

        drawing = Drawing(box=box.SIMPLE_HEAD, pad_edge=False)
        for index, name in enumerate(self.rows[0]):
            drawing.add_column(str(name), justify="left" if index in self.words else "right")
        for row in self.rows[1:]:
            drawing.add_row(*map(str, row))
        Console(markup=False, highlight=False).print(drawing)


Lines = Sequence[str | Table]
"""Text, and tables in it; each begins a line."""


def text_of(lines: Lines) -> str:
    """Return the whole as text."""
    return "\n".join(map(str, lines))


def html_of(lines: Lines) -> str:
    """Return the whole as HTML for a notebook."""
    return "".join(html_text(each) if isinstance(each, str) else html_table(each.rows, each.words) for each in lines)


def show(lines: Iterable[str | Table]) -> None:
    """Print the whole; on a terminal its tables are drawn."""
    drawn = sys.stdout is not None and sys.stdout.isatty()
    for line in lines:
        if drawn and isinstance(line, Table):
            line.draw()
        else:
            print(line, flush=True)


def human_nbytes(nbytes: int) -> str:
    """Return bytes with a binary unit: ``1.5 MiB``."""
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.4g} {units[0]}"


def human_seconds(seconds: float) -> str:
    """Return seconds with three digits: ``12.3 us``."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"
