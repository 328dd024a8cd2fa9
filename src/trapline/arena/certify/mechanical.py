"""Mechanical mutants: small wrong changes all over a solution's syntax tree.

Named mutants show that each trap works; these show how much cases and traps together miss. A
mutant's id is `file:function/operator/k`, where k counts that operator's places inside the
function, so that a change of another function leaves it as it is.
"""

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

COMPARE = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.MatMult: ast.Mult,
}


Path = tuple[tuple[str, int | None], ...]
Change = Callable[[ast.AST], ast.AST]


@dataclass(frozen=True)
class MechanicalMutant:
    """One change at one place; its text is made on demand."""

    id: str
    line: int
    #: The changed file.
    file: str
    _origin: dict[str, str]
    _tree: ast.Module
    _path: Path
    _change: Change

    @property
    def files(self) -> dict[str, str]:
        return {**self._origin, self.file: self.text}

    @property
    def text(self) -> str:
        """The changed file's."""
        return ast.unparse(_changed(self._tree, self._path, self._change))


def mechanical_mutants(files: dict[str, str]) -> Iterator[MechanicalMutant]:
    """All mutants of all modules of a solution, its tests left out."""
    for name, source in files.items():
        if not name.startswith("test_") and name != "conftest.py":
            yield from mutants_of(files, name, ast.parse(source))


def mutants_of(files: dict[str, str], name: str, tree: ast.Module) -> Iterator[MechanicalMutant]:
    """All mutants of one module of `files`."""
    counts: dict[str, int] = {}
    for where, path in _places(tree):
        node = _at(tree, path)
        for operator, change in _changes(node):
            prefix = f"{name}:{where}/{operator}"
            counts[prefix] = counts.get(prefix, 0) + 1
            identity, line = f"{prefix}/{counts[prefix]}", getattr(node, "lineno", 0)
            yield MechanicalMutant(identity, line, name, files, tree, path, change)


def _places(tree: ast.Module) -> Iterator[tuple[str, Path]]:
    """Every node worth changing, with the function it stands in."""

    def walk(node: ast.AST, where: str, path: Path) -> Iterator[tuple[str, Path]]:
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "type_comment"):
                continue
            items = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
            for index, child in items:
                if not isinstance(child, ast.AST) or _is_prose(child):
                    continue
                inner = where
                if isinstance(child, ast.FunctionDef | ast.ClassDef):
                    inner = child.name if where == "<module>" else f"{where}.{child.name}"
                here = (*path, (field, index))
                yield inner, here
                yield from walk(child, inner, here)

    return walk(tree, "<module>", ())


def _is_prose(node: ast.AST) -> bool:
    """Docstrings, imports and what an exception says: changing them changes no behaviour."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text or isinstance(node, ast.Import | ast.ImportFrom | ast.Raise | ast.JoinedStr)


def _at(tree: ast.AST, path: Path) -> ast.AST:
    node: ast.AST = tree
    for field, index in path:
        value = getattr(node, field)
        node = value if index is None else value[index]
    return node


def _changed(node: ast.AST, path: Path, change: Change) -> ast.AST:
    """The tree with a change at one place. Only the nodes on the way there are copied: a copy of
    the whole takes longer than its text."""
    if not path:
        return change(copy.deepcopy(node))
    (field, index), *rest = path
    parent, value = copy.copy(node), getattr(node, field)
    if index is None:
        setattr(parent, field, _changed(value, tuple(rest), change))
    else:
        new = _changed(value[index], tuple(rest), change)
        setattr(parent, field, [*value[:index], new, *value[index + 1 :]])
    return parent


def _changes(node: ast.AST) -> Iterator[tuple[str, Change]]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARE:
        yield "compare", _swap_compare
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in ARITHMETIC:
        yield "arithmetic", _swap_arithmetic
        if isinstance(node, ast.BinOp):
            yield "drop-operand", lambda n: n.left  # type: ignore[attr-defined]
    elif isinstance(node, ast.BoolOp):
        yield "bool", _swap_bool
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield "drop-unary", lambda n: n.operand  # type: ignore[attr-defined]
    elif isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
        yield "constant", _change_constant
    else:
        yield from _structural_changes(node)


def _structural_changes(node: ast.AST) -> Iterator[tuple[str, Change]]:
    if isinstance(node, ast.Call) and node.keywords:
        yield "drop-keyword", _drop_keyword
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        yield "never", _never
    elif isinstance(node, ast.Expr | ast.AugAssign):
        yield "drop-statement", lambda n: ast.copy_location(ast.Pass(), n)
    elif isinstance(node, ast.Continue):
        yield "break", lambda n: ast.copy_location(ast.Break(), n)


def _swap_compare(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.Compare)
    node.ops[0] = COMPARE[type(node.ops[0])]()
    return node


def _swap_arithmetic(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.BinOp | ast.AugAssign)
    node.op = ARITHMETIC[type(node.op)]()
    return node


def _swap_bool(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.BoolOp)
    node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    return node


def _change_constant(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.Constant)
    value = node.value
    if isinstance(value, bool):
        node.value = not value
    elif isinstance(value, int | float):
        node.value = value + 1
    return node


def _drop_keyword(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.Call)
    node.keywords = node.keywords[1:]
    return node


def _never(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.If | ast.While | ast.IfExp)
    node.test = ast.copy_location(ast.Constant(False), node.test)
    return node
