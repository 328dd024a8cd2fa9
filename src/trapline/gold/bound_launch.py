"""Launches of a compiled Triton kernel whose sizes are known: only addresses change between them.

Triton examines every argument at each launch, 20 to 60 microseconds for a kernel with many of them.
A `BoundLaunch` keeps what these examinations found and gives the CUDA driver the addresses alone.
The driver's own list of the kernel's parameters must agree with ours; if not, `bound` returns None
and launches go through Triton.
"""

import ctypes
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from threading import Lock, local
from typing import Any, NamedTuple

#: Types in the signature of a kernel → how the driver reads them.
_NUMBERS = dict(
    zip(
        ("i1", "u1", "i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64", "fp32", "fp64"),
        "bBbBhHiIqQfd",
        strict=True,
    )
)
_MAP_BYTES = 128
#: A launch remembers the tensor maps of this many addresses.
_MOST_MAPS = 1024
#: Numbers of the driver's launch attributes.
_COOPERATIVE, _PROGRAMMATIC_SERIALIZATION = 2, 6


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("_pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


class Buffer(NamedTuple):
    """A pointer argument: the number of a tensor of the call, and an offset in bytes."""

    tensor: int
    offset: int


class TensorMap(NamedTuple):
    """An argument that the copy engine reads through a tensor map, but for its address."""

    buffer: Buffer
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    nan_outside: bool
    #: Triton's: swizzle, elem_size, elem_type, block_size.
    layout: Mapping[str, Any]

    def encoded(self, address: int) -> Any:
        """The map of a tensor at this address, in memory of the right alignment."""
        rank = len(self.shape)
        sizes = tuple(reversed(self.shape))
        steps = [step * self.layout["elem_size"] for step in reversed(self.strides[:-1])]
        memory = ctypes.create_string_buffer(2 * _MAP_BYTES)
        begin = -ctypes.addressof(memory) % _MAP_BYTES
        aligned = (ctypes.c_char * _MAP_BYTES).from_buffer(memory, begin)
        status = _driver().cuTensorMapEncodeTiled(
            *(aligned, _host_type(self.layout["elem_type"]), rank, ctypes.c_void_p(address)),
            (ctypes.c_uint64 * rank)(*sizes),
            (ctypes.c_uint64 * rank)(*steps, 0),
            (ctypes.c_uint32 * rank)(*reversed(self.layout["block_size"])),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            # No interleaving; lines of 128 bytes are promoted into L2, as Triton's own maps do.
            *(0, self.layout["swizzle"], 2, int(self.nan_outside)),
        )
        _require_success(status, "cuTensorMapEncodeTiled")
        return aligned


class BoundLaunch:
    """One launch. Call it with the addresses of the call's tensors and a stream."""

    def __init__(self, compiled: Any, grid: Sequence[int], parameters: list[Any]) -> None:
        """`parameters` has a Buffer, a TensorMap or a number in memory for each of the kernel's."""
        self._kept = compiled, parameters  # the module stays loaded
        self._launch = _driver().cuLaunchKernelEx
        self._function = ctypes.c_void_p(compiled.function)
        self._config = _config(compiled.metadata, grid)
        self._by_config = ctypes.byref(self._config)
        self._parameters = (ctypes.c_uint64 * max(len(parameters), 1))()
        self._lock = Lock()
        self._stream = 0
        self._buffers: list[Buffer] = []
        self._maps: list[tuple[int, TensorMap, dict[int, Any]]] = []
        places = []
        for place, one in enumerate(parameters):
            if isinstance(one, Buffer):
                self._buffers.append(one)
                places.append(place)
            elif isinstance(one, TensorMap):
                self._maps.append((place, one, {}))
            else:
                self._parameters[place] = ctypes.addressof(one)
        self._addresses = (ctypes.c_uint64 * max(len(places), 1))()
        for number, place in enumerate(places):
            self._parameters[place] = ctypes.addressof(self._addresses) + 8 * number
        self._pack = struct.Struct(f"{len(places)}Q").pack_into
        self._numbers = tuple(number for number, _ in self._buffers)
        self._offsets = any(offset for _, offset in self._buffers)

    def __call__(self, tensors: Sequence[int], stream: int) -> None:
        if self._offsets:
            addresses = [tensors[number] + offset for number, offset in self._buffers]
        else:
            addresses = [tensors[number] for number in self._numbers]
        # Parameters are copied by the launch; no other thread may set them before.
        with self._lock:
            self._pack(self._addresses, 0, *addresses)
            for place, one, known in self._maps:
                number, offset = one.buffer
                address = tensors[number] + offset
                found = known.get(address)
                if found is None:
                    if len(known) >= _MOST_MAPS:
                        known.clear()
                    found = known[address] = _Map(one.encoded(address))
                self._parameters[place] = found.address
            if stream != self._stream:
                self._config.stream = self._stream = stream
            status = self._launch(self._by_config, self._function, self._parameters, None)
        if status:
            _require_success(status, "cuLaunchKernelEx")


class _Map:
    """A tensor map and where it is."""

    def __init__(self, memory: Any) -> None:
        self.memory, self.address = memory, ctypes.addressof(memory)


class _Thread(local):
    #: Whether a device's context is current, as it is after the first call of CUDA's runtime.
    has_context = False


_thread = _Thread()


def ensure_context(device: int) -> None:
    """Makes the device's context current on a new thread.

    Tensor maps are encoded by the driver, which, unlike the runtime, does not do this by itself;
    nor does Triton before it encodes one.
    """
    if _thread.has_context:
        return
    context, number, driver = ctypes.c_void_p(), ctypes.c_int(), _driver()
    driver.cuCtxGetCurrent(ctypes.byref(context))
    if not context.value:
        driver.cuDeviceGet(ctypes.byref(number), device)
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number)
        _require_success(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    _thread.has_context = True


def bound(
    compiled: Any, grid: Sequence[int], arguments: Mapping[str, Any], buffer_of: Any
) -> BoundLaunch | None:
    """The launch that Triton just made, for other addresses; None if it cannot be bound.

    `arguments` are the kernel's by name; `buffer_of` finds the Buffer of a tensor, or None.
    """
    metadata, signature = compiled.metadata, compiled.src.signature
    if metadata.num_ctas != 1 or metadata.global_scratch_size or metadata.profile_scratch_size:
        return None
    layouts = iter(getattr(metadata, "tensordesc_meta", None) or ())
    parameters: list[tuple[Any, int]] = []
    for name, kind in signature.items():
        if kind == "constexpr":
            continue
        made = _parameters_of(arguments[name], kind, layouts, buffer_of)
        if made is None:
            return None
        parameters += made
    # After its own parameters a kernel has pointers to scratch memory, which it does not use.
    found, wanted = _sizes_in(compiled.function), [size for _, size in parameters]
    extra = found[len(wanted) :]
    if found[: len(wanted)] != wanted or any(size != 8 for size in extra):
        return None
    unused = [ctypes.c_uint64(0) for _ in extra]
    return BoundLaunch(compiled, grid, [one for one, _ in parameters] + unused)


def _parameters_of(
    value: Any, kind: Any, layouts: Any, buffer_of: Any
) -> list[tuple[Any, int]] | None:
    """The parameters of one argument with their sizes in bytes."""
    if not isinstance(kind, str):
        return None
    if kind.startswith("tensordesc"):
        layout, buffer = next(layouts, None), buffer_of(value.base)
        rounded = getattr(value, "round_f32_to_tf32", False)  # from Triton 3.7 on
        if buffer is None or layout is None or layout["fp4_padded"] or rounded:
            return None
        outside = getattr(value, "padding", "zero") == "nan"
        one = TensorMap(buffer, tuple(value.shape), tuple(value.strides), outside, layout)
        shape = [(ctypes.c_int32(size), 4) for size in value.shape]
        return [(one, _MAP_BYTES), *shape, *((ctypes.c_int64(step), 8) for step in value.strides)]
    if kind.startswith("*"):
        buffer = buffer_of(value)
        return None if buffer is None else [(buffer, 8)]
    if kind not in _NUMBERS:
        return None
    packed = struct.pack(_NUMBERS[kind], value)
    return [(ctypes.create_string_buffer(packed, len(packed)), len(packed))]


def _config(metadata: Any, grid: Sequence[int]) -> _Config:
    config = _Config()
    for axis, size in enumerate((*grid, 1, 1)[:3]):
        config.grid[axis] = size
        config.block[axis] = 32 * metadata.num_warps if axis == 0 else 1
    config.shared = metadata.shared
    wanted = {
        _COOPERATIVE: metadata.launch_cooperative_grid,
        _PROGRAMMATIC_SERIALIZATION: metadata.launch_pdl,
    }
    numbers = [number for number, asked in wanted.items() if asked]
    attributes = (_Attribute * max(len(numbers), 1))()
    for attribute, number in zip(attributes, numbers, strict=False):
        attribute.id = number
        attribute.value[0] = 1
    config.attributes = attributes
    config.attribute_count = len(numbers)
    return config


@cache
def _driver() -> Any:
    """The CUDA driver. Calls hold the interpreter's lock: they are too short to give it away."""
    return ctypes.PyDLL("libcuda.so.1")


def _sizes_in(function: int) -> list[int]:
    """Sizes in bytes of the parameters of a kernel, as the driver knows them."""
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    sizes: list[int] = []
    where = ctypes.byref(offset), ctypes.byref(size)
    read = getattr(_driver(), "cuFuncGetParamInfo", None)  # from CUDA 12.4 on
    while read and not read(ctypes.c_void_p(function), ctypes.c_size_t(len(sizes)), *where):
        sizes.append(size.value)
    return sizes


def _host_type(element: int) -> int:
    """The driver's number of an element type; Triton's differs for some."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    return int(TMA_DTYPE_DEVICE_TO_HOST[element])


def _require_success(status: int, call: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        reason = (text.value or b"unknown error").decode()
        raise RuntimeError(f"{call} failed with CUDA error {status}: {reason}")
