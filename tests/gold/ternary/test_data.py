"""Training text: split by content, leaks found, bad input refused."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from trapline.gold.errors import RangeError
from trapline.gold.ternary.training.data import (
    Split,
    leaks,
    read_documents,
    split_documents,
    tokens,
    windows,
    without_leaks,
)

DOCUMENTS = [f"document {number} says something of its own" for number in range(50)]
SHARED = "this line is long enough to give an answer away"


def test_paragraphs_are_documents(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("one\nstill one\n\n\n  two  \n\n\n\n")
    assert read_documents([file]) == ["one\nstill one", "two"]


def test_windows_line_endings_are_read(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(b"one\r\nstill one\r\n\r\ntwo\r\n")
    assert read_documents([tmp_path / "text.txt"]) == ["one\nstill one", "two"]


def test_missing_or_empty_text_raises(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n\n")
    with pytest.raises(RangeError, match="no text"):
        read_documents([empty])
    with pytest.raises(RangeError, match="cannot be read"):
        read_documents([tmp_path / "missing.txt"])
    (tmp_path / "archive").write_bytes(b"PK\3\4\0\0 words words")
    with pytest.raises(RangeError, match="archive is not a text file: it contains zero bytes"):
        read_documents([tmp_path / "archive"])


def test_invalid_utf8_raises_with_its_position(tmp_path: Path) -> None:
    """Read with replacement, a model would learn the replacement."""
    file = tmp_path / "latin.txt"
    file.write_bytes(b"word " * 20_000 + "Märkte".encode("latin-1"))
    with pytest.raises(RangeError, match=r"latin\.txt is not valid UTF-8 \(byte 100001\)$"):
        read_documents([file])


def test_unreadable_subfolder_raises(tmp_path: Path, monkeypatch) -> None:
    """Faked: root may read every folder."""
    (tmp_path / "open.txt").write_text("one")
    (tmp_path / "locked").mkdir()
    scandir = os.scandir

    def guarded(path):
        if Path(path).name == "locked":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    with pytest.raises(RangeError, match="locked cannot be read: Permission denied"):
        read_documents([tmp_path])


def test_folder_named_like_a_text_file(tmp_path: Path) -> None:
    (tmp_path / "b.txt").mkdir()
    (tmp_path / "b.txt" / "inner.txt").write_text("two")
    (tmp_path / "b.txt" / "notes.md").write_text("no text")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "c.txt").write_text("three")
    assert read_documents([tmp_path]) == ["one", "two", "three"]


def test_broken_link_raises(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(RangeError, match=r"gone\.txt cannot be read"):
        read_documents([tmp_path])


def test_split_depends_on_content_only() -> None:
    train, valid = split_documents(DOCUMENTS, 0.2)
    assert sorted(train + valid) == sorted(DOCUMENTS)
    assert len(valid) == 10
    again = split_documents(DOCUMENTS[::-1] * 2, 0.2)
    assert set(again.valid) == set(valid)
    assert len(again.valid) == 20


@pytest.mark.parametrize("documents", [DOCUMENTS, DOCUMENTS[:2]])
def test_at_least_one_training_document(documents: list[str]) -> None:
    split = split_documents(documents, 0.9999)
    assert len(split.train) == 1
    assert split_documents(documents[::-1], 0.9999).train == split.train


@pytest.mark.parametrize("documents", [["one"], ["same", "same"]])
def test_single_document_raises(documents: list[str]) -> None:
    with pytest.raises(RangeError, match="two different"):
        split_documents(documents, 0.5)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.5])
def test_invalid_fraction_raises(fraction: float) -> None:
    with pytest.raises(RangeError, match="fraction"):
        split_documents(DOCUMENTS, fraction)


def test_leaks_are_found_and_removed() -> None:
    clean = split_documents(DOCUMENTS, 0.2)
    assert leaks(clean) == []
    planted = Split([*clean.train, f"before\n{SHARED}"], [*clean.valid, f"{SHARED}  \nafter"])
    assert leaks(planted) == [SHARED]
    assert without_leaks(planted).train == clean.train
    with pytest.raises(RangeError, match="every training document"):
        without_leaks(Split([SHARED], [SHARED]))


def test_windows_contain_the_text() -> None:
    assert tokens("aé").tolist() == [97, 195, 169]
    found = windows(["abc", "def"], 3)
    assert found.shape == (2, 4)
    assert np.array_equal(found.ravel(), tokens("abc\n\ndef"))
    with pytest.raises(RangeError, match="needs more"):
        windows(["ab"], 10)
