"""Runs scripts that need torch and Triton, each in a child of one process that imports both once.

A line of its input is a JSON list: a script, its argument, and its environment; what the script
says goes to the file `said.txt` of the folder that is its argument, and its exit status to the
output.

With TRITON_INTERPRET=1 kernels are interpreted in a fraction of the time that Triton takes: its
interpreter replaces the members of its language for each call of a function, looks for overflows
that it does not report, builds a table of dtypes for each operation and the types of each block
anew, promotes and broadcasts blocks that are alike, and reduces one element at a time. The
functions below compute the same, but for the order of a reduction by a function of a kernel: it
combines pairs of neighbours, as a GPU may, and not one element after another.
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


_patch_lang = interpreter._patch_lang
_restore = interpreter._LangPatchScope.restore
_modules_of: dict[object, frozenset[str]] = {}
_patched: set[str] = set()


def patch_lang(function):
    """The interpreter's own, once a launch: a function that a kernel calls finds it done."""
    if function not in _modules_of:
        modules = [one for one in function.__globals__.values() if inspect.ismodule(one)]
        _modules_of[function] = frozenset(one.__name__ for one in modules if one in (tl, tl.core))
    if _modules_of[function] and _modules_of[function] <= _patched:
        return interpreter._LangPatchScope()
    _patched.update(_modules_of[function])
    return _patch_lang(function)


def restore(self):
    """The interpreter's own, at the end of a launch."""
    _patched.clear()
    _restore(self)


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


_are_equal = tl.dtype.__eq__
_INTEGERS = frozenset((*tl.dtype.SINT_TYPES, *tl.dtype.UINT_TYPES))


def are_equal(self, other):
    """The language's own; nearly always both are one object."""
    return self is other or _are_equal(self, other)


def is_int(self):
    """The language's own, without a list that is built for each question."""
    return self.name in _INTEGERS


_check_overflow = TritonSemantic.binary_op_sanitize_overflow_impl


def check_overflow(self, lhs, rhs, operation):
    """The language's own; without debugging it computes in 64 bits and says nothing of it."""
    if self.builder.options.debug:
        _check_overflow(self, lhs, rhs, operation)


_promote = TritonSemantic.binary_op_type_checking_impl


def promote(self, lhs, rhs, *options, **named):
    """The language's own; numbers of one dtype need no promotion, except to be divided."""
    divides = len(options) == 4 or named  # the fourth option, or the one that is named
    if not divides and isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor):
        one = lhs.type.scalar
        if one is rhs.type.scalar and not one.is_ptr():
            return self.broadcast_impl_value(lhs, rhs)
    return _promote(self, lhs, rhs, *options, **named)


_broadcast = TritonSemantic.broadcast_impl_value


def broadcast(self, lhs, rhs):
    """The language's own; two blocks of one shape, or two scalars, are returned as they are."""
    one, other = lhs.type, rhs.type
    if one.is_block() != other.is_block():
        return (lhs, splat(self, rhs, one)) if one.is_block() else (splat(self, lhs, other), rhs)
    same = not one.is_block() or one.shape.values == other.shape.values
    return (lhs, rhs) if same else _broadcast(self, lhs, rhs)


def splat(self, scalar, like):
    """A block of one scalar; the interpreter asks its type for nothing but the shape."""
    kind = like.with_element_ty(scalar.type)
    return self.tensor(self.builder.create_splat(kind, scalar.handle), kind)


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


def make_faster() -> None:
    """Replaces what is slow of Triton's interpreter and of the language that it interprets."""
    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = patch_lang
    interpreter._LangPatchScope.restore = restore
    interpreter._get_np_dtype = numpy_dtype
    interpreter.ReduceOps.generic_reduce = reduce_by_pairs
    tl.dtype.__eq__ = are_equal
    tl.dtype.is_int = is_int
    tl.block_type.__init__ = make_block_type
    tl.tensor.__init__ = make_tensor
    TritonSemantic.binary_op_sanitize_overflow_impl = check_overflow
    TritonSemantic.binary_op_type_checking_impl = promote
    TritonSemantic.broadcast_impl_value = broadcast


def main() -> None:
    if os.environ["TRITON_INTERPRET"] == "1":
        make_faster()
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
