# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""Gluon functions under one name for every supported Triton release (3.6 to 3.9).

Triton 3.7 renamed the thread barrier, 3.8 the asynchronous copies, 3.9 the reinterpretation of
shared memory; 3.9 removed the old names.
"""

from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

#: Waits for all threads of the program.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
#: Asynchronous copy of elements from device memory: (shared, pointers, mask=None).
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
#: Copy of a tile by the copy engine: (descriptor, coordinates, barrier, shared, pred=True).
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
#: Copy of a tile back to device memory: (descriptor, coordinates, shared).
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
#: Shared memory as another dtype, shape and layout: (shared, dtype, shape, layout).
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or (
    gl.shared_memory_descriptor._reinterpret
)


@builtin
def tma_add(descriptor, coordinates, shared, _semantic=None):
    """Adds a tile in shared memory to a tensor in device memory, by the copy engine.

    Triton's compiler has this operation from 3.6 on, Gluon's own functions from 3.8 on.
    """
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, coordinates, shared.handle)
