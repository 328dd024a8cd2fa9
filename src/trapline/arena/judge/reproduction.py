"""The failing call of a finding: in words, as data, and as a short program."""

import base64
from typing import Any

import numpy as np

from trapline.arena.process.transcript import Transcript

_MOST_SHOWN = 6
#: A larger argument is not kept: the check's seed makes it again.
_MOST_BYTES = 1 << 16


def call_in_words(transcript: Transcript) -> str:
    """`softmax_topk(float32[1, 40] …, k=3)`: the last call of the check."""
    if not transcript.exchanges:
        return ""
    last = transcript.exchanges[-1]
    parts = [in_words(value) for value in last.args]
    parts += [f"{name}={in_words(value)}" for name, value in last.kwargs.items()]
    before = len(transcript.exchanges) - 1
    prefix = f"after {before} earlier calls, " if before > 1 else ""
    return f"{prefix}{last.entry}({', '.join(parts)})"[:1000]


def in_words(value: Any) -> str:
    if isinstance(value, np.ndarray):
        if value.size <= _MOST_SHOWN:
            return f"{value.dtype}{list(value.shape)} {np.array2string(value, separator=', ')}"
        low, high = _range(value)
        return f"{value.dtype}{list(value.shape)} from {low} to {high}"
    if isinstance(value, list | tuple) and len(value) > _MOST_SHOWN:
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, list | tuple):
        inner = ", ".join(in_words(item) for item in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {in_words(v)}" for k, v in value.items()) + "}"
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"


def _range(value: np.ndarray) -> tuple[str, str]:
    if value.dtype.kind not in "biuf":
        return "…", "…"
    with np.errstate(all="ignore"):
        return f"{np.min(value):.4g}", f"{np.max(value):.4g}"


def recorded(transcript: Transcript) -> list[dict[str, Any]]:
    """The calls of a check as plain data; empty where they cannot be written down."""
    try:
        return [
            {
                "entry": exchange.entry,
                "method": exchange.on is not None,
                "args": [_plain(value) for value in exchange.args],
                "kwargs": {name: _plain(value) for name, value in exchange.kwargs.items()},
            }
            for exchange in transcript.exchanges
        ]
    except _NotPlainError:
        return []


class _NotPlainError(Exception):
    """A function, an object, or more data than a bundle should hold."""


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.nbytes > _MOST_BYTES:
            raise _NotPlainError
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"array": data, "dtype": value.dtype.str, "shape": list(value.shape)}
    if isinstance(value, np.generic):
        return {"scalar": _plain(np.asarray(value))}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_plain(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_plain(k), _plain(v)] for k, v in value.items()]}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return {"float": repr(value)}
    raise _NotPlainError


def call_size(transcript: Transcript) -> int:
    """How much a reader has to look at: elements of all arguments of all calls."""
    return sum(
        _elements(value)
        for exchange in transcript.exchanges
        for value in (*exchange.args, *exchange.kwargs.values())
    )


def _elements(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return int(value.size)
    if isinstance(value, list | tuple):
        return 1 + sum(_elements(item) for item in value)
    if isinstance(value, dict):
        return 1 + sum(_elements(item) for item in value.values())
    return 1
