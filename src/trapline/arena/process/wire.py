"""Frames between the controller and a worker: a JSON header and raw buffers, never a pickle.

This file is also copied into the sandbox, so it needs nothing but the standard library and NumPy.
Both ends treat what arrives as hostile: every length is checked against a limit before memory is
taken for it, nesting is bounded, and an array is built only from bytes that really arrived.

Frame: magic, header length, body length, header (JSON), body (the buffers, one after another).
Large bodies do not go through the socket: the controller lends two memory files, one for each
direction, and the header says that the body lies there. They are copied into memory of our own, so
a peer that changes them later changes nothing here, and they are sealed against
shrinking.
"""

import ctypes
import fcntl
import json
import math
import mmap
import os
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import numpy as np

MAGIC = b"TRPL"
PREFIX = struct.Struct("<4sIQ")
MAX_HEADER = 32 << 20
MAX_BODY = 1 << 30
MAX_DEPTH = 32
MAX_NODES = 2_000_000
#: Bodies from this size on go through the lent memory, if they fit.
LENT_FROM = 1 << 20
#: No more than a sandboxed process may write to one file.
LENT_BYTES = 64 << 20
#: A strided view is sent with the gaps between its elements while the gaps cost less than this.
VIEW_OVERHEAD = 16
ALIGNMENT = 64
#: How much is received at once.
AT_ONCE = 16 << 10

Header = dict[str, Any]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class WireError(Exception):
    """The peer broke the protocol, closed the channel, or let a deadline pass."""


class DeadlineError(WireError):
    """The peer did not answer in time."""


class UnsendableError(TypeError):
    """A value that is not plain data."""


class Channel:
    """One end of the connection. `give` and `take` are memory files for large bodies, or None."""

    def __init__(
        self, sock: socket.socket, give: "Lent | None" = None, take: "Lent | None" = None
    ) -> None:
        self.sock = sock
        self.give = give
        self.take = take
        #: Size of the frame that came last.
        self.last_bytes = 0
        #: What came along with the last frame; an honest peer sends nothing before it is asked.
        self.early = bytearray()

    def send(
        self, header: Header, buffers: Iterable[Any] = (), deadline: float | None = None
    ) -> None:
        """Sends one frame; `buffers` are C-contiguous bytes-like objects."""
        views = [memoryview(buffer).cast("B") for buffer in buffers if len(memoryview(buffer))]
        total = sum(view.nbytes for view in views)
        if total > MAX_BODY:
            raise UnsendableError(f"{total} bytes are more than one frame may carry")
        lent = self.give if LENT_FROM <= total <= LENT_BYTES else None
        text = json.dumps(header if lent is None else {**header, "lent": True}).encode()
        if len(text) > MAX_HEADER:
            raise UnsendableError(f"a header of {len(text)} bytes is more than one frame may carry")
        if lent is not None:
            lent.write(views)
            views = []
        head = PREFIX.pack(MAGIC, len(text), total) + text
        self._arm(deadline)
        try:
            if total < LENT_FROM:  # at once: each piece would wake the peer
                self.sock.sendall(b"".join([head, *views]))
                return
            self.sock.sendall(head)
            for view in views:
                self.sock.sendall(view)
        except TimeoutError:
            raise DeadlineError("the peer stopped reading") from None
        except OSError as error:
            raise WireError(f"the channel closed ({error.strerror})") from None

    def receive(self, deadline: float | None = None) -> tuple[Header, Bytes]:
        self._await(PREFIX.size, deadline)
        magic, header_size, body_size = PREFIX.unpack_from(self.early)
        if magic != MAGIC:
            raise WireError("something else wrote on the channel")
        if header_size > MAX_HEADER or body_size > MAX_BODY:
            raise WireError("a frame larger than any frame may be")
        self.last_bytes = header_size + body_size
        end = PREFIX.size + header_size
        self._await(end, deadline)
        header = _parse(bytes(self.early[PREFIX.size : end]))
        del self.early[:end]
        if header.get("lent"):
            return header, self._read_lent(body_size)
        return header, self._read(body_size, deadline)

    def _read_lent(self, size: int) -> Bytes:
        if self.take is None or size > LENT_BYTES:
            raise WireError("a body in memory that was not lent")
        return self.take.read(size)

    def _await(self, size: int, deadline: float | None) -> None:
        """Receives until so many bytes have come; a small frame comes as a whole."""
        while len(self.early) < size:
            room = np.empty(max(AT_ONCE, min(LENT_FROM, size - len(self.early))), np.uint8)
            self.early += room[: self._receive_into(room.data, deadline)].data

    def _read(self, size: int, deadline: float | None) -> Bytes:
        body = np.empty(size, np.uint8)
        done = min(size, len(self.early))
        body[:done] = self.early[:done]
        del self.early[:done]
        while done < size:
            done += self._receive_into(body.data[done:], deadline)
        return body

    def _receive_into(self, room: memoryview, deadline: float | None) -> int:
        self._arm(deadline)
        try:
            count = self.sock.recv_into(room)
        except TimeoutError:
            raise DeadlineError("no answer in time") from None
        except OSError as error:
            raise WireError(f"the channel closed ({error.strerror})") from None
        if count == 0:
            raise WireError("the channel closed")
        return count

    def _arm(self, deadline: float | None) -> None:
        if deadline is None:
            self.sock.settimeout(None)
            return
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlineError("no answer in time")
        self.sock.settimeout(left)


