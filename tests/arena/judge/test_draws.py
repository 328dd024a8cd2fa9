"""The seed of an answer: the same for the same bytes, and unknown without the judge's key."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from trapline.arena.judge import draws
from trapline.arena.judge.draws import DrawKey, draw_key, is_held_out


@pytest.fixture
def path(tmp_path, monkeypatch):
    """Where the key of a new user is kept."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    draw_key.cache_clear()
    yield tmp_path / "trapline" / "draw-key"
    draw_key.cache_clear()


def test_seed_depends_on_key_challenge_bytes_and_half(sorting):
    key = DrawKey(b"k" * 32)
    seed = key.seed(sorting, "a")
    assert seed == DrawKey(b"k" * 32).seed(sorting, "a")
    others = [key.seed(sorting, "b"), DrawKey(b"l" * 32).seed(sorting, "a")]
    held_out = key.seed(sorting, "a", held_out=True)
    assert len({seed, *others, held_out - draws.PUBLIC_SEEDS}) == 4
    assert [is_held_out(one) for one in (seed, held_out)] == [False, True]


def test_key_is_kept_for_its_user_alone(path):
    old = os.umask(0)
    try:
        first = draw_key()
    finally:
        os.umask(old)
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert [file.name for file in path.parent.iterdir()] == ["draw-key"]
    draw_key.cache_clear()
    assert draw_key() == first == DrawKey(path.read_bytes())


def test_graders_that_start_together_get_one_key(path):
    with ThreadPoolExecutor(16) as pool:
        found = set(pool.map(lambda _: draws._kept_secret(path), range(64)))
    assert found == {path.read_bytes()}


def _readable(path):
    path.write_bytes(b"k" * 32)
    path.chmod(0o640)


def _link(path):
    path.with_name("other").write_bytes(b"k" * 32)
    path.symlink_to("other")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_readable, "only this user can read"),
        (lambda path: path.touch(0o600), "has 0 bytes"),
        (_link, "must be a file"),
    ],
)
def test_key_that_is_unsafe_or_damaged_is_not_used(path, spoil, reason):
    path.parent.mkdir()
    spoil(path)
    key = draw_key()
    assert reason in key.not_kept
    assert key.secret not in (b"", b"k" * 32)
    assert draw_key() is key


def test_without_a_place_for_the_key_the_process_has_its_own(path, monkeypatch):
    path.parent.write_text("in the way")
    key = draw_key()
    assert key.not_kept == f"File exists: {path.parent}"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda _: "~")
    draw_key.cache_clear()
    assert draw_key().not_kept == "the user has no home folder"
    assert draw_key().secret != key.secret
