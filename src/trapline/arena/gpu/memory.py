"""Memory that two processes map: the judge creates it, the runner gets its descriptor.

`CudaMemory` is a GPU's, through the driver's virtual memory calls. `HostMemory` stands in for it on
a machine without a GPU. In both, the address behind a mapping is reserved and not mapped, so that
an access beyond the end faults. `IpcMemory` serves drivers that share no memory by descriptor:
there, poison lies behind a tensor. Runs inside the sandbox as well: standard library only.
"""

import ctypes
import fcntl
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

_PINNED, _DEVICE, _POSIX_DESCRIPTOR, _READ_WRITE = 1, 1, 1, 3
_NON_BLOCKING, _NO_TIMING, _RELAXED = 1, 2, 2
#: The most bytes that an element has.
_ELEMENT = 8
#: Writing so many bytes so many times takes an H200 more than ten milliseconds.
_BALLAST, _HOLDS = 256 << 20, 200
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000
_ATTRIBUTES = {"major": 75, "minor": 76, "processors": 16, "l2": 38, "shares descriptors": 103}
#: `IpcMemory`: bytes of a handle; sizes are multiples of a granule, because the driver shares whole
#: ones; bytes behind a tensor that only an access beyond its end can change.
_IPC_HANDLE, _IPC_GRANULE, _IPC_MARGIN, _IPC_FLAGS = 64, 2 << 20, 64 << 10, 1
#: How the judge's memory reaches the runner.
BY_DESCRIPTOR, BY_IPC = "descriptors", "CUDA IPC"
#: With this variable, the judge shares by CUDA IPC although the driver has descriptors. For tests.
FORCE_IPC = "TRAPLINE_GPU_FORCE_IPC"


class MemoryFault(Exception):
    """The driver refused, or a kernel broke its context."""


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location", ctypes.c_int),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (
        ("location_type", ctypes.c_int),
        ("location", ctypes.c_int),
        ("flags", ctypes.c_int),
    )


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("name", ctypes.c_ubyte * _IPC_HANDLE),)


