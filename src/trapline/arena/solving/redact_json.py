"""Redaction of transcripts that are JSON, in whole or by line: the text behind the escapes counts.

In a JSON line `\\nkim@host` is a name after a line break, not the name `nkim`. So strings are read
before they are redacted and written again afterwards, however deep JSON lies in JSON. What needed
no change stays byte for byte; what did stays valid JSON.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any

from trapline.arena.solving.redact import Found, Redactor


def redact_document(text: str, redactor: Redactor) -> str:
    """A transcript in any of its forms, made safe."""
    whole = _container(text)
    if whole is not None:
        return _rewritten(text, whole, redactor, indent=1 if "\n" in text.strip() else None)
    parts = []
    for is_json, lines in groupby(text.splitlines(keepends=True), key=_is_json):
        if is_json:
            parts += [_rewritten(line, _container(line), redactor) for line in lines]
        else:
            parts.append(redactor.redact("".join(lines)))
    return "".join(parts)


def scan_document(text: str, redactor: Redactor) -> list[Found]:
    """Findings that remain in a transcript, with the line numbers of the file."""
    whole = _container(text)
    if whole is not None:
        return [found for string in _strings(whole) for found in scan_document(string, redactor)]
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


def _rewritten(text: str, value: Any, redactor: Redactor, indent: int | None = None) -> str:
    safe = _mapped(value, lambda string: redact_document(string, redactor))
    if safe == value:
        return text
    end = text[len(text.rstrip()) :]
    return json.dumps(safe, ensure_ascii=False, indent=indent) + end


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return _complete((change(name), _mapped(inner, change)) for name, inner in value.items())
    if isinstance(value, list):
        return [_mapped(inner, change) for inner in value]
    return value


def _complete(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """All pairs: repeated names are marked, so that no value hides behind another."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        while name in found:
            name += "+"
        found[name] = value
    return found


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
