"""The arena's tests use a challenge of their own, small enough to grade in a second."""

import sys
import textwrap
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
# Submissions, not tests: they are graded, never collected.
collect_ignore = ["cheats"]
collect_ignore_glob = ["*/solution/*", "*/alternates/*", "*/starter/*"]


@pytest.fixture(scope="session")
def sorting():
    """The sorting challenge."""
    from trapline.arena.challenge import Challenge

    return Challenge(HERE / "sorting", "sorting")


@pytest.fixture(scope="session")
def level():
    """The strongest isolation this machine has."""
    from trapline.arena.run import choose_level

    return choose_level()


@pytest.fixture
def known_sorting(sorting, monkeypatch):
    """The sorting challenge as one of those that ship."""
    from trapline.arena import challenge

    monkeypatch.setattr(challenge, "load_all", lambda: {"sorting": sorting})
    return sorting


@pytest.fixture
def gold_source(sorting):
    """The text of the gold solution."""
    return (sorting.solution / "solution.py").read_text()


@pytest.fixture
def submission_folder(tmp_path):
    """Makes a submission's folder out of a text."""

    def make(source: str, **others: str) -> Path:
        folder = tmp_path / f"submission{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / "solution.py").write_text(textwrap.dedent(source))
        for name, text in others.items():
            (folder / f"{name}.py").write_text(textwrap.dedent(text))
        return folder

    return make
