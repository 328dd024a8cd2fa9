"""Highlighted source, fast enough for thousands of files."""

import builtins
import keyword
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache

from markupsafe import Markup, escape
from pygments import highlight  # type: ignore[import-untyped]
from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]
from pygments.lexer import Lexer  # type: ignore[import-untyped]
from pygments.token import (  # type: ignore[import-untyped]
    Comment,
    Keyword,
    Name,
    Number,
    String,
    Text,
    _TokenType,
)

#: Longer files are cut here; the bundle has them whole.
LONGEST = 60_000
#: Lines shown before and after one in question.
AROUND = 3
_WHERE = re.compile(r"(?P<path>[^:]+\.py):(?P<line>\d+)")
_STRING = (
    r"[rbfuRBFU]{0,2}(?:"
    r'"""(?:\\.|[^\\])*?(?:"""|\Z)|'
    r"'''(?:\\.|[^\\])*?(?:'''|\Z)|"
    r'"(?:\\.|[^"\\\n])*"?|'
    r"'(?:\\.|[^'\\\n])*'?)"
)
_PIECES = re.compile(
    rf"(?P<comment>\#[^\n]*)|(?P<string>{_STRING})|(?P<decorator>(?<![^\s])@[^\W\d][\w.]*)"
    r"|(?P<defined>(?<=def )\w+|(?<=class )\w+)|(?P<word>[^\W\d]\w*)|(?P<number>\d[\w.]*)"
    r"|(?P<rest>.)",
    re.DOTALL,
)
_KINDS: dict[str, _TokenType] = {
    "comment": Comment,
    "string": String,
    "decorator": Name.Decorator,
    "defined": Name.Function,
    "number": Number,
    "rest": Text,
}
_KEYWORDS = frozenset(keyword.kwlist)
_BUILTINS = frozenset(name for name in dir(builtins) if not name.startswith("_"))


class QuickPython(Lexer):  # type: ignore[misc]
    """Python by one regular expression, six times as fast as Pygments' own lexer.

    A field of 100 entrants brings eight megabytes of source: half a minute for that one.
    """

    name = "Python, quickly"

    def get_tokens_unprocessed(self, text: str) -> Iterator[tuple[int, _TokenType, str]]:
        for piece in _PIECES.finditer(text):
            yield piece.start(), _kind(piece), piece.group()


def _kind(piece: re.Match[str]) -> _TokenType:
    group = piece.lastgroup or "rest"
    if group != "word":
        return _KINDS[group]
    word = piece.group()
    if word in _KEYWORDS:
        return Keyword
    return Name.Builtin if word in _BUILTINS else Text


_PYTHON = QuickPython(stripnl=False)
_HTML = HtmlFormatter(nowrap=True)


@lru_cache(maxsize=512)
def _python(text: str) -> Markup:
    return Markup(highlight(text, _PYTHON, _HTML))  # noqa: S704 - Pygments escapes what it wraps


def excerpt(where: str, files: Mapping[str, str]) -> Markup:
    """The lines around a place such as `solution.py:12 in f`, numbered, that one marked."""
    lines, first, line = _around(where, files)
    if not lines:
        return Markup("")
    numbered = [
        Markup("{:4d}  {}").format(number, row)
        for number, row in enumerate(_python("\n".join(lines)).split("\n"), start=first)
    ]
    numbered[line - first] = Markup("<mark>{}</mark>").format(numbered[line - first])
    return Markup("\n").join(numbered)


def plain_excerpt(where: str, files: Mapping[str, str]) -> str:
    """The same lines as text, that one marked by `>`."""
    lines, first, line = _around(where, files)
    return "\n".join(
        f"{'>' if number == line else ' '}{number:4d}  {row}"
        for number, row in enumerate(lines, start=first)
    )


def _around(where: str, files: Mapping[str, str]) -> tuple[list[str], int, int]:
    """The lines, the number of the first and of the one in question; no lines if it is unknown."""
    match = _WHERE.match(where)
    if match is None or match["path"] not in files:
        return [], 0, 0
    line = int(match["line"])
    lines = files[match["path"]][:LONGEST].splitlines()
    if not 1 <= line <= len(lines):
        return [], 0, 0
    first, last = max(1, line - AROUND), min(len(lines), line + AROUND)
    return lines[first - 1 : last], first, line


def render(path: str, text: str) -> Markup:
    """The file as HTML for a `<pre>`; everything in it is escaped."""
    shown = text[:LONGEST]
    if not path.endswith(".py"):
        return escape(shown)
    return _python(shown)
