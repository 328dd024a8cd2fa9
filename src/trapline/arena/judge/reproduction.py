"""The failing call of a finding: in words, as data, and as a short program."""

import base64
import math
import zlib
from collections.abc import Sequence
from keyword import iskeyword
from pathlib import Path
from typing import Any

import numpy as np

from trapline.arena.errors import UsageError
from trapline.arena.process import wire
from trapline.arena.process.proxy import RemoteObject, Stub
from trapline.arena.process.transcript import Exchange, Transcript

#: What a reproduction adds to the submission's files.
SCRIPT, DATA = "reproduce.py", "calls.npz"
_MOST_SHOWN = 6
#: Deflated, of all arguments of a check: more is not kept, because its seed makes them again.
MOST_BYTES = 1 << 16
#: Arrays larger than this multiple of the room that is left are not worth the attempt.
_MOST_DEFLATION = 16
#: Bytes that the form of one value takes.
_ITEM = 8
#: No array of a check is larger.
_MOST_INFLATED = 1 << 28
#: An argument of this size shows how much memory a call takes.
_LARGE = 1 << 18


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


def recorded(transcript: Transcript, most: int | None = MOST_BYTES) -> list[dict[str, Any]]:
    """The calls of a check as plain data; empty where they cannot be written down, or take more
    than `most` bytes."""
    recorder = _Recorder(most)
    try:
        return [recorder.call(place, each) for place, each in enumerate(transcript.exchanges)]
    except (_NotPlainError, KeyError):
        return []


class _NotPlainError(Exception):
    """An object of unknown kind, or more data than a bundle should hold."""


