"""From a model's reply to files: fenced blocks that name their file."""

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

MAX_FILES = 40
_FILE = r"([\w./\\-]+\.(?:py|cu|cuh|h|md|txt|toml))"
#: ```python solution.py, ```python path=solution.py, ```solution.py, ```python title="solution.py"
_NAME_IN_FENCE = re.compile(rf"(?:^|\s)(?:path=|file=|filename=|title=)?[\"']?{_FILE}[\"']?\s*$")
#: A line before the fence that ends in a file name: "### `solution.py`", "**File: solution.py**"
_NAME_BEFORE = re.compile(rf"{_FILE}[`*\"':]*\s*$")
#: Languages of a nameless block that is `solution.cu` where that is accepted.
_CUDA = ("cuda", "cu", "cpp", "c++")
_FENCE = re.compile(r"^(`{3,}|~{3,})(.*)$")


class AnswerError(ValueError):
    """The reply has no usable files; the message gives the reason."""


def parse_files(reply: str, accepted: Sequence[str] = ("solution.py",)) -> dict[str, str]:
    """Path → content of every file.

    One of the accepted names must be there; a single nameless block is the solution.
    """
    blocks = list(_blocks(reply))
    files = {_safe(name): text for name, _, text in blocks if name}
    nameless = [(language, text) for name, language, text in blocks if not name]
    if not any(name in files for name in accepted) and len(nameless) == 1:
        language, text = nameless[0]
        is_cuda = "solution.cu" in accepted and language in _CUDA
        files["solution.cu" if is_cuda else accepted[0]] = text
    if not any(name in files for name in accepted):
        raise AnswerError(f"the reply does not contain {' or '.join(accepted)}")
    if len(files) > MAX_FILES:
        raise AnswerError(f"the reply has {len(files)} files; at most {MAX_FILES} are accepted")
    return files


def write_files(workspace: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = workspace / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except (OSError, ValueError) as error:
            raise AnswerError(f"{name!r} cannot be written: {error}") from None


def _blocks(reply: str) -> list[tuple[str, str, str]]:
    """Name and language ("" if not given) and text of each fenced block; unclosed blocks are
    ignored."""
    found: list[tuple[str, str, str]] = []
    lines: list[str] = []
    fence, name, before, language = "", "", "", ""
    for line in reply.splitlines():
        match = _FENCE.match(line.strip()) if not fence else None
        if match:
            fence, lines = match.group(1), []
            name = _name(match.group(2), before)
            language = match.group(2).strip().split(" ")[0].lower()
        elif fence and line.strip() == fence:
            found.append((name, language, "\n".join(lines) + "\n"))
            fence, before = "", ""
        elif fence:
            lines.append(line)
        elif line.strip():
            before = line.strip()
    return found


def _name(info: str, before: str) -> str:
    inside = _NAME_IN_FENCE.search(info.strip())
    if inside:
        return inside.group(1)
    outside = _NAME_BEFORE.search(before)
    return outside.group(1) if outside else ""


def _safe(name: str) -> str:
    """A plain relative path; a path that could leave the workspace is refused."""
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or any(part.startswith(".") for part in path.parts):
        raise AnswerError(f"the file name {name!r} leads out of the workspace")
    return str(path)
