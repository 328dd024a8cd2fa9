"""SandboxLimits on everything inside together, where this machine lets us have a control group."""

import contextlib
import os
import time
from functools import cache
from itertools import count
from pathlib import Path

from trapline.arena.process.isolation.spec import MEGABYTE, SandboxLimits

_PREFIX = "trapline-"
_MOUNTS = Path("/proc/self/mountinfo")
_MEMBERSHIP = Path("/proc/self/cgroup")
#: Our own processes inside: a shell that becomes the sandbox, its init, a supervisor.
_OURS = 4
_REMOVE_SECONDS = 5.0
_groups = count()


class Group:
    """One folder in each hierarchy that can be had; empty where there is none."""

    def __init__(self, limits: SandboxLimits, without: frozenset[str] = frozenset()) -> None:
        name = f"{_PREFIX}{os.getpid()}-{next(_groups)}"
        self._memory: Path | None = None
        self._processes: Path | None = None
        self._freezer: Path | None = None
        self._peak: int | None = None
        self._folders: list[Path] = []
        for parent in () if "cgroup" in without else _parents():
            with contextlib.suppress(OSError):
                self._add(parent / name, limits)

    def _add(self, folder: Path, limits: SandboxLimits) -> None:
        folder.mkdir()
        self._folders.append(folder)
        if _write_first(folder, _MEMORY_LIMITS, limits.memory_mb * MEGABYTE):
            _write_first(folder, _SWAP_LIMITS, limits.memory_mb * MEGABYTE)
            self._memory, self._peak = folder, _open_peak(folder)
        if _write_first(folder, ("pids.max",), limits.processes + _OURS):
            self._processes = folder
        if any((folder / name).exists() for name in _FREEZERS):
            self._freezer = folder

    def entering(self, command: list[str]) -> list[str]:
        """The command, made to join before it does anything else."""
        if not self._folders:
            return command
        joined = [str(folder / "cgroup.procs") for folder in self._folders]
        joins = " && ".join(f'echo $$ >"${{{number}}}"' for number in range(1, len(joined) + 1))
        script = f'{joins} && shift {len(joined)} && exec "$@"'
        return ["/bin/sh", "-c", script, "sh", *joined, *command]

    def members(self) -> list[int]:
        found: set[int] = set()
        for folder in self._folders:
            with contextlib.suppress(OSError):
                found.update(
                    map(int, (folder / "cgroup.procs").read_text(encoding="utf-8").split())
                )
        return sorted(found)

    def peak_bytes(self) -> int | None:
        """The most memory used together, ended processes included; None where it is not counted."""
        return None if self._peak is None else int(os.pread(self._peak, 32, 0))

    def reset_peak(self) -> None:
        if self._peak is not None:
            os.pwrite(self._peak, b"0", 0)

    def processor_seconds(self) -> float | None:
        """Processor time used together, ended processes included; None where it is not counted."""
        for folder in self._folders:
            with contextlib.suppress(OSError):
                words = (folder / "cpu.stat").read_text(encoding="utf-8").split()
                # Version 1 has a file of that name without this count.
                if "usage_usec" in words:
                    return int(words[words.index("usage_usec") + 1]) / 1e6
        return None

    def ran_out_of_memory(self) -> bool:
        for name in ("memory.oom_control", "memory.events"):
            if self._memory is not None:
                with contextlib.suppress(OSError):
                    words = (self._memory / name).read_text(encoding="utf-8").split()
                    return int(words[words.index("oom_kill") + 1]) > 0
        return False

    def forbid_forks(self) -> None:
        """Before the end: a process that cannot fork cannot escape."""
        if self._processes is not None:
            _write_first(self._processes, ("pids.max",), 0)

    def freeze(self) -> bool:
        """Stops all processes at once; False where the kernel offers no freezer."""
        if self._freezer is None or not _write_first(self._freezer, _FREEZERS, *_FROZEN):
            return False
        deadline = time.monotonic() + _FREEZE_SECONDS
        while time.monotonic() < deadline:
            if _is_frozen(self._freezer):
                return True
        return False

    def thaw(self) -> bool:
        return self._freezer is not None and _write_first(self._freezer, _FREEZERS, *_THAWED)

    def remove(self) -> None:
        """A folder can be removed only after its last member has ended."""
        deadline = time.monotonic() + _REMOVE_SECONDS
        for folder in self._folders:
            while folder.exists() and time.monotonic() < deadline:
                with contextlib.suppress(OSError):
                    folder.rmdir()
                    break
                time.sleep(0.001)
        self._folders.clear()
        if self._peak is not None:
            os.close(self._peak)
            self._peak = None


