"""Gathered text: every part in a folder has its licence in `sources.json`."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = "\n".join(f"line {number} of a text that anyone may copy" for number in range(9))


@pytest.fixture
def gather(monkeypatch):
    """The script into a folder, with a package index that has one document a package."""
    place = ROOT / "scripts" / "gather_text.py"
    spec = importlib.util.spec_from_file_location("gather_text", place)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gather_text", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "fetch", lambda source, folder: None)
    monkeypatch.setattr(module, "documents_of", lambda source, folder: [DOCUMENT])

    def run(out, package="sympy"):
        monkeypatch.setattr(sys, "argv", ["gather_text", str(out), "--source", package])
        return module.main()

    return run


def test_a_used_folder_is_refused(gather, tmp_path):
    """Old parts would stay, and only the new sources' licences be named."""
    assert gather(tmp_path) == 0
    with pytest.raises(SystemExit, match=r"has part-\*\.txt files already"):
        gather(tmp_path, "django")
    (source,) = json.loads((tmp_path / "sources.json").read_text())
    assert source["package"] == "sympy"
    assert (tmp_path / "part-000.txt").read_text() == DOCUMENT + "\n"


@pytest.mark.parametrize("below", ["", "corpus"])
def test_a_file_is_no_folder(gather, tmp_path, below):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(SystemExit, match=r"file.* cannot be a folder: "):
        gather(tmp_path / "file" / below)
    assert (tmp_path / "file").read_text() == "kept"
