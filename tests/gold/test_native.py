"""C compiled at first use: what happens when a compiler is absent, refuses or is old."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from trapline.gold import native

SQUARE = "long square(long x) { return x * x; }\n"


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "square.c"
    path.write_text(SQUARE)
    return path


def needs_compiler(source: Path) -> ctypes.CDLL:
    made = native.built(source)
    if isinstance(made, str):
        pytest.skip(made)
    return made


def test_a_source_becomes_a_library(source):
    assert needs_compiler(source).square(7) == 49


def test_a_compiler_that_does_not_know_the_processor_still_compiles(source, monkeypatch):
    needs_compiler(source)
    monkeypatch.setattr(native, "_PROCESSORS", (("-march=no-such-processor",), ()))
    made = native.built(source)
    assert not isinstance(made, str), made
    assert made.square(3) == 9


def test_a_source_that_is_no_c_is_quoted(source):
    needs_compiler(source)
    source.write_text("this is no C\n")
    assert "failed" in native.built(source)


def test_without_a_compiler_there_is_a_sentence(source, monkeypatch):
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    assert native.built(source) == "there is no C compiler (cc, gcc or clang)"


def test_parts_run_once_each_and_their_failures_are_seen():
    done = []
    native.spread(done.append, 3)
    assert sorted(done) == [0, 1, 2]

    def fail(number: int) -> None:
        if number:
            raise ValueError("part")

    with pytest.raises(ValueError, match="part"):
        native.spread(fail, 2)


FORKS = """
import os, signal
from trapline.gold import native
native.spread(lambda _: None, 2)
child = os.fork()
if not child:
    signal.alarm(60)
    native.spread(lambda _: None, 2)
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_has_threads_of_its_own():
    """Those of the parent are gone there, and waiting for them would never end."""
    assert subprocess.run([sys.executable, "-c", FORKS], check=False).returncode == 0
