"""From a model's reply to files: fenced blocks that name their file."""

import re
from pathlib import Path, PurePosixPath

MAX_FILES = 40
#: ```python solution.py, ```python path=solution.py, ```solution.py, ```python title="solution.py"
_NAME_IN_FENCE = re.compile(
    r"(?:^|\s)(?:path=|file=|filename=|title=)?[\"']?([\w./\\-]+\.(?:py|md|txt|toml))[\"']?\s*$"
)
#: A line before the fence that ends in a file name: "### `solution.py`", "**File: solution.py**"
_NAME_BEFORE = re.compile(r"([\w./\\-]+\.(?:py|md|txt|toml))[`*\"':]*\s*$")
_FENCE = re.compile(r"^(`{3,}|~{3,})(.*)$")


class AnswerError(ValueError):
    """The reply has no usable files; the message gives the reason."""


def parse_files(reply: str) -> dict[str, str]:
    """Path → content of every file; a single nameless block is `solution.py`."""
    blocks = list(_blocks(reply))
    files = {_safe(name): text for name, text in blocks if name}
    nameless = [text for name, text in blocks if not name]
    if "solution.py" not in files and len(nameless) == 1:
        files["solution.py"] = nameless[0]
    if "solution.py" not in files:
        raise AnswerError("the reply does not contain solution.py")
    if len(files) > MAX_FILES:
        raise AnswerError(f"the reply has {len(files)} files; at most {MAX_FILES} are accepted")
    return files


def write_files(workspace: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = workspace / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        except (OSError, ValueError) as error:
            raise AnswerError(f"{name!r} cannot be written: {error}") from None


def _blocks(reply: str) -> list[tuple[str, str]]:
    """Name ("" if none is given) and text of each fenced block; unclosed blocks are ignored."""
    found: list[tuple[str, str]] = []
    lines: list[str] = []
    fence, name, before = "", "", ""
    for line in reply.splitlines():
        match = _FENCE.match(line.strip()) if not fence else None
        if match:
            fence, lines = match.group(1), []
            name = _name(match.group(2), before)
        elif fence and line.strip() == fence:
            found.append((name, "\n".join(lines) + "\n"))
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
