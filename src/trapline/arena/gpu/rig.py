"""A GPU answer as checks see it: judge, runner and controller put together.

The controller (this process) has the oracle and the clock and no GPU context. The judge owns the
buffers. The runner, in the sandbox, maps them and runs the answer. For each call the inputs are
written and the outputs poisoned; then the runner runs; then it is frozen while the judge reads.
"""

import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trapline.arena.errors import SubmissionDied, SubmissionRaised, Violation
from trapline.arena.gpu import turns
from trapline.arena.gpu.contract import (
    POISON,
    STORED,
    BFloat16,
    Entry,
    Output,
    answer_of,
    dtype_name,
    narrow,
)
from trapline.arena.gpu.judge import Judge, LocalJudge, RefusedError
from trapline.arena.process.proxy import RemoteObject, Sharing, Submission
from trapline.arena.process.session import SandboxConfig, Session

#: Addresses of tensors are multiples of this.
ALIGNMENT = 16
#: Compiling a CUDA file with large headers takes its time.
IMPORT_SECONDS = 180.0
#: How long the judge waits for memory that others hold.
MEMORY_SECONDS, LOOK_SECONDS = 60.0, 0.2
#: Buffers of so many bytes are given back at once, and with them the runner that maps them.
HUGE = 2 << 30
#: Between the two looks at an output: what a stopped process started earlier would show up.
LATE_SECONDS = 0.002
#: Of a compiler's log, in characters.
MOST_LOG = 4000
#: An array that fills less of its span than one part in so many is written row by row.
_SPARSE = 64


@dataclass(frozen=True)
class Buffer:
    number: int
    descriptor: int
    size: int


