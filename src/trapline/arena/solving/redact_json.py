"""Redaction of transcripts that are JSON, in whole or by line: the text behind the escapes counts.

In a JSON line `\\nkim@host` is a name after a line break, not the name `nkim`. So strings are read
before they are redacted and written again afterwards, however deep JSON lies in JSON. What needed
no change stays byte for byte; what did stays valid JSON.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any

from trapline.arena.solving.redact import Found, Redactor
from trapline.arena.solving.redact_names import NAME_KEYS, learn_names, names_in_value


def learn_document(text: str) -> frozenset[str]:
    """The names that a transcript gives away, in its texts and as values of telling keys."""
    whole = _container(text)
    if whole is not None:
        return _learned(whole)
    plain, found = [], frozenset[str]()
    for line in text.splitlines(keepends=True):
        value = _container(line)
        if value is None:
            plain.append(line)
        else:
            found |= _learned(value)
    return found | learn_names("".join(plain))


def _learned(value: Any) -> frozenset[str]:
    told = (names_in_value(inner) for name, inner in _pairs(value) if _is_named(name, inner))
    return frozenset().union(*told, *(learn_document(string) for string in _strings(value)))


def _is_named(name: str, value: Any) -> bool:
    """Whether the value of this key is somebody's name."""
    return isinstance(value, str) and name.lower() in NAME_KEYS and bool(names_in_value(value))


def redact_document(text: str, redactor: Redactor, hidden: Counter[str] | None = None) -> str:
    """A transcript in any of its forms, made safe; `hidden` counts by kind what was replaced."""
    counts = Counter[str]() if hidden is None else hidden
    whole = _container(text)
    if whole is not None:
        indent = 1 if "\n" in text.strip() else None
        return _rewritten(text, whole, redactor, counts, indent)
    parts = []
    for is_json, lines in groupby(text.splitlines(keepends=True), key=_is_json):
        if is_json:
            parts += [_rewritten(line, _container(line), redactor, counts) for line in lines]
        else:
            parts.append(redactor.redact("".join(lines), counts))
    return "".join(parts)


def scan_document(text: str, redactor: Redactor) -> list[Found]:
    """Findings that remain in a transcript, with the line numbers of the file."""
    whole = _container(text)
    if whole is not None:
        return [
            *(
                Found(kind="name", line=1, hint=inner[:1] + "…")
                for name, inner in _pairs(whole)
                if _is_named(name, inner)
            ),
            *(found for string in _strings(whole) for found in scan_document(string, redactor)),
        ]
    found: list[Found] = []
    first = 1
    for is_json, group in groupby(text.splitlines(keepends=True), key=_is_json):
        lines = list(group)
        if is_json:
            for number, line in enumerate(lines, first):
                inner = scan_document(line, redactor)
                found += [one.model_copy(update={"line": number}) for one in inner]
        else:
            inner = redactor.scan("".join(lines))
            found += [one.model_copy(update={"line": first + one.line - 1}) for one in inner]
        first += len(lines)
    return found


def _is_json(line: str) -> bool:
    return _container(line) is not None


def _container(text: str) -> Any:
    """The JSON object or list in a text, or None."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        parsed = json.loads(text, object_pairs_hook=_complete)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, (dict, list)) else None


def _rewritten(
    text: str, value: Any, redactor: Redactor, counts: Counter[str], indent: int | None = None
) -> str:
    def change(string: str) -> str:
        return redact_document(string, redactor, counts)

    def hide(_: str) -> str:
        counts["name"] += 1
        return "<name>"

    safe = _mapped(value, change, hide)
    if safe == value:
        return text
    end = text[len(text.rstrip()) :]
    return json.dumps(safe, ensure_ascii=False, indent=indent) + end


def _mapped(value: Any, change: Callable[[str], str], hide: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return _complete(
            (change(name), hide(inner) if _is_named(name, inner) else _mapped(inner, change, hide))
            for name, inner in value.items()
        )
    if isinstance(value, list):
        return [_mapped(inner, change, hide) for inner in value]
    return value


def _complete(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """All pairs: repeated names are marked, so that no value hides behind another."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        while name in found:
            name += "+"
        found[name] = value
    return found


def _pairs(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key of every object, with its value."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield name, inner
            yield from _pairs(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _pairs(inner)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield name
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)
