"""The messages that the page on troubleshooting quotes are still said: by a string of the package or of its core.

A string is read from the sources with gaps where values stand, and a quoted message must be one of them, from piece to
piece; the page writes `...` for a gap.
"""

import ast
import re
from pathlib import Path

import pytest

from mgpu_core import errors

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
FIRST_CELLS = re.findall(r"^\| (.+?) \| ", PAGE, flags=re.MULTILINE)
QUOTED = [quoted for cell in FIRST_CELLS for quoted in re.findall(r"`([^`]+)`", cell)]
GAP = "\0"
LITERAL = r'"((?:[^"\\\n]|\\.)*)"'


def text_of(node):
    """What an expression says, as far as it is fixed."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return GAP


def texts_of_python(source):
    """Of all expressions but docstrings."""
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return [text_of(node) for node in nodes if isinstance(node, ast.expr) and id(node) not in docstrings]


def texts_of_cpp(source):
    """Of each statement: its literals, joined where nothing stands between them."""
    code = re.sub(r"^\s*//.*$", "", source, flags=re.MULTILINE)
    statements = (re.sub(r'"\s*"', "", statement) for statement in code.split(";"))
    return [GAP.join(re.findall(LITERAL, statement)) for statement in statements]


def said():
    python = [texts_of_python(path.read_text()) for path in sorted((ROOT / "mgpu_core").rglob("*.py"))]
    cpp = [texts_of_cpp(path.read_text()) for end in ("h", "cpp") for path in sorted((ROOT / "csrc").rglob(f"*.{end}"))]
    return {text for texts in (*python, *cpp) for text in texts if text.strip(GAP)}


SAID = said()


def is_said(quoted):
    """By a class of errors and a string, or by a string alone."""
    name, colon, rest = quoted.partition(": ")
    message = rest if colon and hasattr(errors, name) else quoted
    pattern = re.compile(".*".join(map(re.escape, message.split("..."))), flags=re.DOTALL)
    return any(pattern.search(text) for text in SAID)


def test_the_page_quotes_messages():
    assert len(QUOTED) > 12


@pytest.mark.parametrize("quoted", QUOTED)
def test_a_quoted_message_is_still_said(quoted):
    assert is_said(quoted)


@pytest.mark.parametrize(
    "quoted",
    [
        "torch sees 2 GPUs and mgpu_core's CUDA runtime 0",  # a value is not part of the message
        "NoSuchError: no usable NCCL: ...",
        "the optimizer's group ..., is no one of net.parameters()",
        "are no longer those of this step ... the parameters of",
        "Raises unless the user's module has the parameters",  # a docstring
        "are not closed either",  # a comment
    ],
)
def test_what_nobody_says_is_not_found(quoted):
    assert not is_said(quoted)
