"""Kernels under every supported release of Triton: docs/versions.md has the results.

A release is taken from the folder that TRAPLINE_TRITON_RELEASES names (with one folder each, such
as `triton-3.6.0`), or installed into the user's cache by pip. Without a network these tests skip.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from trapline.gold import fallback

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
#: The newest patch of every minor release in the range, in order.
RELEASES = ["3.6.0", "3.7.1", "3.8.0", "3.9.0"]
#: What a release needs beside it: the interpreter of Triton 3.6 fails with newer NumPys.
BESIDE = {"3.6.0": {"numpy": "numpy<2.4"}}
#: Tests that compile kernels or run them in the interpreter.
KERNEL_TESTS = [
    "attention/test_kernels.py",
    "attention/test_hopper.py",
    "attention/test_paged_kernels.py",
    "beam_search/test_batched_search.py",
    "decoder/test_kernels.py",
    "norms/test_kernels.py",
    "softmax_topk/test_kernels.py",
    "ternary/test_kernels.py",
    "tree_decoding/test_fast_rounds.py",
    "tree_decoding/test_tree_kernel.py",
]
FAMILIES = ["attention", "paged attention", "norms", "ternary", "softmax_topk", "decoder"]
FAMILIES += ["tree_decoding", "beam_search"]


def installed(release: str) -> Path:
    """The folder of a release of Triton; installs it if it is not there."""
    given = os.environ.get("TRAPLINE_TRITON_RELEASES")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trapline"
    folder = Path(given or cache) / f"triton-{release}"
    beside = BESIDE.get(release, {})
    there = all((folder / name).is_dir() for name in beside)
    if not there or not (folder / f"triton-{release}.dist-info" / "RECORD").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
        # A small part of its modules is imported: those are compiled then.
        command += ["--no-compile", "--target", str(folder), f"triton=={release}", *beside.values()]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            last = done.stderr.strip().splitlines()[-1:]
            pytest.skip(f"Triton {release} could not be installed by pip: {' '.join(last)}")
    return folder


def with_release(release: str) -> dict[str, str]:
    """The environment of a process that imports this release."""
    paths = [str(installed(release)), str(ROOT / "src")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def test_releases_are_the_ends_of_the_tested_range_and_all_between():
    minors = [tuple(map(int, release.split(".")[:2])) for release in RELEASES]
    (major, oldest), (_, newest) = fallback.TESTED
    assert minors == [(major, minor) for minor in range(oldest, newest + 1)]


@pytest.mark.parametrize("release", [RELEASES[0], RELEASES[-1]])
def test_every_family_compiles_with_the_oldest_and_the_newest_release(
    release, tmp_path, kernel_cache
):
    environment = with_release(release) | {"TRITON_CACHE_DIR": kernel_cache}
    command = [sys.executable, str(HERE / "compile_families.py"), str(tmp_path)]
    environment |= {"TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "compiled.json").read_text())
    assert found.pop("triton") == release
    assert list(found) == FAMILIES
    assert all(found.values()), found


@pytest.mark.full
@pytest.mark.parametrize("tests", KERNEL_TESTS)
@pytest.mark.parametrize("release", RELEASES)
def test_kernel_tests_pass_with_every_release(release, tests):
    """Compiled for sm_90 and, except for Gluon, which has none, right in the interpreter."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-m", "not full and not needs_gpu", str(HERE / tests)]
    environment = with_release(release)
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]


def test_every_test_of_kernels_is_in_the_table():
    scripts = {*HERE.glob("*/compile_*.py"), *HERE.glob("*/interpret_*.py")}
    named = "".join((HERE / tests).read_text() for tests in KERNEL_TESTS)
    # The fixture `interpreted` runs the interpret_kernels.py beside the tests that ask for it.
    for tests in KERNEL_TESTS:
        if "(interpreted" in (HERE / tests).read_text():
            scripts.discard((HERE / tests).parent / "interpret_kernels.py")
    assert [path.name for path in sorted(scripts) if path.name not in named] == []
