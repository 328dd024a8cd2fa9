"""C sources are compiled once, cached safely, and run in threads."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trapline.gold import c_library

SQUARE = "long square(long x) { return x * x; }\n"


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "square.c"
    path.write_text(SQUARE)
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The cache folder of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "trapline" / "c"


def needs_compiler(source: Path) -> ctypes.CDLL:
    library = c_library.load(source)
    if isinstance(library, str):
        pytest.skip(library)
    return library


@pytest.fixture
def compiled(source, monkeypatch):
    """The sources compiled since the fixture was set up."""
    needs_compiler(source)
    seen, compile_c = [], c_library._compile
    monkeypatch.setattr(
        c_library, "_compile", lambda source, *rest: seen.append(source) or compile_c(source, *rest)
    )
    return seen


def test_a_source_becomes_a_library(source):
    assert needs_compiler(source).square(7) == 49


def test_argument_types_are_set(source):
    needs_compiler(source)
    square = c_library.load(source, square=[ctypes.c_long]).square
    assert square.argtypes == [ctypes.c_long]
    assert square.restype is None


def test_unknown_processor_falls_back_to_generic_code(source, monkeypatch):
    needs_compiler(source)
    monkeypatch.setattr(c_library, "_PROCESSOR_FLAGS", (("-march=no-such-processor",), ()))
    library = c_library.load(source)
    assert not isinstance(library, str), library
    assert library.square(3) == 9


def test_invalid_source_returns_the_compilers_message(source):
    needs_compiler(source)
    source.write_text("not C\n")
    assert "failed" in c_library.load(source)


def test_missing_compiler_is_reported(source, monkeypatch):
    monkeypatch.setattr(c_library.shutil, "which", lambda name: None)
    assert c_library.load(source) == "there is no C compiler (cc, gcc or clang)"


def test_second_load_does_not_compile(source, compiled):
    assert c_library.load(source).square(5) == 25
    assert compiled == []


@pytest.mark.parametrize("what", ["source", "flags", "processor"])
def test_change_of_what_is_compiled_compiles_again(source, compiled, monkeypatch, what):
    if what == "source":
        source.write_text(SQUARE.replace("x * x", "x * x + 1"))
    if what == "flags":
        monkeypatch.setattr(c_library, "_FLAGS", ("-O1", "-shared", "-fPIC"))
    if what == "processor":
        monkeypatch.setattr(c_library, "_processor", lambda: "another one")
    assert c_library.load(source).square(5) == 25 + (what == "source")
    assert compiled == [source]


def _replace(path, data):
    """Puts other bytes into a new file: the process has mapped the old one."""
    path.unlink()
    path.write_bytes(data)
    path.chmod(0o700)


def _truncate(path):
    _replace(path, path.read_bytes()[:1000])


def _make_writable(path):
    path.chmod(0o722)


def _replace_by_link(path):
    path.rename(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")


def _replace_by_other_library(path):
    _replace(path, path.read_bytes() + b"changed")


@pytest.mark.parametrize(
    "damage", [_truncate, _make_writable, _replace_by_link, _replace_by_other_library]
)
def test_untrusted_cached_file_is_rebuilt(source, compiled, cache, damage):
    (library,) = cache.glob("*.so")
    damage(library)
    assert c_library.load(source).square(6) == 36
    assert compiled == [source]
    (rebuilt,) = cache.glob("*.so")
    assert not rebuilt.is_symlink()
    assert rebuilt.stat().st_mode & 0o777 == 0o700


def test_file_of_another_user_is_not_loaded(source, compiled, monkeypatch):
    mine = os.getuid()
    monkeypatch.setattr(c_library.os, "getuid", lambda: mine + 1)
    assert c_library.load(source).square(6) == 36
    assert compiled == [source]


@pytest.mark.parametrize("why", ["a file is in the way", "others may write", "no home"])
def test_unusable_cache_folder_compiles_for_the_process(source, compiled, cache, monkeypatch, why):
    if why == "a file is in the way":
        monkeypatch.setenv("XDG_CACHE_HOME", str(source))
    if why == "others may write":
        cache.chmod(0o777)
    if why == "no home":
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        monkeypatch.setattr(c_library.os.path, "expanduser", lambda path: path)
    assert c_library.load(source).square(6) == 36
    assert compiled == [source]


LOADS = """
import sys
from pathlib import Path
from trapline.gold import c_library
compile_c = c_library._compile
def counted(*arguments):
    print("compiled")
    return compile_c(*arguments)