class Lent:
    """A memory file as the worker uses it: read and written, never mapped, so that it does not
    count as memory of the submission."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def write(self, views: Iterable[memoryview]) -> None:
        offset = 0
        for view in views:
            done = 0
            while done < view.nbytes:
                done += os.pwrite(self.fd, view[done:], offset + done)
            offset += view.nbytes

    def read(self, size: int) -> Bytes:
        body = np.empty(size, np.uint8)
        view, done = body.data, 0
        while done < size:
            count = os.preadv(self.fd, [view[done:]], done)
            if count <= 0:
                raise WireError("a body shorter than its header says")
            done += count
        return body

    def in_use(self) -> int:
        return os.fstat(self.fd).st_blocks * 512

    def close(self) -> None:
        os.close(self.fd)


class Lender(Lent):
    """The controller's end: makes the file and maps it, which is several times as fast."""

    def __init__(self) -> None:
        super().__init__(os.memfd_create("trapline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.ftruncate(self.fd, LENT_BYTES)
        # A mapped file that the peer could shrink would kill the process that reads it.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        self._bytes = np.frombuffer(mmap.mmap(self.fd, LENT_BYTES), np.uint8)

    def write(self, views: Iterable[memoryview]) -> None:
        offset = 0
        for view in views:
            self._bytes[offset : offset + view.nbytes] = np.frombuffer(view, np.uint8)
            offset += view.nbytes

    def read(self, size: int) -> Bytes:
        return self._bytes[:size].copy()

    def close(self) -> None:
        # Unmapped now, not when the session is collected: eight ended sessions would take all the
        # address space that a process of mutants may have.
        self._bytes = np.empty(0, np.uint8)
        super().close()


def _parse(text: bytes) -> Header:
    try:
        header = json.loads(text)
        if b"\\u" in text or not text.isascii():
            header = json.loads(_writable(header))
    except (ValueError, RecursionError):
        raise WireError("a header that is not valid JSON") from None
    if not isinstance(header, dict):
        raise WireError("a header that is not a JSON object")
    return header


def _writable(header: Any) -> bytes:
    """Replaces half a surrogate pair, which can be neither printed nor stored."""
    return json.dumps(header, ensure_ascii=False).encode("utf-8", "replace")


class Encoder:
    """Turns values into JSON nodes and buffers; `special` may encode what is not plain data."""

    def __init__(
        self,
        special: Callable[[Any], Header | None] | None = None,
        keep_strides: bool = False,
        copies: bool = False,
    ) -> None:
        self.buffers: list[Any] = []
        self.offset = 0
        self.special = special
        self.keep_strides = keep_strides
        #: Arrays may change between now and when the buffers are sent.
        self.copies = copies

    def encode(self, value: Any, depth: int = 0) -> Any:
        if depth > MAX_DEPTH:
            raise UnsendableError("nested too deeply")
        if value is None or type(value) in (bool, str):
            return value
        if type(value) is int:
            return value if -(2**63) <= value < 2**63 else {"t": "int", "v": hex(value)}
        if type(value) is float:
            return value if math.isfinite(value) else {"t": "float", "v": repr(value)}
        if isinstance(value, np.ndarray):
            return self._array(value)
        if isinstance(value, np.generic):
            return {"t": "scalar", "v": self._array(np.asarray(value))}
        if isinstance(value, (list, tuple)):
            kind = "list" if isinstance(value, list) else "tuple"
            return {"t": kind, "v": [self.encode(item, depth + 1) for item in list(value)]}
        if isinstance(value, dict):
            pairs = [
                [self.encode(k, depth + 1), self.encode(v, depth + 1)] for k, v in value.items()
            ]
            return {"t": "dict", "v": pairs}
        node = self.special(value) if self.special else None
        if node is None:
            raise UnsendableError(f"a {type(value).__name__} is not plain data")
        return node

    def _array(self, value: np.ndarray[Any, Any]) -> Header:
        if value.dtype.kind not in "biufc" or value.dtype.itemsize > 16:
            raise UnsendableError(f"an array of dtype {value.dtype} cannot be sent")
        buffer, offset, strides = extent(value, self.keep_strides, self.copies)
        node = {
            "t": "array",
            "dtype": value.dtype.newbyteorder("<").str,
            "shape": list(value.shape),
            "strides": strides,
            "first": offset,
            "at": self.offset,
            "size": memoryview(buffer).nbytes,
        }
        padding = -node["size"] % ALIGNMENT
        self.buffers.append(buffer)
        if padding:
            self.buffers.append(bytes(padding))
        self.offset += node["size"] + padding
        return node


def extent(
    value: np.ndarray[Any, Any], keep_strides: bool = True, copies: bool = False
) -> tuple[Any, int, list[int] | None]:
    """The bytes of an array, offset of the first element in them, strides (None: C order)."""
    if keep_strides and value.size and not value.flags.c_contiguous:
        low, high = np.lib.array_utils.byte_bounds(value)
        if high - low <= VIEW_OVERHEAD * value.nbytes + 4096:
            raw = np.empty(high - low, np.uint8)
            ctypes.memmove(raw.ctypes.data, low, high - low)
            first = value.__array_interface__["data"][0] - low
            return raw, first, list(value.strides)
    dtype = value.dtype.newbyteorder("<")
    plain = np.array(value, dtype, order="C", copy=True if copies else None)
    return plain.reshape(-1).view(np.uint8), 0, None


class Decoder:
    """Builds values from a header's nodes and the body. `special(node)` resolves other kinds."""

    def __init__(self, body: Bytes, special: Callable[[Header], Any] | None = None) -> None:
        self.body = body
        self.special = special
        self.nodes = 0

    def decode(self, node: Any, depth: int = 0) -> Any:
        self.nodes += 1
        if depth > MAX_DEPTH or self.nodes > MAX_NODES:
            raise WireError("a value nested too deeply or too large")
        if node is None or type(node) in (bool, int, float, str):
            return node
        if not isinstance(node, dict):
            raise WireError("a value of unknown form")
        kind, content = node.get("t"), node.get("v")
        if kind == "array":
            return self._array(node)
        if kind == "scalar":
            return self._scalar(content)
        if kind in ("int", "float"):
            return self._number(kind, content)
        if kind in ("list", "tuple"):
            items = [self.decode(item, depth + 1) for item in self._sequence(content)]
            return items if kind == "list" else tuple(items)
        if kind == "dict":
            return self._dict(content, depth)
        if self.special is None:
            raise WireError(f"a value of unknown kind {kind!r}")
        return self.special(node)

    def _sequence(self, content: Any) -> list[Any]:
        if not isinstance(content, list):
            raise WireError("a container without content")
        return content

    def _number(self, kind: str, text: Any) -> int | float:
        try:
            if kind == "int" and isinstance(text, str) and len(text) < 4096:
                return int(text, 16)
            if kind == "float" and text in ("nan", "inf", "-inf"):
                return float(text)
        except ValueError:
            pass
        raise WireError("a number of unknown form")

    def _dict(self, content: Any, depth: int) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        for pair in self._sequence(content):
            if not isinstance(pair, list) or len(pair) != 2:
                raise WireError("a dictionary of unknown form")
            key = self.decode(pair[0], depth + 1)
            if not isinstance(key, (str, int, float, bool, type(None), np.generic, tuple)):
                raise WireError("a dictionary key that is not a plain value")
            try:
                result[key] = self.decode(pair[1], depth + 1)
            except TypeError:
                raise WireError("a dictionary key that cannot be hashed") from None
        return result

    def _scalar(self, node: Any) -> Any:
        value = self._array(node) if isinstance(node, dict) else None
        if value is None or value.shape != ():
            raise WireError("a scalar of unknown form")
        return value[()]

    def _array(self, node: Header) -> np.ndarray[Any, Any]:
        try:
            return self._build(node)
        except (TypeError, ValueError, KeyError, OverflowError, MemoryError):
            raise WireError("an array of unknown form") from None

    def _build(self, node: Header) -> np.ndarray[Any, Any]:
        dtype = np.dtype(node["dtype"])
        if dtype.kind not in "biufc" or dtype.hasobject or dtype.subdtype:
            raise ValueError
        shape, strides = node["shape"], node["strides"]
        numbers = [*shape, node["first"], node["at"], node["size"]]
        if len(shape) > 32 or any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError
        if node["at"] + node["size"] > self.body.nbytes:
            raise ValueError
        raw = self.body[node["at"] : node["at"] + node["size"]]
        if strides is None:
            if math.prod(shape) * dtype.itemsize != node["size"]:
                raise ValueError
            if not raw.size:
                return np.empty(shape, dtype)
            return np.frombuffer(raw, dtype, math.prod(shape)).reshape(shape)
        if any(type(n) is not int for n in strides):
            raise ValueError
        return np.ndarray(tuple(shape), dtype, raw, node["first"], tuple(strides))


def filled_anew(held: tuple[Any, ...] | None, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arrays of an earlier call with the values of these; the first time these."""
    if held is None:
        return args
    for array, new in zip(held, args, strict=True):
        array[...] = new
    return held


#: Stands for an earlier answer in a list of argument places.
EARLIER = -1


class AnsweredMemory:
    """Finds answers in memory that the caller knows already.

    Earlier answers are remembered weakly: memory that was given back may serve again.
    """

    def __init__(self) -> None:
        self._earlier: deque[weakref.ref[np.ndarray]] = deque(maxlen=64)

    def shared(self, args: tuple[Any, ...], value: Any, owner: Any = None) -> list[int]:
        """Places of arguments, and EARLIER, whose memory is used by the arrays in `value`.

        The arrays of `owner`, the object whose method was called, count as well.
        """
        answer = arrays_in(value)
        kept = [*answer, *arrays_in(owner)]
        found = [
            place
            for place, arg in enumerate(args)
            if any(np.may_share_memory(mine, given) for mine in kept for given in arrays_in(arg))
        ]
        before = [array for ref in self._earlier if (array := ref()) is not None]
        if any(np.may_share_memory(mine, known) for mine in answer for known in before):
            found.append(EARLIER)
        self._earlier.extend(weakref.ref(_owner(array)) for array in answer)
        return found


def arrays_in(value: Any, depth: int = 6) -> list[np.ndarray]:
    """Arrays in containers and in attributes of objects, down to a few levels."""
    if isinstance(value, np.ndarray):
        return [value] if value.size else []
    if depth == 0:
        return []
    parts: Iterable[Any] = ()
    if isinstance(value, list | tuple | set):
        parts = value
    elif isinstance(value, dict):
        parts = value.values()
    elif hasattr(value, "__dict__") and not isinstance(value, type | ModuleType):
        parts = vars(value).values()
    elif hasattr(value, "__slots__"):
        parts = [getattr(value, name, None) for name in value.__slots__]
    return [array for part in list(parts) for array in arrays_in(part, depth - 1)]


def _owner(array: np.ndarray) -> np.ndarray:
    """The array whose memory a view shows."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
