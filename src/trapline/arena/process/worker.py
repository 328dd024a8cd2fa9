"""The program inside the sandbox: imports a submission, runs what it is asked to, sends back bytes.

It knows no expected value, tolerance, seed or clock. Whatever the submission does to this process
changes only its own answers: they are judged elsewhere.
"""

import builtins
import importlib.util
import os
import socket
import sys
from types import ModuleType
from typing import Any


class Remote:
    """A callable argument or language model: calls travel to the controller and back."""

    def __init__(
        self, worker: "Worker", number: int, methods: list[str], is_callable: bool
    ) -> None:
        self._worker, self._number, self._callable = worker, number, is_callable
        for name in methods:
            setattr(self, name, _method(worker, number, name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._callable:
            raise TypeError("this object cannot be called")
        return self._worker.callback(self._number, "", args, kwargs)


def _method(worker: "Worker", number: int, name: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        return worker.callback(number, name, args, kwargs)

    call.__name__ = name
    return call


class Worker:
    """Serves one controller until it closes the channel."""

    def __init__(self, wire: ModuleType, channel: Any, folder: str) -> None:
        self.wire, self.channel, self.folder = wire, channel, folder
        self.objects: dict[int, Any] = {}
        self.module: ModuleType | None = None
        self.nonce: str | None = None
        self.memory = wire.AnsweredMemory()

    def serve(self) -> None:
        self.send({"op": "ready", "pid": os.getpid()})
        while True:
            try:
                header, body = self.channel.receive()
            except self.wire.WireError:
                return
            self.nonce = header.get("nonce")
            self.answer(header, body)

    def answer(self, header: dict[str, Any], body: Any) -> None:
        try:
            if header["op"] == "import":
                self.load(header["module"])
                missing = [n for n in header["entries"] if not hasattr(self.module, n)]
                self.send({"op": "imported", "missing": missing})
            elif header["op"] == "call":
                self.call(header, self.wire.Decoder(body, self.resolve))
            elif header["op"] == "calls":
                self.call_all(header, self.wire.Decoder(body, self.resolve))
            elif header["op"] == "drop":
                self.objects.pop(header["object"], None)
                self.send({"op": "dropped"})
        except BaseException as error:  # the submission may raise anything, SystemExit too
            self.send(describe(error, self.folder))

    def load(self, name: str) -> None:
        sys.path.insert(0, self.folder)
        path = os.path.join(self.folder, name + ".py")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        self.module = importlib.util.module_from_spec(spec)
        sys.modules[name] = self.module
        spec.loader.exec_module(self.module)

    def call(self, header: dict[str, Any], decoder: Any) -> None:
        on, function, args, kwargs = self.find(header, decoder)
        encoder = self.wire.Encoder(self.keep)
        try:
            value = function(*args, **kwargs)
            reply = {"op": "result", "value": encoder.encode(value)}
        except BaseException as error:  # the submission may raise anything, SystemExit too
            reply = describe(error, self.folder)
        if header.get("observe"):
            reply["args"] = encoder.encode(args)
            if reply["op"] == "result":
                reply["shared"] = self.memory.shared(args, value, on)
        self.send(reply, encoder.buffers)

    def call_all(self, header: dict[str, Any], decoder: Any) -> None:
        """One call after the other, until one raises; answers as they were when given."""
        encoder = self.wire.Encoder(self.keep, copies=True)
        reply, values = {"op": "result"}, []
        held = None
        try:
            for call in header["calls"]:
                _, function, args, kwargs = self.find(call, decoder)
                if header["refill"]:
                    held = args = self.wire.filled_anew(held, args)
                values.append(encoder.encode(function(*args, **kwargs)))
        except BaseException as error:  # the submission may raise anything, SystemExit too
            reply = describe(error, self.folder)
        self.send({**reply, "values": values}, encoder.buffers)

    def find(self, call: dict[str, Any], decoder: Any) -> tuple[Any, Any, Any, Any]:
        """The object, its function, and the arguments."""
        args, kwargs = decoder.decode(call["args"]), decoder.decode(call["kwargs"])
        on = self.module if call["on"] is None else self.objects[call["on"]]
        return on, getattr(on, call["entry"]), args, kwargs

    def callback(
        self, number: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        encoder = self.wire.Encoder(self.keep)
        header = {
            "op": "callback",
            "stub": number,
            "method": method,
            "args": encoder.encode(args),
            "kwargs": encoder.encode(kwargs),
        }
        self.send(header, encoder.buffers)
        reply, body = self.channel.receive()
        self.nonce = reply.get("nonce")
        if reply["op"] == "refuse":
            raise _exception(reply["kind"])(reply["message"])
        return self.wire.Decoder(body, self.resolve).decode(reply["value"])

    def keep(self, value: Any) -> dict[str, Any]:
        """Keeps what is not plain data here; the controller gets a handle."""
        if isinstance(value, Remote):
            return {"t": "stub", "stub": value._number}
        number = id(value)
        self.objects[number] = value
        return {"t": "object", "object": number, "type": type(value).__name__[:200]}

    def resolve(self, node: dict[str, Any]) -> Any:
        if node["t"] == "object":
            return self.objects[node["object"]]
        return Remote(self, node["stub"], node["methods"], node["callable"])

    def send(self, header: dict[str, Any], buffers: Any = ()) -> None:
        self.channel.send({**header, "nonce": self.nonce}, buffers)


def describe(error: BaseException, folder: str) -> dict[str, Any]:
    bases = [kind.__name__ for kind in type(error).__mro__]
    try:
        message = str(error)[:2000]
    except Exception:
        message = "(its message could not be read)"
    where = _place(error, folder)
    return {"op": "raised", "kind": bases[0], "bases": bases, "message": message, "where": where}


def _place(error: BaseException, folder: str) -> str:
    """The innermost line of the submission in the traceback, as `solution.py:12 in f`."""
    place, traceback = "", error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if code.co_filename.startswith(folder):
            name = os.path.relpath(code.co_filename, folder)
            place = f"{name}:{traceback.tb_lineno} in {code.co_name}"[:200]
        traceback = traceback.tb_next
    return place


def _exception(name: str) -> type[Exception]:
    """The built-in exception of this name; what the controller raises may have another one."""
    kind = getattr(builtins, name, RuntimeError)
    is_error = isinstance(kind, type) and issubclass(kind, Exception)
    return kind if is_error else RuntimeError


def main() -> None:
    """`worker.py FD SUBMISSION_FOLDER`, with wire.py and numpy_start.py beside this file."""
    fd, folder = int(sys.argv[1]), sys.argv[2]
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import numpy_start  # what lies beside this file inside the sandbox

    numpy_start.import_numpy()
    import wire

    sys.path.pop(0)
    del sys.modules["wire"], sys.modules["numpy_start"]
    sock = socket.socket(fileno=fd)
    _, lent, _, _ = socket.recv_fds(sock, 1, 2)
    channel = wire.Channel(sock, give=wire.Lent(lent[1]), take=wire.Lent(lent[0]))
    Worker(wire, channel, folder).serve()


if __name__ == "__main__":
    main()
