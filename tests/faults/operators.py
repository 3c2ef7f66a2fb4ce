"""The operators: each makes one fault of one kind of syntax node inside a function."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_FLIPPED: dict[type[ast.AST], type[ast.AST]] = {
    one: other
    for pair in ((ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn), (ast.Lt, ast.LtE), (ast.Gt, ast.GtE))
    for one, other in (pair, pair[::-1])
}
_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
}
# Swapped arguments of these fail in every call, whatever the tests are, or change nothing.
_UNSWAPPED = {"isinstance", "issubclass", "getattr", "hasattr", "setattr", "min", "max"}
# Types and messages are not what the tests are for.
_SKIPPED = {"annotation", "returns", "decorator_list", "exc", "msg"}


@dataclass(frozen=True)
class Fault:
    """One change of a syntax tree.

    Attributes:
        function: the qualified name of the function that it is in.
        operator: the name of the operator that made it.
        line: of the changed node.
        put: puts it into the tree that it was derived from.
    """

    function: str
    operator: str
    line: int
    put: Callable[[], None]


def faults_of(tree: ast.AST, function: str = "", is_inside: bool = False) -> Iterator[Fault]:
    """Yield the faults of all functions of a tree, always in the same order.

    Args:
        tree: a module, or a node of one.
        function: the qualified name of what the node is in.
        is_inside: the node is in a function, not only in a class or a module.
    """
    for name, value in ast.iter_fields(tree):
        holder: Any = value if isinstance(value, list) else vars(tree)
        keys = range(len(value)) if isinstance(value, list) else [name]
        for key in keys if name not in _SKIPPED else ():
            node = holder[key]
            if not isinstance(node, ast.AST) or isinstance(node, ast.Assert):
                continue
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                inside = is_inside or isinstance(node, ast.FunctionDef)
                yield from faults_of(node, f"{function}.{node.name}".lstrip("."), inside)
                continue
            if is_inside:
                yield from _faults_at(node, holder, key, function)
            yield from faults_of(node, function, is_inside)


def _faults_at(node: Any, holder: Any, key: Any, function: str) -> Iterator[Fault]:
    for operator in OPERATORS:
        changed = operator(node)
        if changed is not None:
            line = next(each.lineno for each in ast.walk(node) if hasattr(each, "lineno"))
            yield Fault(function, operator.__name__, line, lambda new=changed: holder.__setitem__(key, new))


def _with(node: Any, **fields: Any) -> Any:
    """Return a copy of a node with other fields."""
    changed = copy.copy(node)
    vars(changed).update(fields)
    return changed


def dropped_call(node: Any) -> Any:
    """Drop a statement that is a call."""
    return ast.Pass() if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None


def dropped_raise(node: Any) -> Any:
    """Go on where an exception is raised."""
    return ast.Pass() if isinstance(node, ast.Raise) else None


def flipped_comparison(node: Any) -> Any:
    """Compare the other way, or with the other side of a limit."""
    if not isinstance(node, ast.Compare) or len(node.ops) > 1:
        return None
    return _with(node, ops=[_FLIPPED[type(node.ops[0])]()])


def negated_condition(node: Any) -> Any:
    """Take the other branch; conditions that the operator above negates are left to it."""
    if not isinstance(node, ast.If | ast.IfExp):
        return None
    if isinstance(node.test, ast.Compare) and isinstance(node.test.ops[0], ast.Eq | ast.NotEq | ast.Is | ast.IsNot):
        return None
    return _with(node, test=ast.UnaryOp(ast.Not(), node.test))


def exchanged_connective(node: Any) -> Any:
    """Exchange ``and`` and ``or``."""
    if not isinstance(node, ast.BoolOp):
        return None
    return _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())


def swapped_arithmetic(node: Any) -> Any:
    """Subtract instead of adding, multiply instead of dividing, and the other way round."""
    if not isinstance(node, ast.BinOp) or type(node.op) not in _SWAPPED:
        return None
    if any(isinstance(each, ast.Constant) and isinstance(each.value, str) for each in (node.left, node.right)):
        return None
    return _with(node, op=_SWAPPED[type(node.op)]())


def lost_result(node: Any) -> Any:
    """Return None, or the other one of True and False; a result as false as None stays."""
    if not isinstance(node, ast.Return) or node.value is None:
        return None
    if isinstance(node.value, ast.Constant):
        value = node.value.value
        return _with(node, value=ast.Constant(not value)) if isinstance(value, bool) else None
    is_empty = isinstance(node.value, ast.List | ast.Tuple) and not node.value.elts
    return None if is_empty else _with(node, value=ast.Constant(None))


def number_off_by_one(node: Any) -> Any:
    """Add one to an integer, in a slice for example."""
    return _with(node, value=node.value + 1) if isinstance(node, ast.Constant) and type(node.value) is int else None


def swapped_arguments(node: Any) -> Any:
    """Swap the first two arguments of a call."""
    if not isinstance(node, ast.Call) or len(node.args) < 2:
        return None
    one, other, *rest = node.args
    is_out = isinstance(node.func, ast.Name) and node.func.id in _UNSWAPPED
    if is_out or isinstance(one, ast.Starred) or isinstance(other, ast.Starred) or ast.dump(one) == ast.dump(other):
        return None
    return _with(node, args=[other, one, *rest])


def left_context(node: Any) -> Any:
    """Run the body of a ``with`` outside its context."""
    if not isinstance(node, ast.withitem) or node.optional_vars is not None:
        return None
    return _with(node, context_expr=_expression("__import__('contextlib').nullcontext()"))


def first_item_alone(node: Any) -> Any:
    """End a loop, or a comprehension, after the first item."""
    if not isinstance(node, ast.For | ast.comprehension):
        return None
    cut: Any = _expression("__import__('itertools').islice(None, 1)")
    cut.args[0] = node.iter
    return _with(node, iter=cut)


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


OPERATORS = (
    dropped_call,
    dropped_raise,
    flipped_comparison,
    negated_condition,
    exchanged_connective,
    swapped_arithmetic,
    lost_result,
    number_off_by_one,
    swapped_arguments,
    left_context,
    first_item_alone,
)
