"""Loads C sources of this package: compiles each once per machine and runs functions in threads.

Compiled libraries are kept in the user's cache folder, under a name that covers the source, the
flags, the compiler and the processor. Without a C compiler the caller gets the reason as a string
and uses another implementation.

Threads share a job: a C structure with a counter, from which every thread takes parts until none
is left.
"""

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-O3", "-shared", "-fPIC")
#: Tried in this order: a compiler may not know the processor; generic code is slower, but correct.
_PROCESSOR_FLAGS = (("-march=native",), ())


def load(source: Path, **functions: Sequence[Any]) -> ctypes.CDLL | str:
    """The library compiled from one C file, or why it is not available.

    `functions` gives the argument types of each function that is called; all return nothing.
    """
    compiler = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        return "there is no C compiler (cc, gcc or clang)"
    try:
        library = _cached(source, compiler)
    except OSError:  # the cache folder is missing, read-only, foreign, or mounted without exec
        library = _uncached(source, compiler)
    if not isinstance(library, str):
        for name, types in functions.items():
            function = getattr(library, name)
            function.argtypes, function.restype = list(types), None
    return library


def _cached(source: Path, compiler: str) -> ctypes.CDLL | str:
    """The library from the cache folder, compiled into it first if it is absent or damaged."""
    folder = _cache_folder()
    key = f"{source.stem}-{_key(source, compiler)}"
    with _locked(folder / f"{key}.lock"):
        for path in sorted(folder.glob(f"{key}-*.so")):
            if _is_trusted(path, stat.S_ISREG) and path.stem.endswith(_digest(path.read_bytes())):
                return ctypes.CDLL(str(path))
            path.unlink()
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / "made.so"
            if reason := _compile(source, compiler, made):
                return reason
            made.chmod(0o700)
            return ctypes.CDLL(str(made.rename(folder / f"{key}-{_digest(made.read_bytes())}.so")))


def _uncached(source: Path, compiler: str) -> ctypes.CDLL | str:
    """The library, compiled for this process alone."""
    with tempfile.TemporaryDirectory(prefix="trapline-") as folder:
        made = Path(folder) / f"{source.stem}.so"
        return _compile(source, compiler, made) or ctypes.CDLL(str(made))


def _compile(source: Path, compiler: str, made: Path) -> str | None:
    """Compiles `source` to `made`; why that failed, or None."""
    message = ""
    for processor in _PROCESSOR_FLAGS:
        command = [compiler, *_FLAGS, *processor, str(source), "-o", str(made), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{compiler} failed: {error}"
        if not done.returncode:
            return None
        message = done.stderr.strip()[-200:]
    return f"{compiler} failed: {message}"


def _cache_folder() -> Path:
    """A folder that only this user can write to; `OSError` where there is none."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # absent, or not valid by the specification
        home = Path(os.path.expanduser("~"))
        if not home.is_absolute():
            raise FileNotFoundError("the user has no home folder")
        base = home / ".cache"
    folder = base / "trapline" / "c"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_trusted(folder, stat.S_ISDIR):
        raise PermissionError(f"{folder} belongs to, or can be changed by, another user")
    return folder


def _is_trusted(path: Path, is_kind: Callable[[int], bool]) -> bool:
    """Whether the path is of this kind, not a link, and only this user can change it."""
    found = path.lstat()
    return is_kind(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _key(source: Path, compiler: str) -> str:
    """Digest of everything that the compiled code depends on."""
    program = Path(compiler).resolve()
    version = program.stat()
    parts = (
        source.read_text(encoding="utf-8") if source.is_file() else "",
        str((_FLAGS, _PROCESSOR_FLAGS)),
        f"{program} {version.st_size} {version.st_mtime_ns}",
        _processor(),
    )
    return _digest("\0".join(parts).encode())


@cache
def _processor() -> str:
    """The processor's model and instruction sets: `-march=native` depends on them."""
    cpuinfo = Path("/proc/cpuinfo")
    described = (
        cpuinfo.read_text(encoding="utf-8").split("\n\n")[0]
        if cpuinfo.is_file()
        else platform.processor()
    )
    changing = ("processor", "cpu MHz", "core id", "apicid", "initial apicid", "bogomips")
    kept = (line for line in described.splitlines() if not line.startswith(changing))
    return "\n".join((platform.machine(), *kept))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock file; other processes that want it wait."""
    opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def run_in_threads(work: Any, job: ctypes.Structure, threads: int) -> None:
    """Calls the C function `work` with `job` in up to `threads` threads at once.

    They are the threads of torch's own operations, which are already running and do not compete
    with them. Where those are not available, the calling thread does all the work.
    """
    parallel = None if threads <= 1 or _forked else _torch_threads()
    if parallel is None:
        work(ctypes.byref(job))
    else:
        parallel(ctypes.cast(work, ctypes.c_void_p), ctypes.byref(job), threads, 0)


def _torch_threads() -> Callable[..., Any] | None:
    """A function that runs another one in torch's threads, or None without torch."""
    torch = sys.modules.get("torch")
    return None if torch is None or torch.__file__ is None else _openmp(torch.__file__)


@cache
def _openmp(torch: str) -> Callable[..., Any] | None:
    """GNU OpenMP's `GOMP_parallel` from torch's library, or None where torch uses another one."""
    try:
        parallel = ctypes.CDLL(str(Path(torch).parent / "lib" / "libtorch_cpu.so")).GOMP_parallel
    except (OSError, AttributeError):
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    parallel.argtypes, parallel.restype = [pointer, pointer, number, number], None
    return parallel


_forked = False


def _after_fork() -> None:
    """OpenMP's threads do not survive a fork, and OpenMP would wait for them forever."""
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_after_fork)