_MEMORY_LIMITS = ("memory.limit_in_bytes", "memory.max")
#: Version 1 and version 2, with what to write to each.
_FREEZERS = ("freezer.state", "cgroup.freeze")
_FROZEN, _THAWED = ("FROZEN", "1"), ("THAWED", "0")
_FREEZE_SECONDS = 2.0
_SWAP_LIMITS = ("memory.memsw.limit_in_bytes", "memory.swap.max")


def _open_peak(folder: Path) -> int | None:
    """Kept open: version 2 resets a peak for one reader only, and only in newer kernels."""
    for name in ("memory.max_usage_in_bytes", "memory.peak"):
        with contextlib.suppress(OSError):
            descriptor = os.open(folder / name, os.O_RDWR | os.O_CLOEXEC)
            try:
                os.pwrite(descriptor, b"0", 0)
            except OSError:
                os.close(descriptor)
            else:
                return descriptor
    return None


def remove_leftovers() -> None:
    """Groups of controllers that were killed."""
    for parent in _parents():
        for folder in parent.glob(f"{_PREFIX}*"):
            owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
            if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
                with contextlib.suppress(OSError):
                    folder.rmdir()


@cache
def _parents() -> tuple[Path, ...]:
    """Where a group may be made: our own folder in each hierarchy that counts what we limit."""
    paths = _own_paths()
    found = []
    for line in _MOUNTS.read_text(encoding="utf-8").splitlines():
        fields, _, kind = line.partition(" - ")
        file_system, _, options = kind.split(" ", 2)
        controllers = {"memory", "pids", "freezer"} & set(options.split(","))
        if file_system == "cgroup2":
            found.append(_mounted(fields, paths.get("", "/")))
            _enable_controllers(found[-1])
        elif file_system == "cgroup" and controllers:
            found.append(_mounted(fields, paths.get(controllers.pop(), "/")))
    return tuple(dict.fromkeys(path for path in found if os.access(path, os.W_OK) and _works(path)))


def _enable_controllers(parent: Path) -> None:
    """Asks version 2 to count memory and processes in groups below; the kernel refuses that where
    processes of others are in the way."""
    for controller in ("memory", "pids"):
        with contextlib.suppress(OSError):
            (parent / "cgroup.subtree_control").write_text(f"+{controller}", encoding="utf-8")


def _works(parent: Path) -> bool:
    """Tried, not assumed: a new group here must really offer a limit."""
    trial = parent / f"{_PREFIX}{os.getpid()}-trial-{next(_groups)}"
    try:
        trial.mkdir()
    except OSError:
        return False
    try:
        return any((trial / name).exists() for name in (*_MEMORY_LIMITS, "pids.max", *_FREEZERS))
    finally:
        trial.rmdir()


def _own_paths() -> dict[str, str]:
    """Controller → our path; "" for version 2."""
    paths = {}
    for line in _MEMBERSHIP.read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path
    return paths


def _mounted(fields: str, path: str) -> Path:
    """A mount may show a part of the hierarchy only: its root is where our path starts."""
    words = fields.split(" ")
    root, point = words[3], Path(words[4])
    inner = os.path.relpath(path, root)
    return point if inner.startswith("..") else point / inner


def _write_first(folder: Path, names: tuple[str, ...], *values: object) -> bool:
    """Writes to the first file there is; with several values, the one that belongs to it."""
    for index, name in enumerate(names):
        with contextlib.suppress(OSError):
            if (folder / name).exists():
                (folder / name).write_text(str(values[index % len(values)]), encoding="utf-8")
                return True
    return False


def _is_frozen(folder: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return (folder / "freezer.state").read_text(encoding="utf-8") == "FROZEN\n"
    return "frozen 1" in (folder / "cgroup.events").read_text(encoding="utf-8")


@cache
def counts_memory() -> bool:
    """Whether groups here count memory, and a peak can be reset."""
    group = Group(SandboxLimits())
    try:
        return group.peak_bytes() is not None
    finally:
        group.remove()


@cache
def counts_processes() -> bool:
    """Whether groups here limit the number of processes, which for root nothing else does."""
    group = Group(SandboxLimits())
    try:
        return group._processes is not None
    finally:
        group.remove()


@cache
def can_freeze() -> bool:
    group = Group(SandboxLimits())
    try:
        return group.freeze() and group.thaw()
    finally:
        group.remove()
