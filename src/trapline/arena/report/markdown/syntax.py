"""Markdown in which names and messages are escaped."""

import re
from collections.abc import Iterable, Sequence

_ACTIVE = re.compile(r"([\\`*_\[\]|~#])")


def text(value: object) -> str:
    """One line of plain text; markup, tags and cell borders in it are escaped."""
    line = " ".join(str(value).split())
    return _ACTIVE.sub(r"\\\1", line).replace("&", "&amp;").replace("<", "&lt;")


def table(heads: Sequence[object], rows: Iterable[Sequence[object]]) -> list[str]:
    """A table of plain text; a cell that is `Raw` is Markdown already."""
    lines = [_line(heads), _line([Raw("---")] * len(heads))]
    return [*lines, *(_line(row) for row in rows)]


class Raw(str):
    __slots__ = ()


def _line(cells: Sequence[object]) -> str:
    shown = (cell if isinstance(cell, Raw) else text(cell) for cell in cells)
    return "| " + " | ".join(shown) + " |"


def bold(value: object) -> Raw:
    return Raw(f"**{text(value)}**")


def bullets(items: Iterable[object]) -> list[str]:
    return [f"- {item if isinstance(item, Raw) else text(item)}" for item in items]


def join(*blocks: Sequence[str] | str) -> str:
    parts = ["\n".join([block] if isinstance(block, str) else block) for block in blocks]
    return "\n\n".join(part for part in parts if part) + "\n"
