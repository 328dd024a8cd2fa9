"""Reads the code of an answer without running it: which functions there are, which files fail."""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from trapline.arena.judge.intake import IGNORED

#: The module of an adapter's template from which it imports the answer's functions.
ANSWER = "answer"
_FENCE = re.compile(r"^\s*```", re.MULTILINE)
_MOST_BYTES = 4 << 20


@dataclass(frozen=True)
class Definition:
    """A function or class at the top of a file."""

    name: str
    parameters: tuple[str, ...]
    #: The file's path in the task folder, with slashes.
    file: str


@dataclass
class Reading:
    definitions: list[Definition] = field(default_factory=list)
    code_files: list[str] = field(default_factory=list)
    #: Sentences on files that are not Python.
    unparsed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_code(task: Path) -> Reading:
    """Every Python file of a task folder but its tests."""
    reading = Reading()
    for path in sorted(task.rglob("*.py")):
        inside = path.relative_to(task)
        if path.is_symlink() or not path.is_file() or IGNORED & set(inside.parts):
            continue
        name = inside.as_posix()
        reading.code_files.append(name)
        if path.stat().st_size > _MOST_BYTES:
            reading.notes.append(f"{name} is longer than {_MOST_BYTES >> 20} MiB and was not read")
            continue
        _read_file(path.read_bytes(), name, reading)
    return reading


def _read_file(raw: bytes, name: str, reading: Reading) -> None:
    try:
        tree = ast.parse(raw)
    except (SyntaxError, ValueError, RecursionError) as error:
        sentence = _why_unparsed(raw, name, error)
        reading.unparsed.append(sentence)
        reading.notes.append(sentence)
        return
    if not PurePosixPath(name).name.startswith("test_"):
        reading.definitions += [
            Definition(node.name, _parameters(node), name)
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
        ]


def _why_unparsed(raw: bytes, name: str, error: Exception) -> str:
    text = raw.decode(errors="replace")
    if len(_FENCE.findall(text)) >= 2:
        return f"{name} is Markdown with code blocks, not Python"
    line = getattr(error, "lineno", None)
    where = f" (line {line})" if line else ""
    return f"{name} does not parse{where}: {getattr(error, 'msg', error)}"


def _parameters(node: ast.FunctionDef | ast.ClassDef) -> tuple[str, ...]:
    """Those of a function, or of a class's constructor without `self`."""
    if isinstance(node, ast.ClassDef):
        made = [
            inner
            for inner in node.body
            if isinstance(inner, ast.FunctionDef) and inner.name == "__init__"
        ]
        return _parameters(made[0])[1:] if made else ()
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return tuple(argument.arg for argument in arguments)


def binding(template: str, found: Mapping[str, Definition]) -> str:
    """An adapter's template with its imports from `answer` bound to the answer's own functions."""
    lines = template.splitlines(keepends=True)
    for node in reversed(ast.parse(template).body):
        if isinstance(node, ast.ImportFrom) and node.module == ANSWER:
            bound = [_import(found[a.name], a.asname or a.name) for a in node.names]
            lines[node.lineno - 1 : node.end_lineno] = [f"{line}\n" for line in bound]
    places = sorted({str(PurePosixPath(one.file).parent) for one in found.values()} - {"."})
    return _with_places("".join(lines), places)


def _import(one: Definition, name: str) -> str:
    module = PurePosixPath(one.file).stem
    return f"from {module} import {one.name}" + (f" as {name}" if name != one.name else "")


def _with_places(text: str, places: list[str]) -> str:
    """Lets the adapter import modules from folders inside the answer."""
    if not places:
        return text
    body = ast.parse(text).body
    first = next(node for node in body if isinstance(node, ast.ImportFrom | ast.Import))
    lines = text.splitlines(keepends=True)
    added = [f"sys.path.insert(0, str(Path(__file__).parent / {place!r}))\n" for place in places]
    lines[first.lineno - 1 : first.lineno - 1] = [
        "import sys\n",
        "from pathlib import Path\n",
        "\n",
        *added,
        "\n",
    ]
    return "".join(lines)
