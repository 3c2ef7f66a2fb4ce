"""HTML for notebooks: the parts of which every ``_repr_html_`` of the package is made.  All text is escaped."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape

__all__ = ["html_frame", "html_table", "html_text"]


def html_table(rows: Sequence[Sequence[object]], words: Collection[int] = (0,)) -> str:
    """Return a table; the first row is its header, the columns of ``words`` are aligned left, the others right."""
    parts = []
    for number, row in enumerate(rows):
        tag = "td" if number else "th"
        sides = ["left" if index in words else "right" for index in range(len(row))]
        cells = zip(sides, (escape(str(cell)) for cell in row), strict=True)
        parts.append("".join(f'<{tag} style="text-align: {side}">{cell}</{tag}>' for side, cell in cells))
    return f"<table>{''.join(f'<tr>{part}</tr>' for part in parts)}</table>"


def html_text(text: str) -> str:
    """Return lines of text as they are, in one width of letters; long ones are wrapped."""
    style = "font-family: monospace; white-space: pre-wrap; word-break: normal"
    return f'<pre style="{style}">{escape(text)}</pre>'


def html_frame(page: str, height: int = 900) -> str:
    """Return a whole page in a sandboxed iframe: its scripts reach nothing outside of it; ``height`` in pixels."""
    style = f"width: 100%; height: {height}px; border: 1px solid #c9ccd4"
    return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{escape(page)}"></iframe>'