c_library._compile = counted
input()
assert c_library.load(Path(sys.argv[1])).square(4) == 16
"""


def test_two_processes_at_once_compile_once(source, cache):
    needs_compiler(source)
    for library in cache.glob("*.so"):
        library.unlink()
    command = [sys.executable, "-c", LOADS, str(source)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(2)]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    printed = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert "".join(printed).count("compiled") == 1


#: Threads wait until all wanted threads run, take items and record which thread took each.
TAKES = """
struct job { long items, wanted, next, threads; long *by; };
void work(struct job *job) {
    long me = __atomic_add_fetch(&job->threads, 1, __ATOMIC_SEQ_CST);
    for (long i = 0; i < 1000000000; i++)
        if (__atomic_load_n(&job->threads, __ATOMIC_SEQ_CST) >= job->wanted) break;
    for (long i; (i = __atomic_fetch_add(&job->next, 1, __ATOMIC_SEQ_CST)) < job->items;)
        __atomic_fetch_add(job->by + i, me, __ATOMIC_SEQ_CST);
}
"""
ITEMS = 1000


class Job(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_long) for name in ("items", "wanted", "next", "threads")),
        ("by", ctypes.POINTER(ctypes.c_long)),
    )


@pytest.fixture
def shared(source):
    """Runs a job: the number of threads that worked, and the threads that took items."""
    source.write_text(TAKES)
    work = needs_compiler(source).work

    def run(threads, wanted):
        taken = (ctypes.c_long * ITEMS)()
        job = Job(ITEMS, wanted, 0, 0, taken)
        c_library.run_in_threads(work, job, threads)
        return job.threads, set(taken)

    return run


def test_threads_take_each_part_once(shared):
    pytest.importorskip("torch")
    if c_library._torch_threads() is None:
        pytest.skip("torch does not use GNU OpenMP here")
    started, by = shared(threads=3, wanted=3)
    assert started == 3
    assert by <= {1, 2, 3}


@pytest.mark.parametrize("why", ["no threads asked for", "after a fork", "no OpenMP", "no torch"])
def test_one_thread_does_all_the_work(shared, monkeypatch, why):
    monkeypatch.setattr(c_library, "_forked", why == "after a fork")
    if why == "no OpenMP":
        monkeypatch.setattr(c_library, "_openmp", lambda _: None)
    if why == "no torch":
        monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert shared(threads=0 if why == "no threads asked for" else 2, wanted=1) == (1, {1})


FORKS = """
import ctypes, os, signal, sys
from pathlib import Path
import torch
from trapline.gold import c_library
work = c_library.load(Path(sys.argv[1])).work
class Job(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_long) for name in ("items", "wanted", "next", "threads", "by"))
c_library.run_in_threads(work, Job(0, 2), 2)
child = os.fork()
if not child:
    signal.alarm(60)
    c_library.run_in_threads(work, Job(0, 1), 2)
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_forked_child_does_not_wait_for_the_threads_of_its_parent(shared, source):
    """The child has none of them, so waiting would never end."""
    pytest.importorskip("torch")
    if c_library._torch_threads() is None:
        pytest.skip("torch does not use GNU OpenMP here")
    ended = subprocess.run([sys.executable, "-c", FORKS, str(source)], check=False, timeout=120)
    assert ended.returncode == 0
