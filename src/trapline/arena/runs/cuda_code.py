"""Reads CUDA answers to other prompts without running them: which launcher they have, how to call
it, and, where that is asked for, the least repair that lets them compile."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SUFFIXES = (".cu", ".cuh")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_TEMPLATE = r"(?P<template>template\s*<[^>]*>\s*)?"
_QUALIFIERS = r"(?:(?:inline|static|__host__|extern\s+\"C\")\s+)*"
#: Names that an answer uses → the header that declares them.
_HEADERS = {
    "cfloat": r"\b(FLT|DBL)_(MAX|MIN|EPSILON)\b",
    "climits": r"\b(INT|UINT|LLONG)_(MAX|MIN)\b",
    "cstdint": r"\bu?int(8|16|32|64)_t\b",
    "cmath": r"\bINFINITY\b",
}
_SAME_HEADER = {
    "cfloat": "float.h",
    "climits": "limits.h",
    "cstdint": "stdint.h",
    "cmath": "math.h",
}
_DIRECTIVE = re.compile(
    r"\s*#\s*(include|define|undef|ifn?def|if|el(se|if)|endif|pragma|error|line)\b"
)


@dataclass(frozen=True)
class Launcher:
    """A host function that starts the answer's kernel."""

    file: str
    name: str
    #: Whether k is a template argument.
    is_template: bool
    #: Type and name of each parameter.
    parameters: tuple[tuple[str, str], ...]


def code_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES)


def find_launchers(folder: Path, name: str) -> list[Launcher]:
    """The definitions of this function in the folder's CUDA files."""
    found = []
    pattern = re.compile(
        rf"{_TEMPLATE}{_QUALIFIERS}[\w:]+\s+{name}\s*\((?P<parameters>[^)]*)\)\s*\{{"
    )
    for path in code_files(folder):
        text = _COMMENT.sub(" ", path.read_text(errors="replace", encoding="utf-8"))
        for match in pattern.finditer(text):
            given = tuple(map(_parameter, match["parameters"].split(",")))
            relative = str(path.relative_to(folder))
            found.append(Launcher(relative, name, bool(match["template"]), given))
    return found


def _parameter(text: str) -> tuple[str, str]:
    """`const float* __restrict__ x = 0` → (`const float*`, `x`)."""
    declared = text.split("=")[0].replace("__restrict__", " ").replace("*", " * ")
    *kind, name = declared.split()
    return " ".join(kind).replace(" *", "*"), name


# --- calling it -----------------------------------------------------------------------------------

#: The k that the launchers of templates are asked for.
TEMPLATE_K = 32
_SIZES = {
    "B": r"b|batch(_size)?",
    "T": r"t|seq(_len)?|time",
    "V": r"v|vocab(_size)?",
    "k": r"(top_?)?k",
}


def arguments(launcher: Launcher) -> tuple[list[str], str]:
    """What to pass, in order, and the type of an index; a `ValueError` says what is unclear."""
    given, index = [], ""
    for kind, name in launcher.parameters:
        pointer = kind.endswith("*")
        if pointer and kind.startswith("const float"):
            given.append("x")
        elif pointer and kind == "float*":
            given.append("p")
        elif pointer and "const" not in kind and re.fullmatch(r"(int|int32_t|int64_t)\*", kind):
            index = kind[:-1]
            given.append("i")
        elif kind == "cudaStream_t":
            given.append("stream")
        else:
            given.append(_size(launcher, kind, name))
    if sorted(given[:3]) != ["i", "p", "x"]:
        raise ValueError(
            f"{launcher.name} takes other pointers than logits, indices, probabilities"
        )
    return given, index


def _size(launcher: Launcher, kind: str, name: str) -> str:
    for size, pattern in _SIZES.items():
        if re.fullmatch(pattern, name, re.IGNORECASE) and not kind.endswith("*"):
            return size
    raise ValueError(f"{launcher.name} takes {kind} {name}, whose meaning its name does not tell")


def adapter(template: str, launcher: Launcher) -> str:
    """The profile's `adapter.cu` with this launcher in it."""
    given, index = arguments(launcher)
    call = f"{launcher.name}<{TEMPLATE_K}>" if launcher.is_template else launcher.name
    filled = {"FILE": launcher.file, "INDEX": index, "CALL": f"{call}({', '.join(given)})"}
    return re.sub(r"@(\w+)@", lambda match: filled[match[1]], template)


# --- repairing it ---------------------------------------------------------------------------------


def repaired(text: str) -> tuple[str, list[str]]:
    """The text with the least that lets it compile, and what was done to it, in words."""
    notes = []
    if blocks := _fenced(text):
        text = "\n".join(blocks)
        notes.append(f"took {len(blocks)} fenced blocks of CUDA out of Markdown")
    lines, prose = _without_prose(text.splitlines())
    if prose:
        text = "\n".join(lines) + "\n"
        notes.append(f"made comments of {prose} lines of prose")
    missing = [name for name, pattern in _HEADERS.items() if _lacks(text, name, pattern)]
    if missing:
        text = "".join(f"#include <{name}>\n" for name in missing) + text
        notes.append(f"included {', '.join(missing)}")
    return text, notes


def _fenced(text: str) -> list[str]:
    """The blocks of CUDA in a Markdown file that define functions; none in a file of code."""
    found = re.findall(r"^```(?:cuda|cpp|c\+\+|c)[ \t]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [block for block in found if re.search(r"__global__|__device__|#include", block)]


def _without_prose(lines: Sequence[str]) -> tuple[list[str], int]:
    """Comments out lines of code that no C++ has: bare `*` lists, characters outside ASCII."""
    shown, count = [], 0
    for line, code in zip(lines, _code_of(lines), strict=True):
        heading = re.match(r"\s*#", code) and not _DIRECTIVE.match(code)
        listed = re.match(r"\s*\*(\s|$)", code)
        if heading or listed or not code.isascii():
            line, count = f"// {line}", count + 1
        shown.append(line)
    return shown, count


def _code_of(lines: Sequence[str]) -> Iterator[str]:
    """Each line without its comments and texts."""
    inside = False
    for line in lines:
        code = re.sub(r'"(\\.|[^"\\])*"', '""', line) if not inside else line
        kept = ""
        while code:
            if inside:
                end = code.find("*/")
                inside, code = end < 0, code[end + 2 :] if end >= 0 else ""
                continue
            start = re.search(r"//|/\*", code)
            if start is None or start[0] == "//":
                kept += code if start is None else code[: start.start()]
                break
            kept, code, inside = kept + code[: start.start()], code[start.end() :], True
        yield kept


def _lacks(text: str, header: str, pattern: str) -> bool:
    included = re.search(rf"#\s*include\s*<({header}|{_SAME_HEADER[header]})>", text)
    return included is None and re.search(pattern, _COMMENT.sub(" ", text)) is not None
