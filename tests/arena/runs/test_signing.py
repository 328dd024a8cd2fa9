"""Signed bundles: `sign` and `verify` as a stranger uses them."""

import json
import os
import sys

import pytest

from trapline.arena.errors import MissingError
from trapline.arena.record import Bundle
from trapline.arena.runs.signing import bundle_files, read_public_key, verify
from trapline.arena.runs.store import Store, digest
from trapline.cli.main import build, guarded

PASSWORD = "TRAPLINE_KEY_PASSWORD"


@pytest.fixture
def trapline(capsys):
    """The program in this process: exit code, what it printed, what it said on one line."""

    def run(*words):
        code = 0
        try:
            guarded(lambda: build()([str(word) for word in words], prog_name="trapline"))
        except SystemExit as ended:
            code = ended.code or 0
        said = capsys.readouterr()
        return code, said.out, " ".join(said.err.split())

    return run


@pytest.fixture
def folder(tmp_path):
    """A run's folder with two bundles."""
    bundles = tmp_path / "run" / "bundles"
    bundles.mkdir(parents=True)
    for text in ('{"one": 1}', '{"two": "ü"}'):
        (bundles / f"{digest(text)}.json").write_text(text)
    return tmp_path / "run"


@pytest.fixture
def key(trapline, tmp_path, monkeypatch):
    monkeypatch.setenv(PASSWORD, "")
    code, printed, _ = trapline("sign", "--new-key", tmp_path / "key")
    assert code == 0
    assert str(tmp_path / "key.pub") in printed
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    return tmp_path / "key"


def test_verify_says_that_only_the_digest_holds(trapline, folder):
    code, printed, _ = trapline("verify", folder)
    assert (code, printed) == (0, "2 of 2 bundles: digest holds; not signed\n")


def test_signed_bundles_verify_with_the_key(trapline, folder, key):
    assert trapline("sign", folder, "--key", key)[:2] == (0, "signed 2 bundles\n")
    for public in (f"{key}.pub", (key.parent / "key.pub").read_text().splitlines()[1]):
        code, printed, _ = trapline("verify", folder, "--public-key", public)
        assert (code, printed) == (0, "2 of 2 bundles: signed with this key\n")
    code, printed, _ = trapline("verify", folder)
    assert code == 0
    assert "the signature was not checked (give --public-key)" in printed


def test_unsigned_bundle_does_not_hold_where_a_key_is_asked_for(trapline, folder, key):
    trapline("sign", bundle_files(folder)[0], "--key", key)
    code, printed, _ = trapline("verify", folder, "--public-key", f"{key}.pub", "--json")
    assert code == 4
    assert json.loads(printed)["counts"] == {"signed": 1, "digest": 1}


def test_changed_bundle_and_foreign_signature_are_seen(trapline, folder, key, tmp_path):
    first, second = bundle_files(folder)
    trapline("sign", folder, "--key", key)
    text = first.read_text()
    first.write_text(text + " ")
    beside = second.with_name(f"{second.name}.minisig")
    beside.write_text(first.with_name(f"{first.name}.minisig").read_text())
    public = read_public_key(f"{key}.pub")
    assert [one.proof for one in verify([first, second], public)] == ["changed", "forged"]
    assert trapline("verify", folder)[0] == 4
    code, _, said = trapline("sign", folder, "--key", key)
    assert code == 4
    assert "was changed" in said
    # The same content under the name of another bundle's signature, signed by another key.
    first.write_text(text)
    trapline("sign", "--new-key", tmp_path / "other")
    code, printed, _ = trapline("verify", first, "--public-key", tmp_path / "other.pub")
    assert code == 4
    assert "incompatible key identifiers" in printed


def test_bundle_that_is_gone_from_its_run_is_seen(trapline, tmp_path, plain_cell, monkeypatch):
    run = tmp_path / "run"
    store = Store(run)
    cells = [store.save(Bundle(cell=plain_cell(entrant=n), files={})) for n in ("a", "b", "c")]
    store.close()
    assert trapline("verify", run)[:2] == (0, "3 of 3 bundles: digest holds; not signed\n")
    first, second, third = bundle_files(run)
    first.unlink()
    second.write_text(second.read_text() + " ")
    code, printed, _ = trapline("verify", run)
    assert code == 4
    assert printed.splitlines() == [
        "1 of 3 bundles: digest holds; not signed",
        "1 of 3 bundles: changed",
        "1 of 3 bundles: missing",
        f"  {first.stem}: the run names it, and it is gone",
        f"  {second.stem}: its content does not match its digest",
    ]
    assert {first.stem, second.stem, third.stem} == {cell.bundle for cell in cells}
    for path in (second, third):
        path.unlink()
    monkeypatch.setattr("os.access", lambda _, mode: mode != os.W_OK)
    code, printed, _ = trapline("verify", run, "--json")
    assert code == 4
    assert json.loads(printed)["counts"] == {"missing": 3}


def test_edited_comment_breaks_the_signature(trapline, folder, key):
    trapline("sign", folder, "--key", key)
    path = bundle_files(folder)[0]
    beside = path.with_name(f"{path.name}.minisig")
    beside.write_text(beside.read_text().replace("timestamp:1", "timestamp:2"))
    (found,) = verify([path], read_public_key(f"{key}.pub"))
    assert found.proof == "forged"


def test_key_with_a_password_needs_it(trapline, folder, tmp_path, monkeypatch):
    monkeypatch.setenv(PASSWORD, "right")
    trapline("sign", "--new-key", tmp_path / "key")
    monkeypatch.setenv(PASSWORD, "wrong")
    code, _, said = trapline("sign", folder, "--key", tmp_path / "key")
    assert code == 2
    assert "wrong password" in said
    monkeypatch.setenv(PASSWORD, "right")
    assert trapline("sign", folder, "--key", tmp_path / "key")[0] == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["sign", "{run}"], "sign needs a run and --key FILE"),
        (["sign", "{run}", "--key", "nowhere"], "the secret key cannot be read"),
        (["sign", "{run}", "--key", "{run}/text"], "is not a minisign secret key"),
        (["sign", "{run}", "--new-key", "k"], "--new-key only makes a key"),
        (["sign", "--new-key", "{run}/text"], "exists; a new key needs a path without files"),
        (["verify", "{run}/bundles"], "holds no bundles: give the folder of a run"),
        (["verify", "{run}", "--public-key", "RWx"], "neither the file nor the text of a minisign"),
    ],
)
def test_mistakes_get_a_sentence(trapline, folder, words, sentence):
    (folder / "text").write_text("not a key\n")
    code, _, said = trapline(*(word.replace("{run}", str(folder)) for word in words))
    assert code == 2
    assert sentence in said


def test_without_the_library_digests_are_still_checked(trapline, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "minisign", None)
    assert trapline("verify", folder)[0] == 0
    with pytest.raises(MissingError, match="signatures need py-minisign: pip install"):
        read_public_key("RW")
    assert trapline("sign", "--new-key", folder / "key")[0] == 3
