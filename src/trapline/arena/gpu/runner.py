"""The program that runs a GPU answer inside the sandbox.

It imports `solution.py`, or compiles `solution.cu`, maps the judge's buffers, and calls entry
points on them. It knows no expected value and no clock; whatever the answer does to this process
changes only what it writes into the buffers.
"""

import ctypes
import importlib.util
import os
import shutil
import socket
import struct
import subprocess
import sys
from types import ModuleType
from typing import Any

SUBMISSION = "solution"
_DTYPES = ("float32", "float16", "bfloat16", "int32", "int64", "uint8", "bool")
_MOST_DIMENSIONS = 5
#: The log of a failed compilation is cut in the middle of nowhere useful: keep its beginning.
_MOST_LOG = 4000
#: In lines of the compiler or the linker that say what is wrong.
_ERROR_WORDS = ("error", "ld: ", "undefined reference")
_READ = {"float32": "f", "float16": "e", "int32": "i", "int64": "q", "uint8": "B", "bool": "B"}


class CompileError(Exception):
    """nvcc refused `solution.cu`; the message begins with its first errors."""


class CudaContextError(Exception):
    """A kernel failed, and with it everything that this process has on the GPU."""


class _Tensor(ctypes.Structure):
    """`trapline_tensor` of trapline.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("shape", ctypes.c_int64 * _MOST_DIMENSIONS),
        ("stride", ctypes.c_int64 * _MOST_DIMENSIONS),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    )


class PythonAnswer:
    """`solution.py`: entry points get torch tensors, on a stream that is the current one."""

    def __init__(self, folder: str, memory: Any, tensors: Any) -> None:
        import torch

        self.torch, self.memory, self._tensor = torch, memory, tensors.tensor
        if memory.device == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]
            self.stream = memory.stream()
            self._outer = torch.cuda.ExternalStream(self.stream)  # type: ignore[no-untyped-call]
        sys.path.insert(0, folder)
        path = os.path.join(folder, SUBMISSION + ".py")
        spec = importlib.util.spec_from_file_location(SUBMISSION, path)
        assert spec is not None
        assert spec.loader is not None
        self.module = importlib.util.module_from_spec(spec)
        sys.modules[SUBMISSION] = self.module
        spec.loader.exec_module(self.module)

    def missing(self, entries: list[str]) -> list[str]:
        return [name for name in entries if not callable(getattr(self.module, name, None))]

    def value(self, node: dict[str, Any], address: int) -> Any:
        shape, strides, dtype = node["shape"], node["strides"], node["dtype"]
        return self._tensor(self.torch, address, shape, strides, dtype, self.memory.device)

    def call(self, entry: str, values: list[Any]) -> str:
        """Runs the entry point; the kind of what it returned, "" for None."""
        function = getattr(self.module, entry)
        if self.memory.device != "cuda":
            returned = function(*values)
        else:
            with self.torch.cuda.stream(self._outer):
                returned = function(*values)
        return "" if returned is None else type(returned).__name__[:80]

    def record(self, calls: list[tuple[str, list[Any]]]) -> Any:
        """A function that replays these calls from a CUDA graph."""
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph, stream=self._outer):
            for entry, values in calls:
                getattr(self.module, entry)(*values)

        def replay() -> None:
            with self.torch.cuda.stream(self._outer):
                graph.replay()

        return replay


class CudaAnswer:
    """`solution.cu`: entry points are `extern "C"` functions of a library that nvcc made."""

    def __init__(self, source: str, memory: Any, library: bytes, include: str) -> None:
        self.memory, self.stream = memory, memory.stream()
        self.library, self.log = (library, "") if library else compiled(source, memory, include)
        path = os.path.abspath("solution.so")
        with open(path, "wb") as file:
            file.write(self.library)
        self.module = ctypes.CDLL(path)

    def missing(self, entries: list[str]) -> list[str]:
        return [name for name in entries if not hasattr(self.module, name)]

    def value(self, node: dict[str, Any], address: int) -> Any:
        made = _Tensor(address, ndim=len(node["shape"]), dtype=_DTYPES.index(node["dtype"]))
        for place, (size, stride) in enumerate(zip(node["shape"], node["strides"], strict=True)):
            made.shape[place], made.stride[place] = size, stride
        return made

    def call(self, entry: str, values: list[Any]) -> str:
        arguments = [_argument(value) for value in values]
        function = getattr(self.module, entry)
        function.restype = None
        function(*arguments, ctypes.c_void_p(self.stream))
        return ""

    def record(self, calls: list[tuple[str, list[Any]]]) -> Any:
        self.memory.begin_recording(self.stream)
        try:
            for entry, values in calls:
                self.call(entry, values)
        finally:
            launch = self.memory.end_recording(self.stream)
        return lambda: launch(self.stream)


def _argument(value: Any) -> Any:
    if isinstance(value, _Tensor):
        return ctypes.byref(value)
    return ctypes.c_double(value) if isinstance(value, float) else ctypes.c_int64(int(value))


def find_nvcc() -> str | None:
    return shutil.which("nvcc", path="/usr/local/cuda/bin:" + os.environ.get("PATH", ""))


def compiled(source: str, memory: Any, include: str) -> tuple[bytes, str]:
    """The library made from this file, for this GPU, and what the compiler said."""
    folder = os.path.dirname(source)
    found = find_nvcc()
    if found is None:
        raise CompileError("nvcc is not installed on this machine")
    arch = f"sm_{memory.attribute('major')}{memory.attribute('minor')}"
    arch += "a" if arch == "sm_90" else ""
    command = [found, f"-arch={arch}", "-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC"]
    command += ["-Xptxas", "-v", "-I", include, "-I", folder, "-o", "compiled.so"]
    if memory.device == "cuda":  # where nothing stands in for the driver
        command.append("-lcuda")
    command.append(source)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as error:
        raise CompileError(f"nvcc cannot be started here: {error}") from None
    log = (done.stdout + done.stderr).replace(folder + "/", "")
    if done.returncode:
        lines = log.splitlines()
        lines = [one for one in lines if any(word in one for word in _ERROR_WORDS)] or lines
        raise CompileError("\n".join(lines[:8])[:_MOST_LOG] or "nvcc failed without a message")
    with open("compiled.so", "rb") as file:
        return file.read(), log[:_MOST_LOG]


class Runner:
    """Serves one controller until it closes the channel."""

    def __init__(self, modules: dict[str, ModuleType], sock: socket.socket, folder: str) -> None:
        self.wire, self.worker = modules["wire"], modules["worker"]
        self.modules, self.folder = modules, folder
        self.channel = self.wire.Channel(sock)
        _, lent, _, _ = socket.recv_fds(sock, 1, 1)
        self.descriptors = socket.socket(fileno=lent[0])
        self.memory: Any = None
        self.answer: Any = None
        self.addresses: dict[int, int] = {}
        self.nonce: str | None = None

    def serve(self) -> None:
        self.send({"op": "ready", "pid": os.getpid()})
        while True:
            try:
                header, body = self.channel.receive()
            except self.wire.WireError:
                return
            self.nonce = header.get("nonce")
            try:
                self.send(*getattr(self, "do_" + header["op"])(header, body))
            except BaseException as error:  # the answer may raise anything, SystemExit too
                self.send(self.described(error))

    def send(self, header: dict[str, Any], buffers: Any = ()) -> None:
        self.channel.send({**header, "nonce": self.nonce}, buffers)

    def described(self, error: BaseException) -> dict[str, Any]:
        """The exception, or that the context is broken, which explains everything after it."""
        told: dict[str, Any] = self.worker.describe(error, self.folder)
        try:
            if self.memory is not None:
                self.memory.drain()
        except Exception as fault:
            message = f"{fault} (then {told['kind']}: {told['message']})"[:2000]
            told.update(kind="CudaContextError", bases=["CudaContextError"], message=message)
        return told

    def do_import(self, header: dict[str, Any], body: Any) -> Any:
        if header["device"] == "cpu":  # before Triton is imported
            os.environ["TRITON_INTERPRET"] = "1"
        self.memory = self.modules["memory"].memory(header["device"], header["buffers"])
        beside = os.path.dirname(os.path.abspath(__file__))
        if os.path.exists(os.path.join(self.folder, header["module"] + ".py")):
            self.answer = PythonAnswer(self.folder, self.memory, self.modules["tensors"])
        else:
            source = os.path.join(self.folder, header["module"] + ".cu")
            self.answer = CudaAnswer(source, self.memory, bytes(body), beside)
        library = getattr(self.answer, "library", b"")
        missing, log = self.answer.missing(header["entries"]), getattr(self.answer, "log", "")
        told = {"op": "imported", "missing": missing, "bytes": len(library), "log": log}
        return told, [library]

    def do_map(self, header: dict[str, Any], _: Any) -> Any:
        _, lent, _, _ = socket.recv_fds(self.descriptors, 1, 1)
        handle = self.memory.take(lent[0])
        os.close(lent[0])
        self.addresses[header["buffer"]] = self.memory.map(handle, header["size"])
        return ({"op": "mapped"},)

    def values(self, nodes: list[dict[str, Any]]) -> list[Any]:
        return [self.value(node) for node in nodes]

    def value(self, node: dict[str, Any]) -> Any:
        if "value" in node:
            return node["value"]
        return self.answer.value(node, self.addresses[node["buffer"]] + node["offset"])

    def do_call(self, header: dict[str, Any], _: Any) -> Any:
        late = [
            (self.addresses[one["to"]], self.addresses[one["from"]], one["size"])
            for one in header.get("late", [])
        ]
        self.modules["memory"].copy_late(self.memory, getattr(self.answer, "stream", 0), late)
        returned = self.answer.call(header["entry"], self.values(header["values"]))
        self.memory.drain()
        return ({"op": "result", "returned": returned},)

    def do_burst(self, header: dict[str, Any], _: Any) -> Any:
        """Prepared bursts are kept: preparing is not part of what is timed."""
        return ({"op": "result", **self.modules["burst"].run(self, header)},)

    def do_kernels(self, header: dict[str, Any], _: Any) -> Any:
        return ({"op": "result", **self.modules["burst"].kernels(self, header)},)

    def number(self, probe: dict[str, Any], raw: bytes) -> float:
        """The value of one element of an output."""
        if probe["dtype"] == "bfloat16":
            raw, kind = b"\0\0" + raw[:2], "f"
        else:
            kind = _READ[probe["dtype"]]
        return float(struct.unpack_from("<" + kind, raw)[0])


def main() -> None:
    """`runner.py FD SUBMISSION_FOLDER`, with the other modules beside this file."""
    fd, folder = int(sys.argv[1]), sys.argv[2]
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import burst
    import memory
    import tensors
    import wire
    import worker

    sys.path.pop(0)
    beside = {m.__name__: m for m in (burst, memory, tensors, wire, worker)}
    for name in beside:
        del sys.modules[name]
    Runner(beside, socket.socket(fileno=fd), folder).serve()


if __name__ == "__main__":
    main()
