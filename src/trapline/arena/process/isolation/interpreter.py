"""Where the interpreter's own files lie, and which folders near them must stay hidden."""

import os
import sys
import sysconfig
from contextlib import suppress
from functools import cache
from pathlib import Path

#: The interpreter itself, not a virtual environment's link to it: no site-packages come along.
PYTHON = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
#: Isolated, no site (so no .pth file and no sitecustomize), nothing written beside sources.
FLAGS = ("-I", "-S", "-B")
#: Shared libraries, where systems keep them; what does not exist is passed over.
_SYSTEM_LIBRARIES = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64")
_MORE_LIBRARIES = ("/usr/local/lib", "/nix/store", "/etc/ld.so.cache", "/sys/devices/system/cpu")
_INSTALLED = ("site-packages", "dist-packages")


@cache
def needed_files() -> list[Path]:
    """What the interpreter needs to run; nothing in the list lies in another entry of it."""
    libraries = map(Path, (*_SYSTEM_LIBRARIES, *_MORE_LIBRARIES))
    found = [path for path in (*libraries, *_own_files()) if path.exists()]
    return [path for path in found if not set(path.parents) & set(found)]


def _own_files() -> list[Path]:
    """The interpreter, its library, and libpython where it is a shared one."""
    paths = [Path(PYTHON), *standard_library()]
    folder = sysconfig.get_config_var("LIBDIR")
    if folder:
        # Of an interpreter that was moved this is the old place, which others may not read.
        with suppress(PermissionError):
            paths += sorted(Path(folder).glob("libpython*.so*"))
    return paths


@cache
def standard_library() -> list[Path]:
    """One folder, or two where pure and compiled modules are kept apart."""
    # A virtual environment would give its own folder for the second.
    real = {
        "base": sys.base_prefix,
        "installed_base": sys.base_prefix,
        "platbase": sys.base_exec_prefix,
        "installed_platbase": sys.base_exec_prefix,
    }
    names = ("stdlib", "platstdlib")
    return sorted({Path(sysconfig.get_path(name, vars=real)).resolve() for name in names})


@cache
def installed_packages() -> list[Path]:
    """Folders in or beside what is shown that hold installed packages, ours perhaps."""
    places = {*standard_library(), *Path("/usr/lib").glob("python3*")}
    places |= set(Path("/usr/local/lib").glob("python3*"))
    found = {(place / name).resolve() for place in places for name in _INSTALLED}
    return sorted(path for path in found if path.is_dir())


#: What a GPU's program needs beside an interpreter: the driver's files, headers and compilers.
_GPU_FILES = (
    *(
        "/usr/bin",
        "/usr/include",
        "/usr/libexec",
        "/usr/share",
        "/usr/local/cuda",
        "/usr/local/nvidia",
        "/usr/sbin",
        "/sbin",
        "/bin",
        "/etc/alternatives",
    ),
    *("/proc/driver", "/proc/devices", "/proc/self", "/proc/cpuinfo", "/proc/meminfo"),
    *("/proc/modules", "/proc/sys", "/proc/stat", "/proc/filesystems", "/sys"),
)
_GPU_DEVICES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset", "nvidia-caps")


def gpu_files() -> list[Path]:
    """As `needed_files`, for a program that compiles for a GPU and runs on it."""
    cuda = sorted(Path("/usr/local").glob("cuda*"))
    listed = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    libraries = [Path(name) for name in listed if name.startswith("/")]
    headers = [*libraries, Path(sysconfig.get_path("include")), Path(sys.base_prefix) / "include"]
    named = dict.fromkeys((*map(Path, _GPU_FILES), *cuda, *headers))
    found = [path for path in named if path.exists()]
    return [path for path in found if not set(path.parents) & set(found)]


def gpu_devices() -> list[str]:
    devices = Path("/dev")
    numbered = sorted(str(path) for path in devices.glob("nvidia[0-9]*"))
    return [*numbered, *(str(devices / name) for name in _GPU_DEVICES if (devices / name).exists())]
