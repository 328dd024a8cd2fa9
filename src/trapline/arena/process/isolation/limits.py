"""SandboxLimits of the kernel that need no privilege: rlimits and the environment."""

import os

from trapline.arena.process.isolation.spec import MEGABYTE, SandboxLimits

#: Code, stacks and reserved arenas count as address space, though that memory is not used.
_ADDRESS_SPACE_HEADROOM = 1024 * MEGABYTE
_OPEN_FILES, _GPU_OPEN_FILES = 256, 1024
_LIBRARY_PATHS = ("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET")


def rlimits(limits: SandboxLimits, gpu: bool = False) -> dict[str, int]:
    """By the names of the module `resource`. One process each, but for RLIMIT_NPROC.

    CUDA reserves far more address space than there is memory, so that a GPU's program has no limit
    on it; the control group counts what it really uses.
    """
    space = {"RLIMIT_AS": limits.memory_mb * MEGABYTE + _ADDRESS_SPACE_HEADROOM}
    return {
        **({} if gpu else space),
        "RLIMIT_CPU": limits.cpu_seconds,
        "RLIMIT_FSIZE": limits.file_mb * MEGABYTE,
        "RLIMIT_NOFILE": _GPU_OPEN_FILES if gpu else _OPEN_FILES,
        "RLIMIT_CORE": 0,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
    }


#: Threads that wait for each other's part of a small product use up more time than they save.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def environment(scratch: str, gpu: bool = False) -> dict[str, str]:
    """All that a submission sees of the environment; one thread, so that time means something."""
    return {
        **(_gpu_environment(scratch) if gpu else {}),
        "HOME": scratch,
        "TMPDIR": scratch,
        "PATH": "/usr/local/cuda/bin:/usr/bin:/bin" if gpu else "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        **ONE_THREAD,
    }


def _gpu_environment(scratch: str) -> dict[str, str]:
    """Compilers keep their results in the scratch folder; libraries are found as they are here."""
    kept = {name: os.environ[name] for name in _LIBRARY_PATHS if name in os.environ}
    caches = {"TRITON_CACHE_DIR": f"{scratch}/triton", "CUDA_CACHE_PATH": f"{scratch}/cuda"}
    # torch.compile asks for the user's name, and the user inside has none; it starts a process for
    # each core unless told otherwise, and processes are limited.
    names = {"USER": "nobody", "LOGNAME": "nobody", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return {**kept, **caches, **names}
