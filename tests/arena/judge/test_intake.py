"""What is taken in can be digested, stored and printed."""

import os

import pytest

from trapline.arena.judge.intake import take_in


@pytest.mark.parametrize("name", [b"\xff.py", b"new\nline.py", b"\x1b[2J.py"])
def test_file_name_that_cannot_be_written_is_refused(tmp_path, name):
    (tmp_path / "solution.py").write_text("x = 1\n")
    with open(os.path.join(os.fsencode(tmp_path), name), "w") as file:
        file.write("x = 1\n")
    intake = take_in(tmp_path)
    assert "cannot be written" in intake.refused
    assert intake.refused.isprintable()
    assert intake.digest


def test_unreadable_file_does_not_stop_the_run(tmp_path, monkeypatch):
    (tmp_path / "solution.py").write_text("x = 1\n")
    (tmp_path / "locked.bin").write_text("")
    opened = os.open

    def locked(path, *rest):
        if str(path).endswith("locked.bin"):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *rest)

    monkeypatch.setattr(os, "open", locked)
    assert take_in(tmp_path).refused == "a file cannot be read: locked.bin (Permission denied)"