class CudaMemory:
    """Device 0 through the driver, in the primary context, which torch uses as well."""

    device, sharing = "cuda", BY_DESCRIPTOR
    #: Bytes behind a tensor that belong to its buffer and are checked; nothing is mapped there.
    margin = 0

    def __init__(self) -> None:
        self._cu = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", ctypes.c_uint(0))
        self._device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(self._device), ctypes.c_int(0))
        self._context, self._ballast = ctypes.c_void_p(), ctypes.c_ulonglong()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        self._call("cuCtxSetCurrent", self._context)
        self.granule = self._granule()

    def _granule(self) -> int:
        size = ctypes.c_size_t()
        what = ctypes.byref(self._properties())
        self._call("cuMemGetAllocationGranularity", ctypes.byref(size), what, ctypes.c_int(0))
        return size.value

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._cu, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self._cu.cuGetErrorString(code, ctypes.byref(text))
            raise MemoryFault(f"{name}: {(text.value or b'unknown error').decode()}")

    def _properties(self) -> _Properties:
        return _Properties(_PINNED, _POSIX_DESCRIPTOR, _DEVICE, self._device.value, None)

    def create(self, size: int) -> tuple[Any, int]:
        """A handle for this many bytes, a multiple of the granule, and its descriptor."""
        handle = ctypes.c_ulonglong()
        what = ctypes.byref(self._properties())
        zero = ctypes.c_ulonglong(0)
        self._call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), what, zero)
        descriptor = ctypes.c_int()
        target = ctypes.byref(descriptor)
        kind = ctypes.c_int(_POSIX_DESCRIPTOR)
        self._call("cuMemExportToShareableHandle", target, handle, kind, zero)
        return handle, descriptor.value

    def take(self, descriptor: int) -> Any:
        """The handle that belongs to another process's descriptor."""
        handle = ctypes.c_ulonglong()
        place, kind = ctypes.c_void_p(descriptor), ctypes.c_int(_POSIX_DESCRIPTOR)
        self._call("cuMemImportFromShareableHandle", ctypes.byref(handle), place, kind)
        return handle

    def map(self, handle: Any, size: int) -> int:
        """The address of a mapping with an unmapped granule behind it."""
        place, zero = ctypes.c_ulonglong(), ctypes.c_ulonglong(0)
        whole = ctypes.c_size_t(size + self.granule)
        none = ctypes.c_size_t(0)
        self._call("cuMemAddressReserve", ctypes.byref(place), whole, none, zero, zero)
        bytes_ = ctypes.c_size_t(size)
        self._call("cuMemMap", place, bytes_, none, handle, zero)
        access = ctypes.byref(_Access(_DEVICE, self._device.value, _READ_WRITE))
        self._call("cuMemSetAccess", place, bytes_, access, ctypes.c_size_t(1))
        return place.value

    def release(self, handle: Any, address: int, size: int) -> None:
        place, zero = ctypes.c_ulonglong(address), ctypes.c_size_t(size)
        self._call("cuMemUnmap", place, zero)
        self._call("cuMemAddressFree", place, ctypes.c_size_t(size + self.granule))
        self._call("cuMemRelease", handle)

    def fill(self, address: int, byte: int, size: int) -> None:
        value = ctypes.c_ubyte(byte)
        self._call("cuMemsetD8_v2", ctypes.c_ulonglong(address), value, ctypes.c_size_t(size))
        self.drain()

    def pin(self, address: int, size: int) -> None:
        """Makes copies from and to this host memory faster."""
        self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(size), 0)

    def write(self, address: int, host: int, size: int) -> None:
        """From an address of the host's memory."""
        source = ctypes.c_void_p(host)
        self._call("cuMemcpyHtoD_v2", ctypes.c_ulonglong(address), source, ctypes.c_size_t(size))
        self.drain()

    def copy(self, target: int, source: int, size: int) -> None:
        places = ctypes.c_ulonglong(target), ctypes.c_ulonglong(source)
        self._call("cuMemcpyDtoD_v2", *places, ctypes.c_size_t(size))
        self.drain()

    def read(self, address: int, host: int, size: int) -> None:
        """To an address of the host's memory."""
        target = ctypes.c_void_p(host)
        self._call("cuMemcpyDtoH_v2", target, ctypes.c_ulonglong(address), ctypes.c_size_t(size))

    def drain(self) -> None:
        self._call("cuCtxSynchronize")

    def stream(self) -> int:
        """A stream that does not wait for the default one."""
        made = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(made), ctypes.c_uint(_NON_BLOCKING))
        return int(made.value or 0)

    def drain_stream(self, stream: int) -> None:
        self._call("cuStreamSynchronize", ctypes.c_void_p(stream))

    def fetcher(self, stream: int, depth: int) -> "CudaFetcher":
        return CudaFetcher(self, stream, depth)

    def begin_recording(self, stream: int) -> None:
        """Captures what follows on the stream into a graph."""
        self._call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), ctypes.c_int(_RELAXED))

    def end_recording(self, stream: int) -> Callable[[int], None]:
        """A function that launches the captured graph on a stream."""
        graph, ready = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
        zero = ctypes.c_ulonglong(0)
        self._call("cuGraphInstantiateWithFlags", ctypes.byref(ready), graph, zero)
        return lambda on: self._call("cuGraphLaunch", ready, ctypes.c_void_p(on))

    def hold(self, stream: int) -> None:
        """Keeps the stream busy for some ten milliseconds."""
        if not self._ballast.value:
            place = ctypes.byref(self._ballast)
            self._call("cuMemAlloc_v2", place, ctypes.c_size_t(_BALLAST))
        size, zero = ctypes.c_size_t(_BALLAST), ctypes.c_ubyte(0)
        for _ in range(_HOLDS):
            self._call("cuMemsetD8Async", self._ballast, zero, size, ctypes.c_void_p(stream))

    def copy_on(self, stream: int, target: int, source: int, size: int) -> None:
        """Copies after everything that the stream has been given before."""
        places = ctypes.c_ulonglong(target), ctypes.c_ulonglong(source), ctypes.c_size_t(size)
        self._call("cuMemcpyDtoDAsync_v2", *places, ctypes.c_void_p(stream))

    def free_bytes(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def facts(self) -> dict[str, str]:
        name = ctypes.create_string_buffer(100)
        self._call("cuDeviceGetName", name, ctypes.c_int(100), self._device)
        version = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(version))
        cuda = f"{version.value // 1000}.{version.value % 1000 // 10}"
        number = ctypes.create_string_buffer(16)
        self._call("cuDeviceGetUuid_v2", number, self._device)
        return {"gpu": name.value.decode(), "cuda driver": cuda, "uuid": number.raw.hex()}

    def attribute(self, name: str) -> int:
        value = ctypes.c_int()
        which = ctypes.c_int(_ATTRIBUTES[name])
        self._call("cuDeviceGetAttribute", ctypes.byref(value), which, self._device)
        return value.value


