"""Where sandboxes find the interpreter."""

from pathlib import Path

from trapline.arena.process.isolation import interpreter


def test_old_place_of_a_moved_interpreter_need_not_be_readable(monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "glob", refuse)
    assert Path(interpreter.PYTHON) in interpreter._own_files()
