"""The anatomy of an answer: how much of what it consists of. No grade depends on it."""

import re
from collections.abc import Mapping

from trapline.arena.record import Record

_FUNCTION = re.compile(r"^\s*(?:async\s+)?def (\w+)", re.MULTILINE)
_ASSERTION = re.compile(r"^\s*assert\b|\bassert_\w+\(|\.assert[A-Z]\w*\(|\braises\(", re.MULTILINE)


class Anatomy(Record):
    files: int
    #: Lines of Python that are neither empty nor comments, tests included.
    lines: int
    #: Functions and methods other than tests.
    functions: int
    tests: int
    assertions: int
    #: Comment lines for each line of code.
    comment_share: float
    #: Words of prose in Markdown and text files.
    prose_words: int


def anatomy(files: Mapping[str, str]) -> Anatomy:
    code = [text for path, text in files.items() if path.endswith(".py")]
    lines = [line.strip() for text in code for line in text.splitlines() if line.strip()]
    comments = sum(line.startswith("#") for line in lines)
    prose = [text for path, text in files.items() if path.endswith((".md", ".txt"))]
    names = [name for text in code for name in _FUNCTION.findall(text)]
    tests = sum(name.startswith("test_") for name in names)
    return Anatomy(
        files=len(files),
        lines=len(lines) - comments,
        functions=len(names) - tests,
        tests=tests,
        assertions=sum(len(_ASSERTION.findall(text)) for text in code),
        comment_share=comments / max(1, len(lines) - comments),
        prose_words=sum(len(text.split()) for text in prose),
    )
