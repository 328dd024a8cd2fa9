"""Files outside a challenge's folder that its judge imports: oracles, checks of other challenges.

They can change a verdict, so they belong to the challenge's digest. They are found by reading
import statements, so that a digest runs no code.
"""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: The halves that state right answers; the arena's own code is recorded by its version.
STATING = ("trapline.gold", "trapline.challenges")


def judge_dependencies(modules: Iterable[Path]) -> dict[str, Path]:
    """Name in the package → file: what these modules import, and what that imports in turn."""
    own = {path.resolve() for path in modules}
    waiting, found = list(own), set(own)
    while waiting:
        for path in _imported(waiting.pop()):
            if path not in found:
                found.add(path)
                waiting.append(path)
    return {f"trapline/{path.relative_to(ROOT)}": path for path in found - own}


def _imported(module: Path) -> Iterator[Path]:
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = _named(node.module, [alias.name for alias in node.names])
        else:
            continue
        for name in names:
            if name.startswith(STATING) and (path := _file_of(name)):
                yield path


def _named(module: str, names: Iterable[str]) -> list[str]:
    """`from package import oracle` names a module, `from package import function` the package."""
    return [inner if _file_of(inner := f"{module}.{name}") else module for name in names]


def _file_of(name: str) -> Path | None:
    if not name.startswith("trapline."):
        return None
    place = ROOT.joinpath(*name.split(".")[1:])
    for path in (place.with_suffix(".py"), place / "__init__.py"):
        if path.is_file():
            return path
    return None
