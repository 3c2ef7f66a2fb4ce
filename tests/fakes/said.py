"""The messages of the package and of its core, read from their sources.

A string is read with gaps where values stand; a quoted message, which has `...` for a gap, must be part of one string.
"""

import ast
import re
from functools import cache
from pathlib import Path

from mgpu_core import errors

ROOT = Path(__file__).parent.parent.parent
GAP = "\0"
LITERAL = r'"((?:[^"\\\n]|\\.)*)"'


def text_of(node):
    """Return the text of an expression, with `GAP` for each value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return GAP


def texts_of_python(source):
    """Return the text of each expression that is not a docstring."""
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return [text_of(node) for node in nodes if isinstance(node, ast.expr) and id(node) not in docstrings]


def texts_of_cpp(source):
    """Return the literals of each statement, joined where only blanks separate them."""
    code = re.sub(r"^\s*//.*$", "", source, flags=re.MULTILINE)
    statements = (re.sub(r'"\s*"', "", statement) for statement in code.split(";"))
    return [GAP.join(re.findall(LITERAL, statement)) for statement in statements]


@cache
def said():
    """Return the texts of the package and of its core."""
    python = [texts_of_python(path.read_text()) for path in sorted((ROOT / "mgpu_core").rglob("*.py"))]
    cpp = [texts_of_cpp(path.read_text()) for end in ("h", "cpp") for path in sorted((ROOT / "csrc").rglob(f"*.{end}"))]
    return {text for texts in (*python, *cpp) for text in texts if text.strip(GAP)}


def is_said(quoted):
    """Return whether the package has the message; it may begin with the name of an error class."""
    name, colon, rest = quoted.partition(": ")
    message = rest if colon and hasattr(errors, name) else quoted
    pattern = re.compile(".*".join(map(re.escape, message.split("..."))), flags=re.DOTALL)
    return any(pattern.search(text) for text in said())
