"""Draw the picture of docs/forward_pass.md: ``python docs/pictures/forward_pass.py`` writes forward_pass.svg."""

from __future__ import annotations

from pathlib import Path

RANKS = 4
COLOURS = ["#4477aa", "#228833", "#cc8800", "#aa3377"]
STEPS = [("scatter", 150), ("replicate", 330), ("apply", 510), ("gather", 690)]
WIDTH, HEIGHT = 860, 400


def text(
    x: float,
    y: float,
    words: str,
    size: int = 13,
    anchor: str = "middle",
    weight: str = "normal",
) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}">{words}</text>'


def box(
    x: float, y: float, width: float, height: float, fill: str, stroke: str = "#334"
) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{fill}" stroke="{stroke}"/>'


def arrow(
    x1: float,
    y1: float,
    x2: float,
    y2: float,
    colour: str = "#334",
    dashed: bool = False,
) -> str:
    style = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}" stroke-width="1.6"{style} '
        'marker-end="url(#head)"/>'
    )


def batch(x: float, y: float, title: str) -> list[str]:
    rows = [box(x, y + 22 * rank, 60, 22, COLOURS[rank]) for rank in range(RANKS)]
    return [*rows, text(x + 30, y + 22 * RANKS + 18, title)]


def rank_row(rank: int) -> list[str]:
    y = 70 + 62 * rank
    middle = y + 20
    return [
        arrow(92, 132 + 22 * rank, 138, middle, COLOURS[rank]),
        box(140, y, 70, 40, COLOURS[rank]),
        arrow(214, middle, 298, middle),
        box(300, y, 110, 40, "#eef2f7"),
        text(355, middle + 5, "replica 0, shared" if rank == 0 else f"replica {rank}"),
        arrow(412, middle, 478, middle),
        box(480, y, 110, 40, "#fff7e0"),
        text(535, middle + 5, f"worker {rank}"),
        arrow(594, middle, 658, middle),
        box(660, y, 50, 40, COLOURS[rank]),
        arrow(714, middle, 766, 132 + 22 * rank, COLOURS[rank]),
    ]


def picture() -> str:
    labels = [
        "rows of the batch",
        "parameters, copied",
        "forward, at once",
        "rows of the outputs",
    ]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" fill="#223">',
        "<title>One step: scatter, replicate, apply, gather, and back</title>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#334"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *batch(30, 120, "inputs"),
        *batch(768, 120, "outputs"),
    ]
    for (name, x), label in zip([(n, x + 25) for n, x in STEPS], labels, strict=True):
        parts += [text(x, 30, name, 17, weight="bold"), text(x, 50, label, 12)]
    for rank in range(RANKS):
        parts += rank_row(rank)
    parts += [
        arrow(792, 330, 62, 330, dashed=True),
        text(
            430,
            352,
            "backward: gradients are scattered, run through each replica, and are added up bucket by bucket",
            13,
        ),
        text(430, 372, "(reduce) into the one module, whose optimizer you keep", 13),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture())
