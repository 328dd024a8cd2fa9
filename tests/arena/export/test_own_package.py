"""Exports from a source tree that is not installed say the same as from an installation."""

from importlib.metadata import PackageNotFoundError

import pytest

from trapline.arena.errors import MissingError
from trapline.arena.export import own_package
from trapline.cli import export


@pytest.fixture
def uninstalled(monkeypatch):
    def not_found(name):
        raise PackageNotFoundError(name)

    installed = own_package.own_version(), own_package.core_requirements()
    monkeypatch.setattr(own_package, "distribution", not_found)
    return installed


def test_source_tree_says_what_an_installation_does(uninstalled):
    assert (own_package.own_version(), own_package.core_requirements()) == uninstalled
    text = own_package.metadata_text()
    assert f"\nVersion: {uninstalled[0]}\n" in text
    assert text.count("Requires-Dist: ") == len(uninstalled[1])


@pytest.mark.parametrize("form", [*export._CHALLENGES, "hf-kernels"])
def test_every_format_is_written_from_a_source_tree(uninstalled, tmp_path, form):
    names = [] if form == "hf-kernels" else ["kv_cache"]
    export.export(None, form, tmp_path / form, names, None)
    assert any(path.is_file() for path in (tmp_path / form).rglob("*"))


def test_lone_folder_says_how_to_install(uninstalled, monkeypatch, tmp_path):
    monkeypatch.setattr(own_package, "PROJECT", tmp_path / "pyproject.toml")
    with pytest.raises(MissingError, match="pip install trapline"):
        own_package.own_version()
