"""Files and folders that are whole or as they were before, whoever else writes or is killed."""

import errno
import os
import stat
import time

import pytest

from trapline.gold.atomic_write import write_file, write_folder


def model(words, name="config.json"):
    """Writes a folder of one file."""
    return lambda folder: (folder / name).write_text(words)


def broken(folder):
    """Writes half of a folder."""
    (folder / "config.json").write_text("half")
    raise OSError(errno.ENOSPC, "No space left on device")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_two_writers_at_once_do_not_mix(tmp_path):
    """The second begins and ends while the first is at it."""
    place = tmp_path / "model"

    def slow(folder):
        model("first", "first.txt")(folder)
        write_folder(place, model("second", "second.txt"))
        model("first", "config.json")(folder)

    write_folder(place, slow)
    assert names(place) == ["config.json", "first.txt"]
    assert names(tmp_path) == ["model"]


def test_an_error_leaves_nothing_behind(tmp_path):
    place = tmp_path / "model"
    with pytest.raises(OSError, match="No space"):
        write_folder(place, broken)
    assert names(tmp_path) == []
    write_folder(place, model("good"))
    with pytest.raises(OSError, match="No space"):
        write_folder(place, broken)
    assert names(tmp_path) == ["model"]
    assert (place / "config.json").read_text() == "good"


@pytest.mark.parametrize("days", [0, 2])
def test_leftovers_of_a_killed_writer_are_removed(tmp_path, days):
    """Not at once: it might be alive."""
    place = tmp_path / "model[1]"
    left = []

    def looked_at(folder):
        left.append(folder.parent.name)
        model("good")(folder)

    write_folder(place, looked_at)
    (tmp_path / left[0]).mkdir()
    then = time.time() - days * 86_400
    os.utime(tmp_path / left[0], (then, then))
    write_folder(place, model("better"))
    assert names(tmp_path) == sorted(["model[1]", *([] if days else left)])


def test_interrupted_replacement_is_recovered(tmp_path):
    """The old one was away and the new one not yet there: the next writer puts it back."""
    place, old = tmp_path / "model", tmp_path / "model.trapline.old"
    old.mkdir()
    model("good")(old)
    with pytest.raises(OSError, match="No space"):
        write_folder(place, broken)
    assert names(tmp_path) == ["model"]
    assert (place / "config.json").read_text() == "good"


def test_a_link_stays_one(tmp_path):
    (tmp_path / "disk").mkdir()
    place = tmp_path / "model"
    place.symlink_to("disk/model")
    for words in ("good", "better"):
        write_folder(place, model(words))
        assert place.is_symlink()
        assert (tmp_path / "disk" / "model" / "config.json").read_text() == words
    assert names(tmp_path) == ["disk", "model"]
    assert names(tmp_path / "disk") == ["model"]


def test_leftover_link_is_removed(tmp_path):
    """Earlier versions moved links."""
    place, old = tmp_path / "model", tmp_path / "model.trapline.old"
    write_folder(place, model("good"))
    old.symlink_to("elsewhere")
    write_folder(place, model("better"))
    assert (place / "config.json").read_text() == "better"
    assert names(tmp_path) == ["model"]


def test_a_folder_keeps_its_mode(tmp_path):
    place = tmp_path / "model"
    write_folder(place, model("good"))
    place.chmod(0o2750)
    write_folder(place, model("better"))
    assert stat.S_IMODE(place.stat().st_mode) == 0o2750


@pytest.fixture
def mounted(tmp_path, monkeypatch):
    """A folder that nobody can move, as where a disk is mounted; nothing can be written beside."""
    place, moved, made = tmp_path / "model", os.replace, os.mkdir
    place.mkdir()

    def move(source, target):
        if place in (source, target):
            raise OSError(errno.EBUSY, "Device or resource busy")
        moved(source, target)

    def make(path, *rest, **named):
        if os.path.dirname(path) == str(tmp_path):
            raise OSError(errno.EROFS, "Read-only file system")
        made(path, *rest, **named)

    monkeypatch.setattr("os.replace", move)
    monkeypatch.setattr("os.mkdir", make)
    monkeypatch.setattr("os.path.ismount", lambda path: path == place)
    return place


def test_a_mount_point_is_filled(mounted):
    write_folder(mounted, lambda folder: [model("good", n)(folder) for n in ("config.json", "a")])
    assert names(mounted) == ["a", "config.json"]
    write_folder(mounted, model("better"))
    assert names(mounted) == ["config.json"]
    with pytest.raises(OSError, match="No space"):
        write_folder(mounted, broken)
    assert names(mounted) == ["config.json"]
    assert (mounted / "config.json").read_text() == "better"


def test_mount_point_is_not_a_model_until_it_is_filled(mounted, monkeypatch):
    """Whoever reads meanwhile finds no configuration."""
    write_folder(mounted, model("good"))
    move, seen = os.replace, []

    def watched(source, target):
        move(source, target)
        seen.append((mounted / "config.json").exists())

    monkeypatch.setattr("os.replace", watched)
    files = ("config.json", "a", "z")
    write_folder(mounted, lambda folder: [model("better", name)(folder) for name in files])
    assert seen == [False, False, True]


def test_an_empty_folder_needs_nothing_beside_it(mounted, monkeypatch):
    monkeypatch.setattr("os.path.ismount", lambda path: False)
    with pytest.raises(OSError, match="No space"):
        write_folder(mounted, broken)
    assert names(mounted) == []
    write_folder(mounted, model("good"))
    assert names(mounted) == ["config.json"]


def test_file_is_written_through_its_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "table.csv").symlink_to("disk/table.csv")
    for words in ("good", "better"):
        write_file(tmp_path / "table.csv", lambda place, words=words: place.write_text(words))
        assert (tmp_path / "disk" / "table.csv").read_text() == words
    assert (tmp_path / "table.csv").is_symlink()


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path):
    place = tmp_path / "table.csv"
    place.write_text("good")

    def half(path):
        path.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_file(place, half)
    assert place.read_text() == "good"
    assert names(tmp_path) == ["table.csv"]
