"""The judge: owns every buffer, fills and poisons them, reads them back.

A process of ours with a GPU context of its own, so that nothing a submission does to its context
reaches the values that it is judged by. The controller, which has the oracle and the clock, asks it
over a socket; requests and answers are pickled tuples, and only our own two ends speak there.
"""

import ctypes
import mmap
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from typing import Any

from trapline.arena.errors import ArenaError
from trapline.arena.gpu.memory import MemoryFault, copy_late, judges_memory

_LENGTH = struct.Struct("!Q")
STAGING = 256 << 20


class RefusedError(ArenaError):
    """The driver refused what the judge asked for, such as memory that others hold."""


class Staging:
    """Host memory through which contents of buffers travel between controller and judge."""

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = os.memfd_create("staging") if descriptor is None else descriptor
        os.ftruncate(self.descriptor, STAGING)
        self.view = mmap.mmap(self.descriptor, STAGING)
        self.address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self.view))


class Buffers:
    """The judge's memory: numbered buffers, filled and read on request."""

    def __init__(self, device: str, staging: "Staging") -> None:
        self._memory = judges_memory(device)
        self.staging = staging
        self._memory.pin(staging.address, STAGING)
        #: Number → handle, address, size.
        self._buffers: dict[int, tuple[Any, int, int]] = {}
        self._descriptors: dict[int, int] = {}

    def facts(self) -> dict[str, Any]:
        return {
            **self._memory.facts(),
            "buffers": self._memory.sharing,
            "granule": self._memory.granule,
            "margin": self._memory.margin,
            "l2": self._memory.attribute("l2"),
        }

    def create(self, number: int, size: int) -> None:
        handle, self._descriptors[number] = self._memory.create(size)
        self._buffers[number] = handle, self._memory.map(handle, size), size

    def release(self, number: int) -> None:
        self._memory.release(*self._buffers.pop(number))

    def poison(self, number: int, byte: int) -> None:
        _, address, size = self._buffers[number]
        self._memory.fill(address, byte, size)

    def write(self, number: int, offset: int, size: int) -> None:
        """The first bytes of the staging memory."""
        self._memory.write(self._buffers[number][1] + offset, self.staging.address, size)

    def read(self, number: int, offset: int, size: int) -> None:
        self._memory.read(self._buffers[number][1] + offset, self.staging.address, size)

    def is_poisoned(self, number: int, byte: int, offset: int, size: int) -> bool:
        """These bytes of the buffer are as `poison` left them."""
        self.read(number, offset, size)
        return bytes(self.staging.view[:size]).count(byte) == size

    def free_bytes(self) -> int:
        return self._memory.free_bytes()

    def descriptor(self, number: int) -> int:
        """Of a new buffer; the caller closes it."""
        return self._descriptors.pop(number)

    def address(self, number: int) -> int:
        return self._buffers[number][1]

    def drain(self) -> None:
        self._memory.drain()

    def copy_late(self, copies: list[dict[str, int]]) -> None:
        """On the default stream, behind other work: from buffer to buffer."""
        places = [
            (self.address(one["to"]), self.address(one["from"]), one["size"]) for one in copies
        ]
        copy_late(self._memory, 0, places)


def serve(sock: socket.socket, device: str, staging: Staging) -> None:
    """Serves one controller until it closes the socket."""
    buffers = Buffers(device, staging)
    while (request := _receive(sock)) is not None:
        name, *args = request
        try:
            answer = "done", getattr(buffers, name)(*args)
        except MemoryFault as fault:
            answer = "failed", str(fault)
        _send(sock, answer)
        if name == "create" and answer[0] == "done":  # the descriptor follows the answer
            descriptor = buffers.descriptor(args[0])
            socket.send_fds(sock, [b"!"], [descriptor])
            os.close(descriptor)


class _Contents(ABC):
    """Whole contents in pieces that fit into the staging memory.

    One thread at a time: requests, answers and the staging memory belong together.
    """

    def __init__(self, staging: Staging) -> None:
        self.staging = staging
        self._alone = threading.RLock()

    @abstractmethod
    def ask(self, name: str, *args: Any) -> Any: ...

    def write(self, number: int, offset: int, data: Any) -> None:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), STAGING):
            piece = view[start : start + STAGING]
            with self._alone:
                self.staging.view[: len(piece)] = piece
                self.ask("write", number, offset + start, len(piece))

    def read(self, number: int, offset: int, size: int) -> bytearray:
        data = bytearray(size)
        for start in range(0, size, STAGING):
            length = min(STAGING, size - start)
            with self._alone:
                self.ask("read", number, offset + start, length)
                data[start : start + length] = memoryview(self.staging.view)[:length]
        return data


class Judge(_Contents):
    """The controller's end."""

    def __init__(self, device: str) -> None:
        super().__init__(Staging())
        self.device = device
        ours, theirs = socket.socketpair()
        self._sock = ours
        given = theirs.fileno(), self.staging.descriptor
        code = f"from {__name__} import main; main()"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, device, *map(str, given)],
                pass_fds=given,
                stdin=subprocess.DEVNULL,
                env=_environment(),
            )
        self._next = 0
        self.facts: dict[str, Any] = self.ask("facts")

    def ask(self, name: str, *args: Any) -> Any:
        try:
            with self._alone:
                _send(self._sock, (name, *args))
                answer = _receive(self._sock)
        except OSError as error:
            raise ArenaError(f"the GPU judge ended: {error}") from None
        if answer is None:
            raise ArenaError("the GPU judge ended")
        state, value = answer
        if state == "failed":
            raise RefusedError(f"the GPU judge failed: {value}")
        return value

    def create(self, size: int) -> tuple[int, int]:
        """A buffer's number and its descriptor, which the caller closes."""
        with self._alone:
            self._next += 1
            self.ask("create", self._next, size)
            _, descriptors, _, _ = socket.recv_fds(self._sock, 1, 1)
            return self._next, descriptors[0]

    def close(self) -> None:
        """Ends the process and with it every buffer."""
        self._sock.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _send(sock: socket.socket, value: Any) -> None:
    data = pickle.dumps(value)
    sock.sendall(_LENGTH.pack(len(data)) + data)


def _receive(sock: socket.socket) -> Any:
    head = _exactly(sock, _LENGTH.size)
    if head is None:
        return None
    data = _exactly(sock, _LENGTH.unpack(head)[0])
    # Both ends are this module: nothing that a submission made is ever read here.
    return None if data is None else pickle.loads(data)  # noqa: S301


def _exactly(sock: socket.socket, size: int) -> bytes | None:
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        count = sock.recv_into(view[got:], size - got)
        if not count:
            return None
        got += count
    return bytes(data)


def main() -> None:
    """`judge DEVICE FD STAGING`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller is interrupted, and closes it
    with socket.socket(fileno=int(sys.argv[2])) as sock:
        serve(sock, sys.argv[1], Staging(int(sys.argv[3])))


class LocalJudge(_Contents):
    """The judge's buffers in this process, for code of ours."""

    def __init__(self, device: str) -> None:
        super().__init__(Staging())
        self.buffers = Buffers(device, self.staging)
        self.facts = self.buffers.facts()
        self._next = 0

    def ask(self, name: str, *args: Any) -> Any:
        return getattr(self.buffers, name)(*args)

    def create(self, size: int) -> tuple[int, int]:
        self._next += 1
        self.buffers.create(self._next, size)
        return self._next, self.buffers.descriptor(self._next)

    def close(self) -> None:
        return
