"""The judge: owns every buffer, fills and poisons them, reads them back.

A process of ours with a GPU context of its own, so that nothing a submission does to its context
reaches the values that it is judged by. The controller, which has the oracle and the clock, asks it
over a socket; requests and answers are pickled tuples, and only our own two ends speak there.
"""

import os
import pickle
import socket
import struct
import subprocess
import sys
from typing import Any

from trapline.arena.errors import ArenaError
from trapline.arena.gpu.memory import MemoryFault, memory

_LENGTH = struct.Struct("!Q")


class Buffers:
    """The judge's memory: numbered buffers, filled and read on request."""

    def __init__(self, device: str) -> None:
        self._memory = memory(device)
        #: Number → handle, address, size.
        self._buffers: dict[int, tuple[Any, int, int]] = {}
        self._descriptors: dict[int, int] = {}

    def facts(self) -> dict[str, Any]:
        found = self._memory.facts()
        return {**found, "granule": self._memory.granule, "l2": self._memory.attribute("l2")}

    def create(self, number: int, size: int) -> None:
        handle, self._descriptors[number] = self._memory.create(size)
        self._buffers[number] = handle, self._memory.map(handle, size), size

    def release(self, number: int) -> None:
        self._memory.release(*self._buffers.pop(number))

    def poison(self, number: int, byte: int) -> None:
        _, address, size = self._buffers[number]
        self._memory.fill(address, byte, size)

    def write(self, number: int, offset: int, data: bytes) -> None:
        self._memory.write(self._buffers[number][1] + offset, data)

    def repeat(self, number: int, offset: int, data: bytes, times: int) -> None:
        """Writes the data once and copies it on the device until it is there so many times."""
        start = self._buffers[number][1] + offset
        self._memory.write(start, data)
        done, whole = len(data), len(data) * times
        while done < whole:
            step = min(done, whole - done)
            self._memory.copy(start + done, start, step)
            done += step

    def read(self, number: int, offset: int, size: int) -> bytearray:
        return self._memory.read(self._buffers[number][1] + offset, size)

    def is_poisoned(self, number: int, byte: int, size: int) -> bool:
        """The first bytes of the buffer are as `poison` left them."""
        found = self._memory.read(self._buffers[number][1], size)
        return found.count(byte) == size

    def free_bytes(self) -> int:
        return self._memory.free_bytes()

    def descriptor(self, number: int) -> int:
        """Of a new buffer; the caller closes it."""
        return self._descriptors.pop(number)

    def address(self, number: int) -> int:
        return self._buffers[number][1]

    def drain(self) -> None:
        self._memory.drain()


def serve(sock: socket.socket, device: str) -> None:
    """Serves one controller until it closes the socket."""
    buffers = Buffers(device)
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


class Judge:
    """The controller's end."""

    def __init__(self, device: str) -> None:
        self.device = device
        ours, theirs = socket.socketpair()
        self._sock = ours
        code = f"from {__name__} import main; main()"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, str(theirs.fileno()), device],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env=_environment(),
            )
        self._next = 0
        self.facts: dict[str, Any] = self.ask("facts")

    def ask(self, name: str, *args: Any) -> Any:
        try:
            _send(self._sock, (name, *args))
            answer = _receive(self._sock)
        except OSError as error:
            raise ArenaError(f"the GPU judge ended: {error}") from None
        if answer is None:
            raise ArenaError("the GPU judge ended")
        state, value = answer
        if state == "failed":
            raise ArenaError(f"the GPU judge failed: {value}")
        return value

    def create(self, size: int) -> tuple[int, int]:
        """A buffer's number and its descriptor, which the caller closes."""
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
    """`judge FD DEVICE`."""
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        serve(sock, sys.argv[2])


class LocalJudge:
    """The judge's buffers in this process, for code of ours."""

    def __init__(self, device: str) -> None:
        self.buffers = Buffers(device)
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
