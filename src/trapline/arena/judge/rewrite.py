"""Rewrites that keep a program's behaviour: a test suite that fails on one is hashing, not testing.

Also runs inside the sandbox, so it needs nothing but the standard library.
"""

import ast
import random
from collections.abc import Iterator

_SCOPE_READERS = {"locals", "vars", "eval", "exec", "dir", "globals"}


def rewrites(source: str) -> Iterator[tuple[str, str]]:
    """Name and text of each rewrite of one module."""
    yield "reprinted", ast.unparse(_without_prose(ast.parse(source)))
    yield "renamed", ast.unparse(_with_other_locals(ast.parse(source)))
    yield "turned", ast.unparse(_with_turned_comparisons(ast.parse(source)))
    yield "padded", ast.unparse(_with_padding(ast.parse(source)))


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


def _with_padding(tree: ast.Module) -> ast.Module:
    """Statements that do nothing in every function, and answers that pass through a variable: what
    counts or digests the parts of a program gets another result each time."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not _reads_its_scope(node):
            for inner in ast.walk(node):
                for name in ("body", "orelse", "finalbody"):
                    statements = getattr(inner, name, None)
                    if isinstance(statements, list):
                        setattr(inner, name, [new for old in statements for new in _passed(old)])
            start = 1 if _has_docstring(node) else 0
            node.body[start:start] = _idle_statements()
    return ast.fix_missing_locations(tree)


def _reads_its_scope(function: ast.FunctionDef) -> bool:
    return any(isinstance(n, ast.Name) and n.id in _SCOPE_READERS for n in ast.walk(function))


def _passed(statement: ast.AST) -> list[ast.AST]:
    if not isinstance(statement, ast.Return) or statement.value is None:
        return [statement]
    store = ast.Name("passed_on_", ast.Store())
    return [
        ast.Assign([store], statement.value),
        ast.Return(ast.Name("passed_on_", ast.Load())),
    ]


def _idle_statements() -> list[ast.stmt]:
    """A few, drawn anew each time, with every kind of part that mutants change."""
    kinds = (
        "idle_ = [{0}, {1}.5, '{2}']",
        "if {0} > {1} + {0}:\n    raise ValueError('{2}')",
        "idle_ = {0} - {1} * {2} if {0} < {1} else not {2}",
        "while {0} == {1} + {0}:\n    break",
    )
    draw = random.SystemRandom()
    texts = [draw.choice(kinds) for _ in range(draw.randint(2, 6))]
    numbers = [[draw.randint(1, 99) for _ in range(3)] for _ in texts]
    return [ast.parse(t.format(*n)).body[0] for t, n in zip(texts, numbers, strict=True)]
