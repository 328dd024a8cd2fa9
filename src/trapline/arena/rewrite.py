"""Rewrites that keep a program's behaviour: a test suite that fails on one is hashing, not testing.

Also runs inside the sandbox, so it needs nothing but the standard library.
"""

import ast
from collections.abc import Iterator

_SCOPE_READERS = {"locals", "vars", "eval", "exec", "dir", "globals"}


def rewrites(source: str) -> Iterator[tuple[str, str]]:
    """Name and text of each rewrite of one module."""
    yield "reprinted", ast.unparse(_without_prose(ast.parse(source)))
    yield "renamed", ast.unparse(_with_other_locals(ast.parse(source)))
    yield "turned", ast.unparse(_with_turned_comparisons(ast.parse(source)))


def _without_prose(tree: ast.Module) -> ast.Module:
    """No docstring, no comment, our own layout."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and _has_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.fix_missing_locations(tree)


def _has_docstring(node: ast.FunctionDef | ast.ClassDef | ast.Module) -> bool:
    first = node.body[0] if node.body else None
    return (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    )


def _with_other_locals(tree: ast.Module) -> ast.Module:
    """Local variables of outermost functions under other names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            names = _renameable(node)
            for inner in ast.walk(node):
                if isinstance(inner, ast.Name) and inner.id in names:
                    inner.id = f"{inner.id}_"
                elif isinstance(inner, ast.ExceptHandler) and inner.name in names:
                    inner.name = f"{inner.name}_"
    return tree


def _renameable(function: ast.FunctionDef) -> set[str]:
    """Names that are assigned in the function and mean nothing outside of it."""
    inner = list(ast.walk(function))
    taken = {node.arg for node in inner if isinstance(node, ast.arg)}
    used = {node.id for node in inner if isinstance(node, ast.Name)}
    nested = any(
        isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Global | ast.Nonlocal | ast.Import)
        for node in inner[1:]
    )
    if nested or used & _SCOPE_READERS:
        return set()
    stored = {n.id for n in inner if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return {name for name in stored - taken if f"{name}_" not in used | taken}


_TURNED = {ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE}


def _with_turned_comparisons(tree: ast.Module) -> ast.Module:
    """`a < b` as `b > a`, where neither side does anything."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _TURNED:
            right = node.comparators[0]
            if isinstance(node.left, ast.Name | ast.Constant) and isinstance(
                right, ast.Name | ast.Constant
            ):
                node.ops = [_TURNED[type(node.ops[0])]()]
                node.left, node.comparators = right, [node.left]
    return tree