class IpcMemory(CudaMemory):
    """Where the driver exports no descriptors: an IPC handle travels in a file of memory."""

    sharing, margin = BY_IPC, _IPC_MARGIN

    def _granule(self) -> int:
        return _IPC_GRANULE

    def create(self, size: int) -> tuple[Any, int]:
        place, handle = ctypes.c_ulonglong(), _IpcHandle()
        self._call("cuMemAlloc_v2", ctypes.byref(place), ctypes.c_size_t(size))
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), place)
        descriptor = os.memfd_create("handle", os.MFD_CLOEXEC)
        os.write(descriptor, bytes(handle))
        return place.value, descriptor

    def take(self, descriptor: int) -> Any:
        return _IpcHandle.from_buffer_copy(os.pread(descriptor, _IPC_HANDLE, 0))

    def map(self, handle: Any, size: int) -> int:
        """The address: of the process that made the memory, or of the one that was handed it."""
        del size
        if isinstance(handle, int):
            return handle
        place, flags = ctypes.c_ulonglong(), ctypes.c_uint(_IPC_FLAGS)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(place), handle, flags)
        return place.value

    def release(self, handle: Any, address: int, size: int) -> None:
        del handle, size
        self._call("cuMemFree_v2", ctypes.c_ulonglong(address))


class CudaFetcher:
    """Fetches single elements in stream order without making the device wait."""

    def __init__(self, memory: CudaMemory, stream: int, depth: int) -> None:
        self._memory, self._stream, self._depth = memory, ctypes.c_void_p(stream), depth
        self._host = ctypes.c_void_p()
        size = ctypes.c_size_t(_ELEMENT * depth)
        memory._call("cuMemHostAlloc", ctypes.byref(self._host), size, ctypes.c_uint(0))
        self._events = [self._event() for _ in range(depth)]

    def _event(self) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self._memory._call("cuEventCreate", ctypes.byref(made), ctypes.c_uint(_NO_TIMING))
        return made

    def _place(self, number: int) -> int:
        return int(self._host.value or 0) + _ELEMENT * (number % self._depth)

    def fetch(self, number: int, address: int, size: int) -> None:
        target, source = ctypes.c_void_p(self._place(number)), ctypes.c_ulonglong(address)
        count = ctypes.c_size_t(size)
        self._memory._call("cuMemcpyDtoHAsync_v2", target, source, count, self._stream)
        self._memory._call("cuEventRecord", self._events[number % self._depth], self._stream)

    def fetched(self, number: int) -> bytes:
        self._memory._call("cuEventSynchronize", self._events[number % self._depth])
        return ctypes.string_at(self._place(number), _ELEMENT)


class HostFetcher:
    """The stand-in: everything has happened already."""

    def __init__(self) -> None:
        self._found: dict[int, bytes] = {}

    def fetch(self, number: int, address: int, size: int) -> None:
        self._found[number] = ctypes.string_at(address, size).ljust(_ELEMENT, b"\0")

    def fetched(self, number: int) -> bytes:
        return self._found.pop(number)


