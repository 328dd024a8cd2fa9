"""SandboxLimits of the kernel that need no privilege: rlimits and the environment."""

from trapline.arena.process.isolation.spec import MEGABYTE, SandboxLimits

#: Code, stacks and reserved arenas count as address space, though that memory is not used.
_ADDRESS_SPACE_HEADROOM = 1024 * MEGABYTE
_OPEN_FILES = 256


def rlimits(limits: SandboxLimits) -> dict[str, int]:
    """By the names of the module `resource`. One process each, but for RLIMIT_NPROC."""
    return {
        "RLIMIT_AS": limits.memory_mb * MEGABYTE + _ADDRESS_SPACE_HEADROOM,
        "RLIMIT_CPU": limits.cpu_seconds,
        "RLIMIT_FSIZE": limits.file_mb * MEGABYTE,
        "RLIMIT_NOFILE": _OPEN_FILES,
        "RLIMIT_CORE": 0,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
    }


def environment(scratch: str) -> dict[str, str]:
    """All that a submission sees of the environment; one thread, so that time means something."""
    return {
        "HOME": scratch,
        "TMPDIR": scratch,
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
