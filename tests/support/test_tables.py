"""One table value: plain, Markdown, HTML, and drawn on a terminal."""

import os
import pty
import subprocess
import sys

from mgpu_core.support.tables import Table, html_of, show, text_of

ROWS = [("way", "rows", "about"), ("a [b]", 16, "<i>"), ("longer", 4, "none")]


def test_a_plain_table():
    assert str(Table(ROWS, {0, 2}, "  ")).splitlines() == [
        "  way     rows  about",
        "  a [b]     16  <i>",
        "  longer     4  none",
    ]


def test_a_table_of_numbers_to_the_right():
    assert str(Table([("a", "b"), (1, 22)], ())).splitlines() == ["a   b", "1  22"]


def test_markdown():
    assert str(Table(ROWS, {0, 2}, markdown=True)).splitlines() == [
        "| way    | rows | about |",
        "| ------ | ---: | ----- |",
        "| a [b]  |   16 | <i>   |",
        "| longer |    4 | none  |",
    ]


def test_text_and_html_of_lines(capsys):
    lines = ["title", Table([("a",), (1,)]), "<end>"]
    assert text_of(lines) == "title\na\n1\n<end>"
    assert html_of(lines).startswith('<pre style="')
    assert '<table><tr><th style="text-align: left">a</th></tr>' in html_of(lines)
    assert html_of(lines).endswith("&lt;end&gt;</pre>")
    show(lines)
    assert capsys.readouterr().out == "title\na\n1\n<end>\n"


def test_a_terminal_shows_a_drawn_table():
    code = "from mgpu_core.support.tables import Table, show\n"
    code += f"show(['title', Table({ROWS!r}, [0, 2], markdown=True)])"
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "60"}
    done = subprocess.run([sys.executable, "-P", "-c", code], stdout=theirs, stderr=subprocess.PIPE, env=environment)
    os.close(theirs)
    lines = [line.strip() for line in os.read(ours, 1 << 16).decode().splitlines()]
    os.close(ours)
    assert (done.returncode, done.stderr) == (0, b"")
    assert lines[0] == "title"
    assert "─" * 20 in "".join(lines)
    assert "a [b]" in [line.split("  ")[0] for line in lines]
    assert not any("|" in line for line in lines)
