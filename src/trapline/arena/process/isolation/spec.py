"""What is to be started, and what it may use."""

import socket
from dataclasses import dataclass
from pathlib import Path

from trapline.arena.record import Level

MEGABYTE = 1 << 20


@dataclass(frozen=True)
class SandboxLimits:
    """What everything inside one sandbox may use together."""

    memory_mb: int = 2048
    #: Processes and threads.
    processes: int = 32
    #: The largest single file.
    file_mb: int = 64
    #: Processor time of one process, not of the wall clock; the wall clock is the caller's.
    cpu_seconds: int = 600


@dataclass(frozen=True)
class Launch:
    """One program to start beside one submission.

    Inside, the program runs as `__main__` with `sys.argv == [program, fd, submission]`: `fd` is the
    inherited `channel`, `submission` the read-only folder. The working folder, `HOME` and `TMPDIR`
    are an empty scratch folder. `sys.path` holds the program's folder (with `wire.py`), the
    standard library, and NumPy with `packages`; the submission's folder is not on it.
    """

    level: Level
    #: A name of `stage._PROGRAMS`, or the path of any other program (self-tests do that).
    program: str | Path
    submission: Path
    #: The far end of a socket pair; closed here once the program has it.
    channel: socket.socket
    limits: SandboxLimits = SandboxLimits()
    packages: tuple[str, ...] = ()
    scratch_mb: int = 64
    #: The program uses the GPU: its devices, its driver's files and compilers are shown.
    gpu: bool = False
    #: Defences left out, by name: only a test that proves a defence does that.
    without: frozenset[str] = frozenset()
