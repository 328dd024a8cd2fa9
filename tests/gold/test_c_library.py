"""C compiled at first use: what happens when a compiler is absent, refuses or is old."""

import ctypes
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


def needs_compiler(source: Path) -> ctypes.CDLL:
    made = c_library.built(source)
    if isinstance(made, str):
        pytest.skip(made)
    return made


def test_a_source_becomes_a_library(source):
    assert needs_compiler(source).square(7) == 49


def test_a_compiler_that_does_not_know_the_processor_still_compiles(source, monkeypatch):
    needs_compiler(source)
    monkeypatch.setattr(c_library, "_PROCESSORS", (("-march=no-such-processor",), ()))
    made = c_library.built(source)
    assert not isinstance(made, str), made
    assert made.square(3) == 9


def test_a_source_that_is_no_c_is_quoted(source):
    needs_compiler(source)
    source.write_text("this is no C\n")
    assert "failed" in c_library.built(source)


def test_without_a_compiler_there_is_a_sentence(source, monkeypatch):
    monkeypatch.setattr(c_library.shutil, "which", lambda name: None)
    assert c_library.built(source) == "there is no C compiler (cc, gcc or clang)"


#: Threads wait a while for all that are wanted, take items and note who took which.
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
    """Runs a job in some threads: how many came, and who took each item."""
    source.write_text(TAKES)
    work = needs_compiler(source).work

    def run(threads, wanted):
        taken = (ctypes.c_long * ITEMS)()
        job = Job(ITEMS, wanted, 0, 0, taken)
        c_library.share(work, job, threads)
        return job.threads, set(taken)

    return run


def test_several_threads_take_each_part_once(shared):
    pytest.importorskip("torch")
    if c_library._torchs_threads() is None:
        pytest.skip("torch has other threads here")
    came, by = shared(threads=3, wanted=3)
    assert came == 3
    assert by <= {1, 2, 3}


@pytest.mark.parametrize("why", ["no threads asked for", "after a fork", "no OpenMP", "no torch"])
def test_one_thread_does_all_where_it_must(shared, monkeypatch, why):
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
work = c_library.built(Path(sys.argv[1])).work
class Job(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_long) for name in ("items", "wanted", "next", "threads", "by"))
c_library.share(work, Job(0, 2), 2)
child = os.fork()
if not child:
    signal.alarm(60)
    c_library.share(work, Job(0, 1), 2)
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_does_not_wait_for_its_parents_threads(shared, source):
    """They are gone there, and waiting for them would never end."""
    pytest.importorskip("torch")
    if c_library._torchs_threads() is None:
        pytest.skip("torch has other threads here")
    ended = subprocess.run([sys.executable, "-c", FORKS, str(source)], check=False, timeout=120)
    assert ended.returncode == 0