class Rig:
    """The judge and its buffers; one a grading process."""

    def __init__(self, device: str, *, local: bool = False) -> None:
        self.device = device
        self.judge: Judge | LocalJudge = LocalJudge(device) if local else Judge(device)
        self.granule: int = self.judge.facts["granule"]
        #: Bytes behind each tensor that nobody may write; 0 where nothing is mapped there.
        self.margin: int = self.judge.facts["margin"]
        #: The GPU's own number, for `turns`.
        self.gpu: str = self.judge.facts["uuid"]
        self._free: dict[int, list[Buffer]] = {}
        self._same_storage = False
        self._all: list[Buffer] = []

    def take(self, size: int) -> Buffer:
        """A buffer of at least this size; which of the free ones is left to `new_call`."""
        whole = max(1, -(-size // self.granule)) * self.granule
        free = self._free.setdefault(whole, [])
        if free:
            return free.pop(-1 if self._same_storage else random.randrange(len(free)))
        buffer = Buffer(*self._create(whole), whole)
        self._all.append(buffer)
        return buffer

    def _create(self, size: int) -> tuple[int, int]:
        """Waits a while where the GPU's memory is short: other cells give theirs back."""
        patience = time.monotonic() + MEMORY_SECONDS
        while True:
            try:
                return self.judge.create(size)
            except RefusedError:
                self.trim()
                if time.monotonic() > patience:
                    raise
                time.sleep(LOOK_SECONDS)

    def new_call(self) -> None:
        """Half of the calls find their tensors where a call of the same shapes had them."""
        self._same_storage = random.random() < 0.5

    def give(self, buffers: Sequence[Buffer]) -> None:
        """In the reverse order of taking, so that the last buffers come first again."""
        for buffer in reversed(buffers):
            self._free.setdefault(buffer.size, []).append(buffer)

    def trim(self) -> None:
        """Gives the memory of free buffers back to the GPU; no runner may have them mapped."""
        for buffer in [one for free in self._free.values() for one in free]:
            self._all.remove(buffer)
            os.close(buffer.descriptor)
            self.judge.ask("release", buffer.number)
        self._free.clear()

    def close(self) -> None:
        for buffer in self._all:
            os.close(buffer.descriptor)
        self._all.clear()
        self.judge.close()

    def __enter__(self) -> "Rig":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Placed:
    """A tensor in a buffer, at its end: behind it nothing is mapped, or lies the rig's margin."""

    buffer: Buffer
    offset: int
    shape: tuple[int, ...]
    #: In elements.
    strides: tuple[int, ...]
    dtype: str

    @property
    def node(self) -> dict[str, Any]:
        return {
            "buffer": self.buffer.number,
            "offset": self.offset,
            "shape": list(self.shape),
            "strides": list(self.strides),
            "dtype": self.dtype,
        }

    @property
    def span(self) -> int:
        """Bytes from the first element to the end of the last one."""
        return span(self.shape, self.strides) * STORED[self.dtype].itemsize


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


class Call:
    """The tensors of one call, placed in the judge's buffers."""

    def __init__(self, rig: Rig, contract: Entry, args: tuple[Any, ...]) -> None:
        self.rig, self.args = rig, args
        rig.new_call()
        self.inputs = [
            self._place(value.shape, strides_of(value), dtype_name(value))
            if isinstance(value, np.ndarray)
            else value
            for value in args
        ]
        wanted: tuple[Output, ...] = contract.outputs(*args)
        self.outputs = [self._place(one.shape, contiguous(one.shape), one.dtype) for one in wanted]
        self.updated = [self.inputs[place] for place in contract.updated]
        #: Where inputs wait that come during the call.
        self.held: list[Placed] = []

    def _place(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> Placed:
        size = span(shape, strides) * STORED[dtype].itemsize
        buffer = self.rig.take(size + self.rig.margin)
        offset = (buffer.size - self.rig.margin - size) // ALIGNMENT * ALIGNMENT
        return Placed(buffer, offset, shape, strides, dtype)

    @property
    def placed(self) -> list[Placed]:
        every = (*self.inputs, *self.outputs, *self.held)
        return [one for one in every if isinstance(one, Placed)]

    @property
    def nodes(self) -> list[dict[str, Any]]:
        return [
            one.node if isinstance(one, Placed) else {"value": _plain(one)}
            for one in (*self.inputs, *self.outputs)
        ]

    def write_inputs(self) -> None:
        for value, place in zip(self.args, self.inputs, strict=True):
            if isinstance(place, Placed):
                self._write(place.buffer.number, place.offset, value)

    def hold_back_inputs(self) -> list[dict[str, int]]:
        """Moves the inputs into other buffers, from which they are to be copied during the call."""
        copies = []
        for value, place in zip(self.args, self.inputs, strict=True):
            if isinstance(place, Placed):
                whole, home = place.buffer.size, place.buffer.number
                held = Placed(self.rig.take(whole), 0, (whole,), (1,), "uint8")
                self.held.append(held)
                self._write(held.buffer.number, place.offset, value)
                self.rig.judge.ask("poison", home, POISON)
                copies.append({"from": held.buffer.number, "to": home, "size": whole})
        return copies

    def _write(self, number: int, start: int, value: np.ndarray) -> None:
        self.rig.judge.ask("poison", number, POISON)
        for offset, data in pieces(value):
            self.rig.judge.write(number, start + offset, data)

    def poison_outputs(self) -> None:
        for place in self.outputs:
            self.rig.judge.ask("poison", place.buffer.number, POISON)

    def read(self, place: Placed) -> np.ndarray:
        data = self.rig.judge.read(place.buffer.number, place.offset, place.span)
        flat = np.frombuffer(data, STORED[place.dtype])
        if place.strides == contiguous(place.shape):
            return flat.reshape(place.shape)
        steps = [stride * flat.itemsize for stride in place.strides]
        return np.lib.stride_tricks.as_strided(flat, place.shape, steps).copy()

    def read_piece(self, place: Placed, first: int, count: int) -> np.ndarray:
        """So many elements of a contiguous tensor."""
        item = STORED[place.dtype].itemsize
        offset = place.offset + first * item
        data = self.rig.judge.read(place.buffer.number, offset, count * item)
        return np.frombuffer(data, STORED[place.dtype])

    def read_written(self) -> list[np.ndarray]:
        return [self.read(place) for place in (*self.outputs, *self.updated)]

    @property
    def written_dtypes(self) -> list[str]:
        return [place.dtype for place in (*self.outputs, *self.updated)]

    def check_borders(self) -> None:
        """Nothing before or behind an output was written; where no margin is, writing faults."""
        for number, place in enumerate(self.outputs):
            end = place.offset + place.span
            for offset, size, where in (
                (0, place.offset, "before its beginning"),
                (end, place.buffer.size - end if self.rig.margin else 0, "behind its end"),
            ):
                is_poisoned = "is_poisoned", place.buffer.number, POISON, offset, size
                if size and not self.rig.judge.ask(*is_poisoned):
                    raise Violation(f"wrote outside its output {number}, {where}")

    def release(self) -> None:
        self.rig.give([place.buffer for place in self.placed])


class GpuSubmission(Submission):
    """One GPU answer in one runner, started when first needed and again after it died."""

    def __init__(
        self,
        folder: Path,
        config: SandboxConfig,
        entries: Mapping[str, Entry],
        rig: Rig,
        *,
        full: bool = False,
        ours: bool = False,
    ) -> None:
        super().__init__(folder, config, full=full)
        self.entries, self.rig = entries, rig
        #: Our own code runs only when it is called, and its caller takes the turn.
        self.ours = ours
        #: What nvcc made of solution.cu, for the next runner.
        self._library = b""
        #: What nvcc said of solution.cu; empty for Python.
        self.compile_log = ""
        self._mapped: set[int] = set()
        #: Held while there may be a runner: nothing is timed beside it.
        self.turn: turns.Shared | None = None
        self._had_company = False

    @property
    def had_company(self) -> bool:
        """Whether a runner of another answer was ever beside a runner of this one."""
        return self._had_company or (self.turn is not None and self.turn.had_company())

    def start(self, entries: Sequence[str]) -> list[str]:
        super().close()
        if self.turn is None and not self.ours:
            self.turn = turns.share(self.rig.gpu)
        self._session = Session(self.folder, self.config, "gpu_runner")
        self._mapped = set()
        header = {"op": "import", "entries": list(entries), "device": self.rig.device}
        header |= {"module": self.config.entry, "buffers": self.rig.judge.facts["buffers"]}
        try:
            reply, body = self._session.ask(header, [self._library], IMPORT_SECONDS)
        except Violation as violation:
            self._session.close()
            self._note(violation)
            raise
        self._library = bytes(body) if reply.get("bytes") else b""
        self.compile_log = str(reply.get("log") or self.compile_log)[:MOST_LOG]
        missing = reply.get("missing")
        return [str(name) for name in missing] if isinstance(missing, list) else list(entries)

    def close(self) -> None:
        super().close()
        if self.turn is not None:
            self._had_company = self.had_company
            self.turn.leave()
            self.turn = None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Another chance: a new runner, with the GPU for itself."""
        self.close()
        self.deaths, self.lost_seconds = 0, 0.0
        with turns.alone(self.rig.gpu):
            yield
            self.close()

    def fresh(self) -> "GpuSubmission":
        other = GpuSubmission(self.folder, self.config, self.entries, self.rig, full=self.full)
        other.forgeries, other.transcript = self.forgeries, self.transcript
        other._library = self._library
        self._fresh.append(other)
        return other

    def _ask(
        self, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any], on: RemoteObject | None
    ) -> Any:
        assert on is None
        return self._run(entry, (*args, *kwargs.values()))[0]

    def _ask_and_look(
        self, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any], on: RemoteObject | None
    ) -> tuple[Any, tuple[Any, ...], Sharing]:
        assert on is None
        answer, left = self._run(entry, (*args, *kwargs.values()), observe=True)
        return answer, left, Sharing.of(())  # outputs are the judge's tensors

    def late_inputs(self, entry: str, *args: Any) -> Any:
        """As a call, but the inputs are written on the answer's stream, behind other work, right
        before its own: what does not wait for that stream computes with poison."""
        with self._recording(entry, args, {}, None) as exchange:
            exchange.late = True
            exchange.answer = self._run(entry, args, late=True)[0]
        return exchange.answer

    def _run(
        self, entry: str, args: tuple[Any, ...], observe: bool = False, late: bool = False
    ) -> tuple[Any, tuple[Any, ...]]:
        call = Call(self.rig, self.entries[entry], args)
        try:
            call.write_inputs()
            copies = call.hold_back_inputs() if late else []
            call.poison_outputs()
            order = {"op": "call", "entry": entry, "values": call.nodes, "late": copies}
            reply = self.tell(order, call.placed)
            with self.frozen():
                written = self._look_twice(call)
                call.check_borders()
                left = self._left(call) if observe else ()
            self._refuse_unwritten(call, written, str(reply.get("returned", "")))
            return answer_of(written, call.written_dtypes), left
        finally:
            call.release()
            if any(place.buffer.size >= HUGE for place in call.placed):
                super().close()
                self.rig.trim()

    def tell(self, header: dict[str, Any], placed: Sequence[Placed]) -> dict[str, Any]:
        """Asks the runner, which has mapped these tensors' buffers before."""
        session = self.session
        started = time.monotonic()
        try:
            for buffer in {place.buffer for place in placed}:
                if buffer.number not in self._mapped:
                    session.hand_over(buffer.descriptor)
                    order = {"op": "map", "buffer": buffer.number, "size": buffer.size}
                    session.ask(order, (), IMPORT_SECONDS)
                    self._mapped.add(buffer.number)
            reply, _ = session.ask(header, (), self.config.call_seconds)
        except SubmissionRaised as raised:
            if raised.kind == "CudaContextError":  # this process answers nothing more
                session.close()
            raise
        except SubmissionDied as death:
            self.deaths += 1
            self.lost_seconds += time.monotonic() - started
            self._note(death)
            raise
        return reply

    def frozen(self) -> AbstractContextManager[None]:
        """While this is entered, nothing of the runner runs on the processor."""
        return _frozen(self.session)

    def _look_twice(self, call: Call) -> list[np.ndarray]:
        first = call.read_written()
        time.sleep(LATE_SECONDS)
        again = call.read_written()
        if any(a.tobytes() != b.tobytes() for a, b in zip(first, again, strict=True)):
            raise Violation("wrote to an output after it had returned")
        return first

    def _left(self, call: Call) -> tuple[Any, ...]:
        """The arguments as the answer left them."""
        found = []
        for value, place in zip(call.args, call.inputs, strict=True):
            if isinstance(place, Placed):
                value = answer_of([call.read(place)], [place.dtype])
            found.append(value)
        return tuple(found)

    def _refuse_unwritten(self, call: Call, written: list[np.ndarray], returned: str) -> None:
        for number, array in enumerate(written[: len(call.outputs)]):
            data = array.tobytes()
            if data and data.count(POISON) == len(data):
                instead = f"; it returned a {returned} instead" if returned else ""
                raise Violation(f"did not write its output {number}{instead}")


@contextmanager
def _frozen(session: Session) -> Iterator[None]:
    session.running.pause()
    try:
        yield
    finally:
        if not session.closed:
            session.running.resume()


def strides_of(array: np.ndarray) -> tuple[int, ...]:
    if array.flags.c_contiguous:
        return contiguous(array.shape)
    return tuple(stride // array.itemsize for stride in array.strides)


def pieces(array: np.ndarray) -> Iterator[tuple[int, memoryview]]:
    """The memory of the array by offset. Between padded rows lies what lay there; rows that are
    far apart come one by one, and nothing is written between them."""
    if not array.size:
        return
    count = span(array.shape, strides_of(array))
    item = STORED[dtype_name(array)].itemsize
    if count > _SPARSE * array.size and array.ndim > 1:
        step = array.strides[0] // array.itemsize * item
        for row in range(len(array)):
            for offset, data in pieces(array[row]):
                yield row * step + offset, data
        return
    flat = np.asarray(array).reshape(-1)
    if not array.flags.c_contiguous:
        flat = np.lib.stride_tricks.as_strided(np.asarray(array), (count,), (array.itemsize,))
    yield 0, (narrow(flat) if isinstance(array, BFloat16) else flat).data.cast("B")


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
