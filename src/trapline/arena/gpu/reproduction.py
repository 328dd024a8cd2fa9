"""The failing calls of a GPU finding as data and as a short program that needs no grader."""

import base64
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trapline.arena.errors import UsageError
from trapline.arena.gpu.contract import HEADER, STORED, Entry, dtype_name
from trapline.arena.gpu.rig import pieces, strides_of
from trapline.arena.judge.reproduction import (
    DATA,
    MOST_BYTES,
    SCRIPT,
    as_comment,
    as_comments,
    as_name,
    as_number,
    as_print,
)
from trapline.arena.process.transcript import Transcript


def recorded(transcript: Transcript, entries: Mapping[str, Entry]) -> list[dict[str, Any]]:
    """The calls of a check as plain data; empty where an input is too large to keep."""
    calls = []
    for exchange in transcript.exchanges:
        args = (*exchange.args, *exchange.kwargs.values())
        nodes = [_node(value) for value in args]
        if None in nodes:
            return []
        entry = entries[exchange.entry]
        outputs = [{"dtype": one.dtype, "shape": list(one.shape)} for one in entry.outputs(*args)]
        calls.append(
            {
                "entry": exchange.entry,
                "args": nodes,
                "outputs": outputs,
                "updated": list(entry.updated),
                "late": exchange.late,
            }
        )
    return calls


def _node(value: Any) -> dict[str, Any] | None:
    """A tensor with what lies between its rows, or a number."""
    if not isinstance(value, np.ndarray):
        plain = value.item() if isinstance(value, np.generic) else value
        return {"float": repr(plain)} if isinstance(plain, float) else {"value": plain}
    data = dict(pieces(value))
    if len(data) > 1 or sum(map(len, data.values())) > MOST_BYTES:
        return None
    return {
        "array": base64.b64encode(data.get(0, b"")).decode(),
        "dtype": dtype_name(value),
        "shape": list(value.shape),
        "strides": list(strides_of(value)),
    }


_START = '''
import os

import numpy as np
import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
data = np.load("calls.npz")


def tensor(name, dtype, shape, strides):
    """An input, with what lies between its rows."""
    flat = torch.from_numpy(data[name]).view(getattr(torch, dtype))
    return flat.to(device).as_strided(shape, strides)


def poisoned(dtype, shape):
    """An output that holds what the grader puts there before a call."""
    made = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
    made.view(torch.uint8).fill_(0x7F) if made.dim() else made.fill_(127)
    return made
'''
_PYTHON = """
import {module}


def call(entry, *values):
    getattr({module}, entry)(*values)

"""
_CUDA = '''
import ctypes
import subprocess

if device == "cpu":
    print("torch finds no GPU here: outputs of kernels keep what the grader put there, 3.3962e+38")
options = ["-arch=native", "-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC", "-I", "."]
subprocess.run(["nvcc", *options, "-o", "solution.so", "{module}.cu"], check=True)
library = ctypes.CDLL("./solution.so")
DTYPES = "float32 float16 bfloat16 int32 int64 uint8 bool".split()


class Tensor(ctypes.Structure):
    """trapline_tensor of trapline.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("shape", ctypes.c_int64 * 5),
        ("stride", ctypes.c_int64 * 5),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    ]


def argument(value):
    if not torch.is_tensor(value):
        return ctypes.c_double(value) if isinstance(value, float) else ctypes.c_int64(value)
    five = ctypes.c_int64 * 5
    kind = DTYPES.index(str(value.dtype).removeprefix("torch."))
    place, shape, stride = value.data_ptr(), five(*value.shape), five(*value.stride())
    return ctypes.byref(Tensor(place, shape, stride, value.dim(), kind))


def call(entry, *values):
    stream = torch.cuda.current_stream().cuda_stream if device == "cuda" else 0
    getattr(library, entry)(*map(argument, values), ctypes.c_void_p(stream))
'''
_LATE = '''
def call_late(entry, *values):
    """Inputs come on the stream of the call, behind other work: all must wait for that stream."""
    tensors = [value for value in values if torch.is_tensor(value)]
    kept = [value.clone() for value in tensors]
    for value in tensors:
        value.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        for value, held in zip(tensors, kept):
            value.copy_(held)
        call(entry, *values)
    torch.cuda.synchronize()
'''


def write_script(
    folder: Path,
    title: str,
    calls: Sequence[Any],
    module: str,
    cuda: bool,
    message: str = "",
) -> Path:
    """`calls.npz` and `reproduce.py`, which runs the calls on the answer beside it.

    `message` is what the check said: what was expected, and where the answer is off.

    Evidence may come from anywhere: what is not a recorded value becomes a comment or raises
    `UsageError`, never code.
    """
    arrays: dict[str, np.ndarray] = {}
    lines: list[str] = []
    try:
        for place, one in enumerate(calls):
            lines += _call_lines(place, one, arrays)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UsageError(
            f"the evidence's calls are not in the form of a grade on a GPU ({error}): grade the "
            "answer again with this version"
        ) from None
    np.savez(folder / DATA, **arrays)  # type: ignore[arg-type]
    if cuda:
        shutil.copyfile(HEADER, folder / HEADER.name)
    late = _LATE if any(one["late"] for one in calls) else ""
    start = _START + (_CUDA if cuda else _PYTHON).replace("{module}", as_name(module)) + late
    script = folder / SCRIPT
    head = "\n".join([as_comment(title), *as_comments(message), start])
    script.write_text(f"{head}\n{as_print(message)}" + "\n".join(lines) + "\n", encoding="utf-8")
    return script


def _call_lines(place: int, one: dict[str, Any], arrays: dict[str, np.ndarray]) -> list[str]:
    inputs = ", ".join(_source(node, arrays) for node in one["args"])
    outputs = ", ".join(
        f"poisoned({_dtype(output)!r}, {_numbers(output['shape'])})" for output in one["outputs"]
    )
    made = [f"inputs_{place}[{int(number)}]" for number in one["updated"]]
    shown = ", ".join([f"*outputs_{place}", *made])
    called = "call_late" if one["late"] else "call"
    return [
        f"inputs_{place} = [{inputs}]",
        f"outputs_{place} = [{outputs}]",
        f'{called}("{as_name(one["entry"])}", *inputs_{place}, *outputs_{place})',
        f'print({shown}, sep="\\n")',
    ]


def _source(node: dict[str, Any], arrays: dict[str, np.ndarray]) -> str:
    if "float" in node:
        return as_number(node["float"])
    if "value" in node:
        value = node["value"]
        return repr(value if isinstance(value, bool) else int(value))
    dtype, name = _dtype(node), f"array_{len(arrays)}"
    arrays[name] = np.frombuffer(base64.b64decode(node["array"]), np.uint8)
    return f'tensor("{name}", {dtype!r}, {_numbers(node["shape"])}, {_numbers(node["strides"])})'


def _dtype(node: dict[str, Any]) -> str:
    if node["dtype"] not in STORED:
        raise ValueError(f"{node['dtype']!a} is not a dtype of the GPU track")
    return str(node["dtype"])


def _numbers(values: Sequence[Any]) -> list[int]:
    return [int(value) for value in values]
