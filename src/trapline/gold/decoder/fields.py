"""Fields of the JSON tables beside weights, each refused by its name where it is something else."""

import json
import math
from pathlib import Path
from typing import Any

from trapline.gold.errors import RangeError


def read_table(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise RangeError(f"{path} is no JSON: {error}") from None
    if not isinstance(raw, dict):
        raise RangeError(f"{path} holds no configuration")
    return raw


def size(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    """A count: what is no positive integer would fail far from here, or not at all."""
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
    """The same above 0; without a default it has to be there."""
    if default is None and raw.get(key) is None:
        raise KeyError(key)
    found = real(raw, key, default or 0.0)
    if found <= 0:
        raise RangeError(f"{key} must be positive, got {found}")
    return found


def flag(raw: dict[str, Any], key: str, *, default: bool) -> bool:
    """Words like "no" would count as true."""
    found = default if raw.get(key) is None else raw[key]
    if type(found) is not bool:
        raise RangeError(f"{key} must be true or false, got {found!r}")
    return found
