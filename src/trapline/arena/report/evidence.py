"""Evidence as lines of text: the figures behind a dimension, flattened and shortened."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MOST_ROWS = 40
MOST_ITEMS = 16
MOST_CHARACTERS = 600


def rows(evidence: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(label, text) for each figure; the label of a nested one is its path."""
    found = list(_flatten("", evidence)) if evidence else []
    if len(found) > MOST_ROWS:
        rest = len(found) - MOST_ROWS
        found = [*found[:MOST_ROWS], ("…", f"{rest} more figures are in the bundle")]
    return found


def _flatten(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flatten(f"{path} › {name}" if path else str(name), inner)
    elif isinstance(value, list) and any(isinstance(item, (Mapping, list)) for item in value):
        for place, inner in enumerate(value):
            yield from _flatten(f"{path} {place + 1}", inner)
    else:
        yield path.replace("_", " "), text(value)


def text(value: Any) -> str:
    if isinstance(value, float):
        return number(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        shown = ", ".join(text(item) for item in value[:MOST_ITEMS])
        more = f", … ({len(value)} in all)" if len(value) > MOST_ITEMS else ""
        return cut((shown + more) or "none")
    if value is None or isinstance(value, bool):
        return {None: "–", True: "yes", False: "no"}[value]
    return cut(str(value)) or "–"


def number(value: float) -> str:
    """Four significant digits; integers below 1e15 in full."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value)}"
    return f"{value:.4g}"


def cut(shown: str, most: int = MOST_CHARACTERS) -> str:
    return shown if len(shown) <= most else shown[: most - 1] + "…"