class HostMemory:
    """Pages of this machine's memory, shared by descriptor."""

    device, sharing, margin = "cpu", BY_DESCRIPTOR, 0
    granule = mmap.PAGESIZE

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = (
            *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
            *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
        )
        self._libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

    def create(self, size: int) -> tuple[Any, int]:
        descriptor = os.memfd_create("buffer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size)
        # Else a runner could shrink it, and the judge's next access would end the judge.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS)
        return descriptor, os.dup(descriptor)

    def take(self, descriptor: int) -> Any:
        return os.dup(descriptor)

    def map(self, handle: Any, size: int) -> int:
        reserved = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        place = self._mmap(None, size + self.granule, _PROT_NONE, reserved, -1)
        rights = mmap.PROT_READ | mmap.PROT_WRITE
        return self._mmap(place, size, rights, mmap.MAP_SHARED | _MAP_FIXED, handle)

    def _mmap(self, place: int | None, size: int, rights: int, flags: int, handle: int) -> int:
        found = self._libc.mmap(place, size, rights, flags, handle, 0)
        if found in (None, ctypes.c_void_p(-1).value):
            raise MemoryFault(f"mmap: {os.strerror(ctypes.get_errno())}")
        return int(found)

    def release(self, handle: Any, address: int, size: int) -> None:
        self._libc.munmap(address, size + self.granule)
        os.close(handle)

    def fill(self, address: int, byte: int, size: int) -> None:
        ctypes.memset(address, byte, size)

    def pin(self, address: int, size: int) -> None:
        del address, size

    def write(self, address: int, host: int, size: int) -> None:
        ctypes.memmove(address, host, size)

    def copy(self, target: int, source: int, size: int) -> None:
        ctypes.memmove(target, source, size)

    def read(self, address: int, host: int, size: int) -> None:
        ctypes.memmove(host, address, size)

    def drain(self) -> None:
        return

    def stream(self) -> int:
        return 0

    def drain_stream(self, stream: int) -> None:
        del stream

    def fetcher(self, stream: int, depth: int) -> HostFetcher:
        del stream, depth
        return HostFetcher()

    def hold(self, stream: int) -> None:
        del stream

    def copy_on(self, stream: int, target: int, source: int, size: int) -> None:
        del stream
        self.copy(target, source, size)

    def free_bytes(self) -> int:
        return os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE

    def facts(self) -> dict[str, str]:
        # No number: nothing is timed on it, so it needs no turns.
        return {"gpu": "none: host memory stands in for it", "cuda driver": "none", "uuid": ""}

    def attribute(self, name: str) -> int:
        return {"major": 9, "minor": 0, "processors": os.cpu_count() or 1, "l2": 1 << 20}[name]


Memory = CudaMemory | HostMemory


def copy_late(memory: Memory, stream: int, copies: list[tuple[int, int, int]]) -> None:
    """Queues copies (target, source, size) on the stream, behind other work."""
    if copies:
        memory.hold(stream)
    for target, source, size in copies:
        memory.copy_on(stream, target, source, size)


def memory(device: str, sharing: str) -> Memory:
    """The memory of `cuda` or of its stand-in, `cpu`."""
    if device != "cuda":
        return HostMemory()
    return IpcMemory() if sharing == BY_IPC else CudaMemory()


def judges_memory(device: str) -> Memory:
    """Shared by descriptor where the driver can do that, else by CUDA IPC."""
    if device != "cuda":
        return memory(device, BY_DESCRIPTOR)
    other = IpcMemory()
    can = other.attribute("shares descriptors") and not os.environ.get(FORCE_IPC)
    return memory(device, BY_DESCRIPTOR) if can else other


@cache
def why_no_gpu() -> str:
    """Why there is no GPU to grade on; empty where there is one.

    Asks in another process: the one that has the clock must have no GPU context.
    """
    question = "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"
    asked = [sys.executable, "-c", question]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    if done.returncode:
        return "the CUDA driver (libcuda.so.1) is not installed"
    code = done.stdout.strip()
    return "" if code == "0" else f"the CUDA driver finds no GPU (error {code})"


def device_here() -> str:
    """`cuda`, or `cpu` where host memory must stand in for a GPU."""
    return "cpu" if why_no_gpu() else "cuda"
