"""Unified diffs between folders of text: made as git makes them, applied without trusting them.

Applying is exact (no fuzz) and touches only a mapping in memory: names that leave the folder,
links, binary parts and renames are refused before anything is changed.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@.*")
_ANNOUNCED = re.compile(r"diff --git a/(.+) b/\1")
_NO_NEWLINE = "\\ No newline at end of file"
_NOTHING = "/dev/null"
_REFUSED = (
    ("new file mode 120000", "a link"),
    ("new mode ", "a change of mode"),
    ("rename ", "a rename"),
    ("copy from ", "a copy"),
    ("GIT binary patch", "a binary part"),
    ("Binary files ", "a binary part"),
)


class PatchError(ValueError):
    """The patch cannot be applied; the message says why."""


def make_patch(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """What `git diff` would print between two folders."""
    names = sorted(before.keys() | after.keys())
    return "".join(
        _file_patch(name, before.get(name), after.get(name))
        for name in names
        if before.get(name) != after.get(name)
    )


def _file_patch(name: str, old: str | None, new: str | None) -> str:
    head = f"diff --git a/{name} b/{name}\n"
    if old is None:
        head += "new file mode 100644\n"
    elif new is None:
        head += "deleted file mode 100644\n"
    source = _NOTHING if old is None else f"a/{name}"
    target = _NOTHING if new is None else f"b/{name}"
    lines = difflib.unified_diff(_lines(old or ""), _lines(new or ""), source, target)
    return head + "".join(
        line if line.endswith("\n") else f"{line}\n{_NO_NEWLINE}\n" for line in lines
    )


def _lines(text: str) -> list[str]:
    """By line feed only: a form feed inside a line is not its end."""
    return [line for line in re.split(r"(?<=\n)", text) if line]


@dataclass
class _Hunk:
    start: int
    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    #: The sides that the line read last belongs to.
    last: list[list[str]] = field(default_factory=list)

    def add(self, line: str) -> None:
        mark, text = (line[0], line[1:]) if line else (" ", "")
        sides = {" ": [self.old, self.new], "-": [self.old], "+": [self.new]}
        if mark not in sides:
            raise PatchError(f"the patch has a line that belongs to no hunk: {line[:60]!r}")
        self.last = sides[mark]
        for side in self.last:
            side.append(f"{text}\n")

    def end_without_newline(self) -> None:
        for side in self.last:
            side[-1] = side[-1].removesuffix("\n")


@dataclass
class _Change:
    source: str
    target: str
    hunks: list[_Hunk] = field(default_factory=list)


def apply_patch(files: Mapping[str, str], patch: str) -> dict[str, str]:
    result = dict(files)
    for change in _Parser(patch).changes:
        if change.source != _NOTHING and change.source not in result:
            raise PatchError(f"{change.source} is not there to be changed")
        if change.source == _NOTHING and change.target in result:
            raise PatchError(f"{change.target} is new in the patch but exists already")
        text = "" if change.source == _NOTHING else result.pop(change.source)
        changed = _apply_hunks(change, _lines(text))
        if change.target != _NOTHING:
            result[change.target] = changed
        elif changed:
            raise PatchError(f"{change.source} is deleted, but lines of it are left")
    return result


def _apply_hunks(change: _Change, lines: list[str]) -> str:
    done: list[str] = []
    used = 0
    for hunk in change.hunks:
        place = _place(lines, hunk, used)
        if place is None:
            name = change.source if change.source != _NOTHING else change.target
            raise PatchError(f"line {hunk.start} of {name} is not what the patch expects")
        done += [*lines[used:place], *hunk.new]
        used = place + len(hunk.old)
    return "".join([*done, *lines[used:]])


def _place(lines: list[str], hunk: _Hunk, first: int) -> int | None:
    """Where the old lines stand: as near as possible to where the patch says."""
    wanted = hunk.start - 1 if hunk.old else hunk.start
    places = range(first, len(lines) - len(hunk.old) + 1)
    if not hunk.old:
        return wanted if wanted in places else None
    fitting = [place for place in places if lines[place : place + len(hunk.old)] == hunk.old]
    return min(fitting, key=lambda place: abs(place - wanted), default=None)


class _Parser:
    def __init__(self, patch: str) -> None:
        self.changes: list[_Change] = []
        self._lines = iter(patch.split("\n"))
        self._announced = self._source = ""
        for line in self._lines:
            self._read(line)
        if not self.changes:
            raise PatchError("the patch changes nothing")

    def _read(self, line: str) -> None:
        for start, what in _REFUSED:
            if line.startswith(start):
                raise PatchError(f"the patch holds {what}, which is not accepted")
        if match := _ANNOUNCED.fullmatch(line):
            self._announced = _name(f"a/{match[1]}")
        elif line.startswith("new file mode "):
            self.changes.append(_Change(_NOTHING, self._announced))
        elif line.startswith("deleted file mode "):
            self.changes.append(_Change(self._announced, _NOTHING))
        elif line.startswith("--- "):
            self._source = _name(line[4:])
        elif line.startswith("+++ "):
            self._name_target(_name(line[4:]))
        elif match := _HUNK.fullmatch(line):
            self._read_hunk(match)
        elif line == _NO_NEWLINE and self.changes and self.changes[-1].hunks:
            self.changes[-1].hunks[-1].end_without_newline()

    def _name_target(self, target: str) -> None:
        if _NOTHING not in (self._source, target) and self._source != target:
            raise PatchError("the patch holds a rename, which is not accepted")
        known = self.changes[-1] if self.changes else None
        if known is None or known.hunks or (known.source, known.target) != (self._source, target):
            self.changes.append(_Change(self._source, target))

    def _read_hunk(self, match: re.Match[str]) -> None:
        if not self.changes:
            raise PatchError("the patch names no file before its first change")
        hunk = _Hunk(int(match[1]))
        self.changes[-1].hunks.append(hunk)
        old, new = int(match[2] or 1), int(match[4] or 1)
        while len(hunk.old) < old or len(hunk.new) < new:
            line = next(self._lines, None)
            if line is None:
                raise PatchError("the patch ends in the middle of a change")
            if line == _NO_NEWLINE:
                hunk.end_without_newline()
            else:
                hunk.add(line)


def _name(shown: str) -> str:
    """A path inside the folder; git's a/ and b/ go, and what could lead out is refused."""
    name = shown.split("\t")[0].strip().strip('"')
    if name == _NOTHING:
        return name
    path = PurePosixPath(re.sub(r"^[ab]/", "", name))
    parts = path.parts
    if (
        path.is_absolute()
        or not parts
        or "\\" in name
        or any(part == ".." or part.startswith(".") for part in parts)
    ):
        raise PatchError(f"the file name {shown!r} leads out of the workspace")
    return str(path)
