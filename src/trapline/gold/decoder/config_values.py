"""Checked values of a JSON file: an error names the key, what it holds and what is accepted."""

import json
import math
from pathlib import Path
from typing import Any

from trapline.gold.errors import RangeError


def read_table(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RangeError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise RangeError(f"{path} must hold a JSON object, got {type(raw).__name__}")
    return raw


def size(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer; null or 0 means the default."""
    found = default if default is not None and not raw.get(key) else raw[key]
    if type(found) is not int or found < 1:
        raise RangeError(f"{key} must be a positive integer, got {found!r}")
    return found


def real(raw: dict[str, Any], key: str, default: float) -> float:
    found = default if raw.get(key) is None else raw[key]
    if type(found) not in (int, float) or not math.isfinite(found):
        raise RangeError(f"{key} must be a number, got {found!r}")
    return float(found)


def positive(raw: dict[str, Any], key: str, default: float | None = None) -> float:
    """A positive number; required without a default."""
    if default is None and raw.get(key) is None:
        raise KeyError(key)
    found = real(raw, key, default or 0.0)
    if found <= 0:
        raise RangeError(f"{key} must be positive, got {found}")
    return found


def flag(raw: dict[str, Any], key: str, *, default: bool) -> bool:
    """A JSON boolean; other values, such as "no", are refused."""
    found = default if raw.get(key) is None else raw[key]
    if type(found) is not bool:
        raise RangeError(f"{key} must be true or false, got {found!r}")
    return found
