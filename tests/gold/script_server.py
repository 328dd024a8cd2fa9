"""Runs scripts that need torch and Triton, each in a child of one process that imports both once.

A line of its input is a JSON list: a script, its argument, and its environment; what the script
says goes to the file `said.txt` of the folder that is its argument, and its exit status to the
output.

With TRITON_INTERPRET=1 kernels are interpreted in less than half the time that Triton takes: its
interpreter searches all members of its language for each call of a function, builds a table of
dtypes for each operation and the types of each block anew, broadcasts blocks that have the same
shape, and reduces one element at a time. The functions below compute the same, but for the order of
a reduction by a function of a kernel: it combines pairs of neighbours, as a GPU may, and not one
element after another.
"""

import inspect
import json
import math
import os
import runpy
import sys
import traceback
from pathlib import Path

import numpy as np
import torch  # noqa: F401  for the scripts
from triton import language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_MODULES = (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)
_BUILTINS = {
    module: [name for name, member in inspect.getmembers(module) if tl.core.is_builtin(member)]
    for module in _MODULES
}
_numpy_dtype = interpreter._get_np_dtype
_dtypes: dict[str, np.dtype] = {}


def patch_builtin(module, builder, scope):
    """The interpreter's own, without a search through all members for each call of a function."""
    for name in _BUILTINS[module]:
        member = getattr(module, name)
        if tl.core.is_builtin(member):
            interpreter._patch_attr(module, name, member, builder, scope)


def numpy_dtype(dtype):
    """The interpreter's own, without a table that is built for each operation."""
    element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
    if isinstance(element, tl.pointer_type):
        return np.dtype(np.uint64)
    if element.name not in _dtypes:
        _dtypes[element.name] = _numpy_dtype(element)
    return _dtypes[element.name]


_make_block_type = tl.block_type.__init__
_block_types: dict[tuple, dict] = {}


def make_block_type(self, element_ty, shape):
    """The language's own; types of the same name and shape share their members."""
    key = type(element_ty), element_ty.name, *(getattr(size, "value", size) for size in shape)
    if key not in _block_types:
        _make_block_type(self, element_ty, shape)
        self.sizes = tl.core.tuple([tl.constexpr(size) for size in self.shape])
        self.elements = tl.constexpr(math.prod(self.shape))
        _block_types[key] = self.__dict__
    self.__dict__.update(_block_types[key])


_NO_SIZES, _ONE = tl.core.tuple([]), tl.constexpr(1)


def make_tensor(self, handle, kind):
    """The language's own, with the sizes that its type knows."""
    is_block = kind.is_block()
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    self.shape = kind.sizes if is_block else _NO_SIZES
    self.numel = kind.elements if is_block else _ONE


_broadcast = TritonSemantic.broadcast_impl_value


def broadcast(self, lhs, rhs):
    """The language's own; two blocks of one shape, or two scalars, are returned as they are."""
    one, other = lhs.type, rhs.type
    if one.is_block() != other.is_block():
        return _broadcast(self, lhs, rhs)
    same = not one.is_block() or one.shape.values == other.shape.values
    return (lhs, rhs) if same else _broadcast(self, lhs, rhs)


def reduce_by_pairs(self, given):
    """A reduction by any function: whole blocks of neighbours at once, not single elements."""
    flat = self.axis is None
    axis = 0 if flat else self.axis
    shape = given[0].handle.data.shape
    parts = [arg.handle.data.reshape(-1) if flat else arg.handle.data for arg in given]
    parts = [np.moveaxis(data, axis, 0) for data in parts]
    while len(parts[0]) > 1:
        pairs = [
            (data[first::2], arg)
            for first in (0, 1)
            for data, arg in zip(parts, given, strict=True)
        ]
        combined = self.combine_fn.fn(*(self.to_tensor(data, arg.dtype) for data, arg in pairs))
        combined = combined if isinstance(combined, tuple) else (combined,)
        parts = [value.handle.data for value in combined]
    kept = (1,) * len(shape) if flat else (*shape[:axis], 1, *shape[axis + 1 :])
    results = [data.reshape(kept) if self.keep_dims else data[0] for data in parts]
    return [self.to_tensor(data, arg.dtype) for data, arg in zip(results, given, strict=True)]


def in_child(script: str, folder: str, environment: dict[str, str]) -> int:
    with (Path(folder) / "said.txt").open("w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    os.environ.update(environment)
    sys.argv = [script, folder]
    sys.path[0] = str(Path(script).parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    if os.environ["TRITON_INTERPRET"] == "1":
        interpreter._patch_builtin = patch_builtin
        interpreter._get_np_dtype = numpy_dtype
        interpreter.ReduceOps.generic_reduce = reduce_by_pairs
        tl.block_type.__init__ = make_block_type
        tl.tensor.__init__ = make_tensor
        TritonSemantic.broadcast_impl_value = broadcast
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            status = in_child(*json.loads(line))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
