"""Mutants: broken copies of a gold solution. Named ones are edits; mechanical ones come from the
syntax tree."""

from dataclasses import dataclass
from pathlib import Path

from trapline.arena.errors import ArenaError


@dataclass(frozen=True)
class Mutant:
    """A named bug as textual edits of one file of the gold solution."""

    name: str
    edits: tuple[tuple[str, str], ...]
    file: str = "solution.py"

    def apply(self, files: dict[str, str]) -> dict[str, str]:
        """The solution's files with the bug in. Each edit must match exactly once: a stale one
        is an error."""
        source = files[self.file]
        for old, new in self.edits:
            if source.count(old) != 1:
                found = source.count(old)
                raise ArenaError(f"mutant {self.name}: {old!r} occurs {found} times in {self.file}")
            source = source.replace(old, new)
        return {**files, self.file: source}


def edit(name: str, *edits: tuple[str, str], file: str = "solution.py") -> Mutant:
    """A named mutant: replace each old text, which must occur exactly once, by the new one."""
    return Mutant(name, edits, file)


def read_files(folder: Path) -> dict[str, str]:
    """The Python files of a solution, path → source."""
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*.py"))
        if "__pycache__" not in path.parts
    }
