"""Import circles between modules, and the sizes that keep a file readable."""

import ast
from functools import cache
from pathlib import Path

import pytest

import trapline

PACKAGE = Path(trapline.__file__).parent
#: Circles that still exist, each as its sorted modules. The list must become empty, and nothing
#: may be added to it; an entry that has ceased to be a circle fails the test.
KNOWN_CIRCLES: set[tuple[str, ...]] = set()
#: Submissions: deployed and graded as they are, not part of the package's module graph.
SUBMISSIONS = {"solution", "alternates", "starter", "baselines"}
#: Where a statement has further statements.
FIELDS = ("body", "orelse", "finalbody", "handlers", "cases")
LONGEST_FUNCTION = 100
#: Longer functions that still exist; the same rules as for KNOWN_CIRCLES.
KNOWN_LONG_FUNCTIONS: set[str] = set()
#: So that the package stays easy to survey.
MOST_ATTENTION_FILES = 24


def sources(root):
    """Every module of a package folder: its dotted name and its file."""
    for file in sorted(root.rglob("*.py")):
        parts = [root.name, *file.relative_to(root).with_suffix("").parts]
        if not SUBMISSIONS & set(parts):
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), file


@cache
def parsed(file):
    """The syntax tree of a file, which several tests read."""
    return ast.parse(file.read_text(encoding="utf-8"))


@pytest.fixture(scope="module", autouse=True)
def trees_of_these_tests_only():
    """Millions of nodes: every later search for garbage would pass through them."""
    yield
    parsed.cache_clear()


def runtime_statements(tree):
    """All statements of a module except those in `if TYPE_CHECKING` blocks."""
    return statements(tree, lambda node: "TYPE_CHECKING" in ast.unparse(node.test))


def statements(tree, left_out=lambda node: False):
    """All statements of a module, but for the bodies of these `if`s.

    Expressions hold none, and are most of a tree.
    """
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        skipped = isinstance(node, ast.If) and left_out(node)
        for field in ("orelse",) if skipped else FIELDS:
            waiting += getattr(node, field, ())
        if not skipped:
            yield node


def imported(tree, modules):
    """Modules of the package that this module imports, inside functions too."""
    for node in runtime_statements(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        # `from a.b import c` imports the module a.b.c if there is one, and otherwise a.b.
        for name in names:
            if found := next(
                (one for one in (name, name.rpartition(".")[0]) if one in modules), ""
            ):
                yield found


def circles(root):
    """Groups of modules that import each other, each as a sorted tuple (Tarjan's algorithm)."""
    modules = dict(sources(root))
    graph = {
        name: sorted({*imported(parsed(file), modules)} - {name}) for name, file in modules.items()
    }
    index, lowest, stack, found = {}, {}, [], set()

    def visit(name):
        index[name] = lowest[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in stack:
                lowest[name] = min(lowest[name], index[other])
        if lowest[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.add(tuple(sorted(group)))

    for name in graph:
        if name not in index:
            visit(name)
    return found


def test_modules_do_not_import_each_other_in_circles():
    found = circles(PACKAGE)
    assert found - KNOWN_CIRCLES == set(), "new import circles: move what both sides need"
    assert KNOWN_CIRCLES - found == set(), "no longer circles: remove them from KNOWN_CIRCLES"


@pytest.mark.parametrize(
    "statement",
    [
        "from planted.a import x",
        "from planted import a",
        "import planted.a",
        "def f():\n    from planted.a import x",
        "try:\n    import planted.a\nexcept ImportError:\n    pass",
    ],
)
def test_planted_circle_is_found(tmp_path, statement):
    root = tmp_path / "planted"
    root.mkdir()
    (root / "__init__.py").touch()
    (root / "a.py").write_text("from planted.b import y\nx = 1\n")
    (root / "b.py").write_text("from planted.c import y\n")
    (root / "c.py").write_text(f"y = 1\n{statement}\n")
    assert circles(root) == {("planted.a", "planted.b", "planted.c")}


def test_imports_for_type_checking_are_not_circles(tmp_path):
    root = tmp_path / "planted"
    root.mkdir()
    (root / "a.py").write_text("from planted.b import y\nx = 1\n")
    (root / "b.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from planted.a import x\ny = 1\n"
    )
    assert circles(root) == set()


def long_functions(root):
    """Functions with more than 100 lines, decorators not counted, as sentences."""
    for name, file in sources(root):
        for node in statements(parsed(file)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > LONGEST_FUNCTION:
                    yield f"{name}.{node.name} has {lines} lines"


def test_functions_have_at_most_100_lines():
    assert set(long_functions(PACKAGE)) == KNOWN_LONG_FUNCTIONS


def test_planted_long_function_is_found(tmp_path):
    (tmp_path / "a.py").write_text("def f():\n" + "    x = 1\n" * 100)
    (sentence,) = long_functions(tmp_path)
    assert sentence.endswith("a.f has 101 lines")


def test_attention_has_few_files():
    assert len(list((PACKAGE / "gold" / "attention").rglob("*.py"))) <= MOST_ATTENTION_FILES


def reads_by_locale(root):
    """Text files whose encoding the user's locale would choose, as sentences."""
    for name, file in sources(root):
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.Call) and _takes_the_locale(node):
                yield f"{name}: {ast.unparse(node)} in line {node.lineno} names no encoding"


def _takes_the_locale(call):
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    called = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if "encoding" in named:
        return False
    if called in ("read_text", "write_text"):  # a distribution's read_text takes a name
        return len(call.args) == (called == "write_text")
    if not (isinstance(call.func, ast.Name) and call.func.id == "open"):
        return False
    mode = call.args[1] if len(call.args) > 1 else named.get("mode", ast.Constant("r"))
    return isinstance(mode, ast.Constant) and "b" not in mode.value


def test_text_files_do_not_depend_on_the_locale():
    assert list(reads_by_locale(PACKAGE)) == []


@pytest.mark.parametrize(
    "call",
    ["path.read_text()", "path.write_text(x)", "open(x)", "open(x, 'w')", "open(x, mode='a')"],
)
def test_planted_file_without_encoding_is_found(tmp_path, call):
    (tmp_path / "a.py").write_text(f"{call}\nopen(x, 'rb')\npath.read_text(encoding='utf-8')\n")
    (sentence,) = reads_by_locale(tmp_path)
    assert "in line 1 names no encoding" in sentence
