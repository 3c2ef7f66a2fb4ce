"""The READMEs: their code runs, and the Chinese one has the same headings, commands and links as the English one."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
ENGLISH, CHINESE = ((ROOT / name).read_text() for name in ("README.md", "README.zh-CN.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def levels(text):
    return [len(marks) for marks in re.findall(r"^(#+) ", FENCE.sub("", text), re.MULTILINE)]


def code(text):
    """Fenced blocks without their comments, which are translated."""
    return [(kind, re.sub(r" *#.*", "", block)) for kind, block in FENCE.findall(text)]


def words_in_code(text):
    """Commands, names and variables, in whatever order a language puts them."""
    return sorted(re.findall(r"`([^`\n]+)`", FENCE.sub("", text)))


def rows_of_tables(text):
    return [len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("|")]


def links(text):
    return sorted(re.findall(r"\]\(([^)]+)\)", text))


def test_the_same_headings():
    assert levels(CHINESE) == levels(ENGLISH)
    assert len(levels(ENGLISH)) >= 5
    assert len(ENGLISH.splitlines()) <= 130


def test_the_same_blocks_of_code():
    assert code(CHINESE) == code(ENGLISH)
    # .ci/run takes its commands from them.
    assert [block for kind, block in code(ENGLISH) if kind == "sh"] == [
        "pip install '.[mnist]' && mgpu mnist\n",
        "pip install 'mgpu-core[test]' && pytest -n 2 --dist loadfile\n",
    ]


def test_the_same_commands_and_names():
    assert words_in_code(CHINESE) == words_in_code(ENGLISH)


def test_the_same_tables():
    assert rows_of_tables(CHINESE) == rows_of_tables(ENGLISH)


def test_the_same_links_but_to_each_other():
    own = {"README.md", "README.zh-CN.md"}
    assert [each for each in links(CHINESE) if each not in own] == [each for each in links(ENGLISH) if each not in own]
    assert "README.zh-CN.md" in links(ENGLISH)
    assert "README.md" in links(CHINESE)


@pytest.mark.parametrize("link", sorted(set(links(ENGLISH) + links(CHINESE))))
def test_links_lead_somewhere(link):
    assert (ROOT / link.partition("#")[0]).exists()


def run_blocks(text, name):
    """All of a page's Python, in one namespace."""
    space = {"__name__": "page"}
    for kind, block in FENCE.findall(text):
        if kind == "python":
            exec(compile(block, name, "exec"), space)
    return space


@pytest.mark.parametrize("page", ["README.md", "docs/explain.md"])
def test_its_code_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_blocks((ROOT / page).read_text(), page)
    assert "phase" in capsys.readouterr().out
    assert (tmp_path / "step.html").stat().st_size > 10_000