class _Recorder:
    """Writes values down; objects of the submission become the answers that brought them."""

    def __init__(self, most: int | None) -> None:
        self._left = math.inf if most is None else most
        self._produced: dict[tuple[int, int, int], dict[str, Any]] = {}

    def call(self, place: int, exchange: Exchange) -> dict[str, Any]:
        on = exchange.on
        call = {
            "entry": exchange.entry,
            "on": None if on is None else self._produced[_identity(on)],
            "args": [self.plain(value) for value in exchange.args],
            "kwargs": {name: self.plain(value) for name, value in exchange.kwargs.items()},
        }
        answer = exchange.answer[0] if exchange.left and exchange.answer else exchange.answer
        self._note(answer, place, [])
        flags = {
            "looked": exchange.left or exchange.looked,
            "refilled": exchange.refilled,
            "raised": bool(exchange.raised),
            "silent": answer is None or isinstance(answer, RemoteObject),
        }
        if any(isinstance(value, Stub) for value in (*exchange.args, *exchange.kwargs.values())):
            call["answered"] = exchange.message or in_words(answer)
        return call | {name: True for name, holds in flags.items() if holds}

    def _note(self, answer: Any, place: int, path: list[Any]) -> None:
        """Where the objects in an answer are found."""
        if isinstance(answer, RemoteObject):
            found = {"result": place, "path": path} if path else {"result": place}
            self._produced.setdefault(_identity(answer), found)
        elif isinstance(answer, list | tuple):
            for number, item in enumerate(answer):
                self._note(item, place, [*path, number])

    def plain(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return self._array(value)
        if isinstance(value, np.generic):
            return {"scalar": self._array(np.asarray(value))}
        if isinstance(value, list | tuple):
            return {type(value).__name__: [self.plain(item) for item in value]}
        if isinstance(value, dict):
            return {"dict": [[self.plain(k), self.plain(v)] for k, v in value.items()]}
        if isinstance(value, RemoteObject):
            return self._produced[_identity(value)]
        if isinstance(value, Stub):
            return {"stub": [[*map(self.plain, heard)] for heard in value.heard]}
        self._take(len(repr(value)) + _ITEM)
        if isinstance(value, float):
            return {"float": repr(value)}
        if value is None or isinstance(value, bool | int | str):
            return value
        raise _NotPlainError

    def _array(self, value: np.ndarray) -> dict[str, Any]:
        """As the submission got it: a view keeps its strides and what lies between its elements."""
        raw, first, strides = wire.extent(value)
        if raw.nbytes > _MOST_DEFLATION * self._left:
            raise _NotPlainError
        data = zlib.compress(raw.tobytes())
        self._take(len(data) + _ITEM)
        node = {
            "deflated": base64.b64encode(data).decode(),
            "dtype": value.dtype.newbyteorder("<").str,
            "shape": list(value.shape),
        }
        return node if strides is None else {**node, "strides": strides, "first": first}

    def _take(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise _NotPlainError


def _identity(value: RemoteObject) -> tuple[int, int, int]:
    """Each process numbers its own objects."""
    return id(value._submission), id(value._session), value._number


#: What a script needs to play a lent function's answers back.
_PLAYER = '''

class Player:
    """Answers as the grader's function did, by its arguments."""

    asked = 0

    def __init__(self, heard):
        self.heard = {}
        for method, args, kwargs, answer in heard:
            self.heard.setdefault(self.key(method, args, kwargs), []).append(answer)

    def key(self, *value):
        if isinstance(value[0], np.ndarray):
            return value[0].dtype.str, value[0].shape, value[0].tobytes()
        parts = value if len(value) > 1 else value[0]
        if isinstance(parts, dict):
            parts = sorted(parts.items())
        return tuple(map(self.key, parts)) if isinstance(parts, (list, tuple)) else repr(parts)

    def ask(self, method, args, kwargs):
        Player.asked += 1
        answers = self.heard.get(self.key(method, args, kwargs))
        if answers is None:
            raise LookupError(f"the grader refused, or was not asked: {method}{args}")
        return answers.pop(0) if len(answers) > 1 else answers[0]

    def __call__(self, *args, **kwargs):
        return self.ask("", args, kwargs)

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.ask(name, args, kwargs)

'''
#: What a script needs for a caller that keeps its arrays.
_REFILLED = '''

def refilled(function, *args, held={}):
    """Calls it with the arrays of the last such call, filled anew."""
    args = tuple(map(np.asarray, args))
    kept = held.setdefault((function, *(arg.shape for arg in args)), args)
    for array, new in zip(kept, args):
        array[...] = new
    return function(*kept)


'''
#: What a script needs to see more than the answer.
_LOOK = '''

def arrays(value, depth=6):
    """The arrays in containers and objects."""
    if isinstance(value, np.ndarray) or not depth:
        return [value][:depth]
    parts = value if isinstance(value, (list, tuple)) else getattr(value, "__dict__", value)
    if hasattr(parts, "__slots__"):
        parts = [getattr(parts, name, None) for name in parts.__slots__]
    parts = list(parts.values()) if isinstance(parts, dict) else parts
    is_plain = isinstance(parts, (list, tuple))
    return [found for part in parts for found in arrays(part, depth - 1)] if is_plain else []


def look(function, *args, earlier=[], **kwargs):
    """Calls it, and says what it changed and whose memory it uses."""
    before = [(repr(arg), [x.tobytes() for x in arrays(arg)]) for arg in args]
    try:
        answer = function(*args, **kwargs)
    finally:
        for place, arg in enumerate(args):
            if before[place] != (repr(arg), [x.tobytes() for x in arrays(arg)]):
                print(f"argument {place} was changed to {arg}")
    kept = arrays(answer) + arrays(getattr(function, "__self__", None))
    known = {f"argument {place}": arrays(arg) for place, arg in enumerate(args)}
    for name, others in {**known, "an earlier answer": earlier}.items():
        if any(np.may_share_memory(one, other) for one in kept for other in others):
            print(f"the answer lies in the memory of {name}")
    earlier += arrays(answer)
    return answer

'''


def write_script(
    folder: Path,
    title: str,
    calls: Sequence[dict[str, Any]],
    module: str = "solution",
    message: str = "",
) -> Path:
    """`calls.npz` and `reproduce.py`, which runs the calls on the answer beside it.

    `message` is what the check said: what was expected, and where the answer is off.

    Titles quote a submission, and evidence may come from anywhere: what is not a recorded value
    becomes a comment or raises `UsageError`, never code.
    """
    arrays: dict[str, np.ndarray] = {}
    lines: list[str] = []
    try:
        for place, call in enumerate(calls):
            lines += _call_lines(place, call, place == len(calls) - 1, arrays)
        large = _is_large(calls[-1])
    except (KeyError, TypeError, ValueError, AttributeError, zlib.error) as error:
        raise UsageError(f"the evidence's calls are not in the form of a grade: {error}") from None
    if large:
        start, peak = "tracemalloc.start()", "peak = tracemalloc.get_traced_memory()[1]"
        lines[-2:] = [start, lines[-2], peak, lines[-1]]
        lines += ['print(f"the last call took {peak / 1e6:.1f} MB")']
    if any("Player(" in line for line in lines):
        lines.append('print("the functions of the grader were asked", Player.asked, "times")')
    text = "\n".join(lines)
    renamed = "" if module == "solution" else " as solution"
    imports = ["import tracemalloc\n"] * large + [
        "import numpy as np",
        f"import {as_name(module)}{renamed}",
    ]
    start = "\n".join([as_comment(title), *as_comments(message), "", *imports, ""])
    parts = (_PLAYER, "Player("), (_LOOK, "look("), (_REFILLED, "refilled(")
    start += "".join(part for part, name in parts if name in text)
    np.savez_compressed(folder / DATA, **arrays)  # type: ignore[arg-type]
    script = folder / SCRIPT
    script.write_text(
        f"{start}\nnp.set_printoptions(precision=17, threshold=10000)\n"
        f'data = dict(np.load("{DATA}"))\n{as_print(message)}{text}\n',
        encoding="utf-8",
    )
    return script


def _call_lines(
    place: int, call: dict[str, Any], is_last: bool, arrays: dict[str, np.ndarray]
) -> list[str]:
    """The call and, unless it answers nothing, its answer. The script goes on after an exception
    that the check went on after."""
    on = call["on"]
    owner = "solution" if on is None else _result(on if isinstance(on, dict) else {"result": on})
    args = [_source(node, arrays) for node in call["args"]]
    args += [f"{as_name(name)}={_source(node, arrays)}" for name, node in call["kwargs"].items()]
    function = f"{owner}.{as_name(call['entry'])}"
    given = ", ".join(args)
    for flag, helper in (("looked", "look"), ("refilled", "refilled")):
        if call.get(flag):
            function, given = helper, ", ".join([function, *args])
    line = f"{_answer(place)} = {function}({given})"
    if call.get("raised") and not is_last:
        said = f'print("call {place} raised", repr(error))'
        return ["try:", f"    {line}", "except Exception as error:", f"    {said}"]
    if "answered" in call:
        # An answer that draws its questions asks others in every run.
        known = f'answer_{place} = "in the grade: " + {str(call["answered"])!r}'
        line = f"try:\n    {line}\nexcept LookupError as error:\n    print(error)\n    {known}"
    return [line, f"print(repr({_answer(place)}))"] if is_last or not call.get("silent") else [line]


def _is_large(call: dict[str, Any]) -> bool:
    sizes = [
        np.dtype(node["dtype"]).itemsize * math.prod(map(int, node["shape"]))
        for node in (*call["args"], *call["kwargs"].values())
        if isinstance(node, dict) and "shape" in node
    ]
    return max(sizes, default=0) >= _LARGE


def _result(node: dict[str, Any]) -> str:
    return _answer(node["result"]) + "".join(f"[{int(step)}]" for step in node.get("path", ()))


def _answer(place: Any) -> str:
    return f"answer_{int(place)}"


def as_comment(text: str) -> str:
    """One line, whatever the text holds."""
    return f"# {' '.join(text.split())}"


def as_comments(message: str) -> list[str]:
    """The line for what a check said, if it said anything."""
    return [as_comment(f"In the grade: {message}")] if message else []


def as_print(message: str) -> str:
    """The statement that prints what a check said."""
    return f"print({' '.join(f'in the grade: {message}'.split())!a})\n" if message else ""


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
    if "shape" in node:
        return _array_source(node, arrays)
    if "result" in node:
        return _result(node)
    ((kind, content),) = node.items()
    if kind == "scalar":
        return f"{_source(content, arrays)}[()]"
    if kind == "float":
        return as_number(content)
    if kind == "stub":
        heard = [f"({', '.join(_source(part, arrays) for part in one)})" for one in content]
        return f"Player([{', '.join(heard)}])"
    if kind == "dict":
        pairs = [f"{_source(k, arrays)}: {_source(v, arrays)}" for k, v in content]
        return "{" + ", ".join(pairs) + "}"
    items = ", ".join(_source(item, arrays) for item in content)
    return f"[{items}]" if kind == "list" else f"({items}{',' if len(content) == 1 else ''})"


def _array_source(node: dict[str, Any], arrays: dict[str, np.ndarray]) -> str:
    """A view is made from its bytes with the strides that it had."""
    name = f"array_{len(arrays)}"
    dtype, shape = np.dtype(node["dtype"]), tuple(map(int, node["shape"]))
    raw = _bytes(node)
    if "strides" not in node:
        arrays[name] = raw.view(dtype).reshape(shape)
        return f'data["{name}"]'
    arrays[name] = raw
    first, strides = int(node["first"]), tuple(map(int, node["strides"]))
    return f'np.ndarray({shape}, "{dtype.str}", data["{name}"], {first}, {strides})'


def _bytes(node: dict[str, Any]) -> np.ndarray:
    """Older evidence is not deflated."""
    if "array" in node:
        return np.frombuffer(base64.b64decode(node["array"]), np.uint8)
    inflated = zlib.decompressobj().decompress(base64.b64decode(node["deflated"]), _MOST_INFLATED)
    return np.frombuffer(inflated, np.uint8)


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
