from importlib.metadata import Distribution

import pytest

from trapline.arena.errors import MissingError
from trapline.arena.process.isolation import packages


def test_numpy_comes_with_its_libraries_and_nothing_else():
    names = set(packages.entries(("numpy",)))
    assert "numpy" in names
    assert all(name.startswith("numpy") for name in names)


def test_what_a_package_requires_comes_along():
    assert {"pytest", "_pytest", "pluggy", "iniconfig"} <= set(packages.entries(("pytest",)))


def test_compiled_program_of_a_package_comes_along():
    assert packages.entries(("ruff",))["bin/ruff"].is_file()


def test_trapline_is_never_shown():
    assert packages.entries(("trapline",)) == {}


def test_package_that_is_not_installed_is_named():
    with pytest.raises(MissingError, match="no-such-thing"):
        packages.entries(("no_such.thing",))


def test_program_of_a_package_in_a_folder_of_its_own_is_found(tmp_path, monkeypatch):
    """As `pip install --target` leaves it: the record says ../../bin, the file lies in bin. From
    Python 3.12 on, `files` leaves out what is not where the record says."""
    listed = Distribution.files.fget
    found = property(lambda self: [file for file in listed(self) if file.locate().exists()])
    monkeypatch.setattr(Distribution, "files", found)
    info = tmp_path / "checker-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: checker\nVersion: 1.0\n")
    (info / "RECORD").write_text("../../bin/checker,,\nchecker-1.0.dist-info/RECORD,,\n")
    program = tmp_path / "bin" / "checker"
    program.parent.mkdir()
    program.write_bytes(b"\x7fELF")
    monkeypatch.syspath_prepend(tmp_path)
    assert packages.entries(("checker",))["bin/checker"] == program
