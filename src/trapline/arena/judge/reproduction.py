"""The failing call of a finding: in words, as data, and as a short program."""

import base64
import math
from collections.abc import Sequence
from keyword import iskeyword
from pathlib import Path
from typing import Any

import numpy as np

from trapline.arena.errors import UsageError
from trapline.arena.process import wire
from trapline.arena.process.proxy import RemoteObject, Stub
from trapline.arena.process.transcript import Transcript

#: What a reproduction adds to the submission's files.
SCRIPT, DATA = "reproduce.py", "calls.npz"
_MOST_SHOWN = 6
#: A larger argument is not kept: the check's seed makes it again.
MOST_BYTES = 1 << 16
_MOST_ANSWERS = 64


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
    if isinstance(value, Stub):
        return "<the model>"
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
    produced: dict[int, int] = {}
    calls = []
    try:
        for place, exchange in enumerate(transcript.exchanges):
            on = exchange.on
            calls.append(
                {
                    "entry": exchange.entry,
                    "on": None if on is None else produced[on._number],
                    "args": [_plain(value, produced) for value in exchange.args],
                    "kwargs": {k: _plain(value, produced) for k, value in exchange.kwargs.items()},
                }
            )
            if isinstance(exchange.answer, RemoteObject):
                produced.setdefault(exchange.answer._number, place)
    except (_NotPlainError, KeyError):
        return []
    return calls


class _NotPlainError(Exception):
    """An object of unknown kind, or more data than a bundle should hold."""


def _plain(value: Any, produced: dict[int, int]) -> Any:
    if isinstance(value, np.ndarray):
        if value.nbytes > MOST_BYTES:
            raise _NotPlainError
        return _array(value)
    if isinstance(value, np.generic):
        return {"scalar": _plain(np.asarray(value), produced)}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_plain(item, produced) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_plain(k, produced), _plain(v, produced)] for k, v in value.items()]}
    if isinstance(value, RemoteObject):
        return {"result": produced[value._number]}
    if isinstance(value, Stub):
        return {"stub": _stub(value, produced)}
    if isinstance(value, float):
        return {"float": repr(value)}
    if value is None or isinstance(value, bool | int | str):
        return value
    raise _NotPlainError


def _array(value: np.ndarray) -> dict[str, Any]:
    """As the submission got it: a view keeps its strides and what lies between its elements."""
    raw, first, strides = wire.extent(value)
    node = {
        "array": base64.b64encode(raw.tobytes()).decode(),
        "dtype": value.dtype.newbyteorder("<").str,
        "shape": list(value.shape),
    }
    return node if strides is None else {**node, "strides": strides, "first": first}


def _stub(stub: Stub, produced: dict[int, int]) -> list[Any]:
    """What a lent function was asked and what it answered, in order."""
    if len(stub.answers) > _MOST_ANSWERS:
        raise _NotPlainError
    return [
        [method, _plain(list(args), produced), _plain(answer, produced)]
        for (method, args), answer in zip(stub.calls, stub.answers, strict=False)
    ]


#: What a script needs to play a lent function's answers back.
_PLAYER = '''
class Player:
    """Answers as the grader's function did, by its arguments."""

    def __init__(self, answers):
        self.answers = {repr((m, a)): answer for m, a, answer in answers}

    def __call__(self, *args):
        return self.answers[repr(("", list(args)))]

    def __getattr__(self, name):
        return lambda *args: self.answers[repr((name, list(args)))]
'''


def write_script(folder: Path, title: str, calls: Sequence[dict[str, Any]]) -> Path:
    """`calls.npz` and `reproduce.py`, which runs the calls on the `solution.py` beside it.

    Titles quote a submission, and evidence may come from anywhere: what is not a recorded value
    becomes a comment or raises `UsageError`, never code.
    """
    arrays: dict[str, np.ndarray] = {}
    try:
        lines = [_call_line(place, call, arrays) for place, call in enumerate(calls)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"the evidence's calls are not in the form of a grade: {error}") from None
    player = _PLAYER if any("Player(" in line for line in lines) else ""
    np.savez(folder / DATA, **arrays)  # type: ignore[arg-type]
    script = folder / SCRIPT
    script.write_text(
        f"{as_comment(title)}\n\nimport numpy as np\nimport solution\n{player}\n"
        'data = np.load("calls.npz")\n' + "\n".join(lines) + f"\nprint(answer_{len(calls) - 1})\n",
        encoding="utf-8",
    )
    return script


def _call_line(place: int, call: dict[str, Any], arrays: dict[str, np.ndarray]) -> str:
    owner = "solution" if call["on"] is None else _answer(call["on"])
    args = [_source(node, arrays) for node in call["args"]]
    args += [f"{as_name(name)}={_source(node, arrays)}" for name, node in call["kwargs"].items()]
    return f"answer_{place} = {owner}.{as_name(call['entry'])}({', '.join(args)})"


def _answer(place: Any) -> str:
    return f"answer_{int(place)}"


def as_comment(text: str) -> str:
    """One line, whatever the text holds."""
    return f"# {' '.join(text.split())}"


def as_number(text: str) -> str:
    value = float(text)
    return repr(value) if math.isfinite(value) else f'float("{value}")'


def as_name(value: Any) -> str:
    if not isinstance(value, str) or not value.isidentifier() or iskeyword(value):
        raise UsageError(f"the evidence holds a call of {value!a}, which is not a name")
    return value


def _source(node: Any, arrays: dict[str, np.ndarray]) -> str:
    """A Python expression for a recorded value; arrays come from the data file."""
    if not isinstance(node, dict):
        return repr(node)
    if "array" in node:
        return _array_source(node, arrays)
    ((kind, content),) = node.items()
    if kind == "scalar":
        return f"{_source(content, arrays)}[()]"
    if kind == "float":
        return as_number(content)
    if kind == "result":
        return _answer(content)
    if kind == "stub":
        return f"Player({_sequence(content, arrays)})"
    if kind == "dict":
        pairs = [f"{_source(k, arrays)}: {_source(v, arrays)}" for k, v in content]
        return "{" + ", ".join(pairs) + "}"
    items = ", ".join(_source(item, arrays) for item in content)
    return f"[{items}]" if kind == "list" else f"({items}{',' if len(content) == 1 else ''})"


def _array_source(node: dict[str, Any], arrays: dict[str, np.ndarray]) -> str:
    """A view is made from its bytes with the strides that it had."""
    name = f"array_{len(arrays)}"
    dtype, shape = np.dtype(node["dtype"]), tuple(map(int, node["shape"]))
    raw = np.frombuffer(base64.b64decode(node["array"]), np.uint8)
    if "strides" not in node:
        arrays[name] = raw.view(dtype).reshape(shape)
        return f'data["{name}"]'
    arrays[name] = raw
    first, strides = int(node["first"]), tuple(map(int, node["strides"]))
    return f'np.ndarray({shape}, "{dtype.str}", data["{name}"], {first}, {strides})'


def _sequence(answers: Sequence[Any], arrays: dict[str, np.ndarray]) -> str:
    parts = [f"({m!r}, {_source(a, arrays)}, {_source(v, arrays)})" for m, a, v in answers]
    return f"[{', '.join(parts)}]"


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
