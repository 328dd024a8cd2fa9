"""Parses, measures and mutates a submission inside a sandbox, and executes nothing of it."""

import ast
import io
import json
import os
import random
import socket
import struct
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Collection
from functools import partial
from typing import Any

#: Frames as in `wire`, which imports NumPy: that would take longer than most inspections.
MAGIC, PREFIX = b"TRPL", struct.Struct("<4sIQ")
SOLUTION = "solution.py"
MAX_SOURCE = 400_000
WINDOW = 6


def read_sources(folder: str) -> dict[str, str]:
    """The Python files, path → text, decoded as the interpreter would. What it could not load
    either is left out, but for the solution itself."""
    sources: dict[str, str] = {}
    for place, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(place, name)
            text = _source(path) if name.endswith(".py") else None
            if text is not None:
                sources[os.path.relpath(path, folder)] = text
    return sources


def _source(path: str) -> str | None:
    """The text of a file that can be imported, None for any other."""
    with open(path, "rb") as file:
        raw = file.read(MAX_SOURCE + 1)
    if len(raw) > MAX_SOURCE:
        raise ValueError(f"{os.path.basename(path)} is longer than {MAX_SOURCE} bytes")
    try:
        ast.parse(raw)
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        return raw.decode(encoding)
    except (SyntaxError, ValueError):
        if os.path.basename(path) == SOLUTION:
            raise
        return None


def inspect_code(
    sources: dict[str, str], folder: str, config: str, code_from_data: Any
) -> dict[str, Any]:
    """Figures about the code without its own tests; `code_from_data` is the module."""
    tests = _tests(sources)
    code = {name: text for name, text in sources.items() if name not in tests}
    trees = {name: ast.parse(text) for name, text in code.items()}
    functions = [
        node
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return {
        "lines": sum(_lines(text) for text in code.values()),
        "functions": len(functions),
        "longest_function": max((_length(node) for node in functions), default=0),
        "hinted": sum(map(_is_hinted, functions)),
        "documented": sum(ast.get_docstring(node) is not None for node in functions),
        "unused": sorted(_unused(trees)),
        "duplicated_lines": _duplicated(code),
        "imports": sorted(_union(_imports, trees) | _union(code_from_data.plain_imports, trees)),
        "names": sorted(_union(partial(_dotted_names, code_from_data=code_from_data), trees)),
        "code_from_data": code_from_data.findings(trees, folder),
        "ruff": _ruff(folder, list(code), config),
        "test_files": sorted(tests),
        "test_lines": sum(_lines(sources[name]) for name in tests),
    }


def _union(names: Any, trees: dict[str, ast.Module]) -> set[str]:
    return {name for tree in trees.values() for name in names(tree)}


def _tests(sources: dict[str, str]) -> set[str]:
    """Test files by their names; one that other code imports is code, whatever it is called."""
    tests = {name for name in sources if _is_test(name)}
    for name in set(sources) - tests:
        tests -= _named_by(sources[name], tests)
    return tests


def _named_by(source: str, files: Collection[str]) -> set[str]:
    """Those files that an import of this module may mean."""
    parts = _import_parts(ast.parse(source))
    return {file for file in files if _module_name(file) in parts}


def _module_name(file: str) -> str:
    folder, name = os.path.split(file)
    return os.path.basename(folder) if name == "__init__.py" else name[:-3]


def _import_parts(tree: ast.Module) -> set[str]:
    """Every name between the dots of an import; in `from a.b import c` c may be a module too."""
    parts: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            parts |= {part for name in names for part in name.split(".")}
    return parts


def _modules(sources: dict[str, str]) -> dict[str, str]:
    """The solution and every module that it imports, itself or through others, without tests: a
    script beside it is nothing that the tests of the solution could notice."""
    code = sorted(set(sources) - _tests(sources))
    reached, todo = {SOLUTION}, [SOLUTION]
    while todo:
        new = _named_by(sources[todo.pop()], code) - reached
        reached |= new
        todo += new
    return {name: sources[name] for name in code if name in reached}


def _is_test(name: str) -> bool:
    base = os.path.basename(name)
    return base.startswith("test_") or base.endswith("_test.py") or base == "conftest.py"


def _lines(text: str) -> int:
    return sum(1 for line in text.splitlines() if line.strip() and not line.strip().startswith("#"))


def _length(node: Any) -> int:
    return int(node.end_lineno or node.lineno) - int(node.lineno) + 1


def _is_hinted(node: Any) -> bool:
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    named = [argument for argument in arguments if argument.arg not in ("self", "cls")]
    return node.returns is not None and all(a.annotation is not None for a in named)


def _unused(trees: dict[str, ast.Module]) -> set[str]:
    """Private functions and classes that are never used."""
    defined = {
        node.name
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name.startswith("_")
    }
    mentioned = {
        node.id if isinstance(node, ast.Name) else node.attr
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute)
    }
    return defined - mentioned


