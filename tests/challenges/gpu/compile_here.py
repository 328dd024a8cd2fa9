"""Compiles the Triton kernels that a GPU solution launches for sm_90, without a GPU.

The entry points get tensors without memory, and a launch becomes a compilation.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from trapline.arena import challenge as challenges
from trapline.arena.gpu.contract import BFloat16, dtype_name
from trapline.arena.process import local

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}


def main(folder: Path) -> None:
    found = []
    JITFunction.run = lambda kernel, *args, **named: found.append(compiled(kernel, args, named))
    # Tensors without memory cannot be copied to another device.
    torch.cuda.device_of = lambda tensor: torch.device("meta")
    for name, calls in json.loads((folder / "wanted.json").read_text()).items():
        challenge = challenges.load(name, "gpu")
        entries = challenge.module("cases").ENTRIES
        for solution in (challenge.solution, challenge.folder / "alternates" / "triton"):
            module = local.load(solution, compile_once=False)
            for entry, *args in calls:
                arrays = [array_of(*a) if isinstance(a, list) else a for a in args]
                given = [tensor_of(a) if isinstance(a, np.ndarray) else a for a in arrays]
                outputs = entries[entry].outputs(*arrays)
                written = [empty(output.shape, output.dtype) for output in outputs]
                getattr(module, entry)(*given, *written)
    (folder / "compiled.json").write_text(json.dumps(found))


def array_of(dtype, shape):
    """An array of this shape that takes the memory of one element."""
    if dtype == "bfloat16":
        return np.broadcast_to(np.zeros((), np.float32).view(BFloat16), shape, subok=True)
    return np.broadcast_to(np.zeros((), dtype), shape)


def tensor_of(array):
    return empty(array.shape, dtype_name(array))


def empty(shape, dtype):
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def compiled(kernel, args, named):
    given = dict(zip(kernel.arg_names, args, strict=False)) | named
    fixed, signature, attrs = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        value = given[name] if name in given else kernel.params[place].default
        # Triton turns an integer argument of 1 into a constant.
        one = isinstance(value, int) and value == 1
        if kernel.params[place].is_constexpr or one:
            fixed[place,], signature[name] = value, "constexpr"
        else:
            signature[name] = type_of(value)
            if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
                attrs[place,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=attrs)
    options = {key: value for key, value in named.items() if key in ("num_warps", "num_stages")}
    made = triton.compile(source, target=HOPPER, options=options)
    return {"kernel": kernel.__name__, "shared": made.metadata.shared}


def type_of(value):
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if abs(value) < 1 << 31 else "i64"
    return "fp32"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