def _duplicated(code: dict[str, str]) -> int:
    """Lines that stand in a window of equal lines elsewhere."""
    windows: Counter[tuple[str, ...]] = Counter()
    for text in code.values():
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        windows.update(tuple(lines[i : i + WINDOW]) for i in range(len(lines) - WINDOW + 1))
    return sum(count - 1 for count in windows.values() if count > 1)


def _imports(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _dotted_names(tree: ast.Module, code_from_data: Any) -> set[str]:
    """Every `a.b.c` with `a` replaced by what was imported under that name."""
    aliases: dict[str, str] = code_from_data.imported_names(tree)
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    dotted = {code_from_data.dotted_name(node, aliases) for node in attributes} - {""}
    return dotted | set(aliases.values())


def _ruff(folder: str, names: list[str], config: str) -> dict[str, int]:
    """Findings by rule, with our configuration and never the submission's."""
    program = next(
        (p for place in sys.path if os.path.exists(p := os.path.join(place, "bin", "ruff"))), None
    )
    if program is None or not names:
        raise FileNotFoundError("ruff is not here")
    command = [
        program,
        "check",
        "--isolated",
        "--ignore-noqa",
        "--no-cache",
        "--output-format=json",
        "--exit-zero",
    ]
    options = [part for rule in config.split("\n") if rule for part in ("--config", rule)]
    paths = [os.path.join(folder, name) for name in names]
    done = subprocess.run([*command, *options, *paths], capture_output=True, timeout=60, check=True)
    return dict(Counter(str(finding["code"]) for finding in json.loads(done.stdout)))


def variants(
    sources: dict[str, str], seed: int, count: int, mechanical: Any, rewrite: Any
) -> dict[str, Any]:
    """Other texts of the modules, as file → text: rewrites of all of them that behave the same,
    and a sample of the mutants of any."""
    modules = _modules(sources)
    mutants = [
        mutant
        for name, source in modules.items()
        for mutant in mechanical.mutants_of(modules, name, ast.parse(source))
    ]
    chosen = random.Random(seed).sample(mutants, min(count, len(mutants)))
    rewrites: dict[str, dict[str, str]] = {}
    for name, source in modules.items():
        for way, text in rewrite.rewrites(source):
            rewrites.setdefault(way, {})[name] = text
    return {
        "rewrites": rewrites,
        "mutants": {mutant.id: {mutant.file: mutant.text} for mutant in chosen},
    }


def _say(line: socket.socket, header: dict[str, Any]) -> None:
    text = json.dumps(header).encode()
    line.sendall(PREFIX.pack(MAGIC, len(text), 0) + text)


def _heard(line: socket.socket) -> dict[str, Any]:
    """What the judge asks; it sends nothing but a header."""
    with line.makefile("rb") as frames:
        _, length, _ = PREFIX.unpack(frames.read(PREFIX.size))
        question: dict[str, Any] = json.loads(frames.read(length))
    return question


def main() -> None:
    """`inspector.py FD SUBMISSION_FOLDER`: one question, one answer."""
    import code_from_data
    import mechanical
    import rewrite

    line = socket.socket(fileno=int(sys.argv[1]))
    _say(line, {"op": "ready"})
    question = _heard(line)
    answer: dict[str, Any] = {"op": "inspected", "nonce": question["nonce"]}
    try:
        sources = read_sources(sys.argv[2])
        answer["code"] = inspect_code(sources, sys.argv[2], question["config"], code_from_data)
        if SOLUTION in sources:  # an answer behind an adapter has no solution.py
            answer["variants"] = variants(
                sources, question["seed"], question["mutants"], mechanical, rewrite
            )
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        answer["unreadable"] = f"{type(error).__name__}: {error}"[:500]
    _say(line, answer)


if __name__ == "__main__":
    main()
