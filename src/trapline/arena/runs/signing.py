"""Signatures of evidence bundles, in the format of minisign: `<digest>.json.minisig` beside each.

A bundle's name is its digest, so a changed byte shows without any key. A signature also says who
vouches for the bundle. Any minisign program can check it.
"""

import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from trapline.arena import output_paths
from trapline.arena.errors import ArenaError, ChangedError, MissingError, UsageError
from trapline.arena.record import Record
from trapline.arena.runs.store.evidence import digest, write_durably

ENDING = ".minisig"
#: `signed`: by the given key. `unchecked`: there is a signature, and no key to check it with.
#: `digest`: no signature. `forged`: the signature is not the key's. `changed`: another content.
#: `missing`: the run names it, and its folder has not got it.
Proof = Literal["signed", "unchecked", "digest", "forged", "changed", "missing"]
PROOFS: tuple[Proof, ...] = ("signed", "unchecked", "digest", "forged", "changed", "missing")


class Verified(Record):
    bundle: str
    proof: Proof
    #: Why the bundle does not hold; empty when it does.
    reason: str = ""


def minisign() -> ModuleType:
    """The library py-minisign."""
    try:
        import minisign
    except ImportError:
        raise MissingError("signatures need py-minisign: pip install 'trapline[sign]'") from None
    found: ModuleType = minisign
    return found


def bundle_files(place: Path) -> list[Path]:
    """The bundles of a run's folder, or the one of a file."""
    if place.is_file():
        return [place]
    folder = place / "bundles"
    found = sorted(folder.glob("[0-9a-f]*.json")) if folder.is_dir() else []
    if not found:
        raise UsageError(f"{place} holds no bundles: give the folder of a run, or a bundle's file")
    return found


def missing(place: Path) -> Iterator[Verified]:
    """Bundles that the records of a run's folder name and that are gone from it."""
    database = place / "run.sqlite"
    if not database.is_file():
        return  # a bundle's file, or bundles that were copied from their run
    for address in sorted(_named(database)):
        if not (place / "bundles" / f"{address}.json").is_file():
            yield Verified(
                bundle=address, proof="missing", reason="the run names it, and it is gone"
            )


def _named(database: Path) -> set[str]:
    """The bundles of all records, also of a run in a folder that is not writable."""
    mode = "mode=rw" if os.access(database.parent, os.W_OK) else "immutable=1"
    place = f"{database.resolve().as_uri()}?{mode}"
    try:
        with closing(sqlite3.connect(place, uri=True)) as connection:
            records = connection.execute("SELECT record FROM cells").fetchall()
        return {bundle for (record,) in records if (bundle := json.loads(record)["bundle"])}
    except (sqlite3.Error, ValueError, KeyError, TypeError) as error:
        raise ArenaError(f"{database} cannot be read: {error}") from None


def make_key(path: Path, ask_password: Callable[[], str]) -> Path:
    """Writes a new secret key and, with the ending .pub, its public key; gives the latter's path.

    An empty password leaves the secret key unencrypted.
    """
    public = path.with_name(f"{path.name}.pub")
    for one in (path, public):
        if one.exists():
            raise UsageError(f"{one} exists; a new key needs a path without files")
    output_paths.file(path, "the secret key")
    pair = minisign().KeyPair.generate()
    if password := ask_password():
        pair.secret_key.encrypt(password)
    path.touch(mode=0o600)
    path.write_bytes(bytes(pair.secret_key) + b"\n")
    public.write_bytes(bytes(pair.public_key) + b"\n")
    return public


def read_secret_key(path: Path) -> Any:
    """The secret key in this file, still encrypted if it is."""
    library = minisign()
    try:
        return library.SecretKey.from_file(path)
    except OSError as error:
        raise UsageError(f"the secret key cannot be read: {error}") from None
    except library.Error as error:
        raise UsageError(f"{path} is not a minisign secret key: {error}") from None


def read_public_key(given: str) -> Any:
    """A public key from its file, or from its text, which begins with RW."""
    library = minisign()
    try:
        path = Path(given)
        return (
            library.PublicKey.from_file(path)
            if path.is_file()
            else library.PublicKey.from_base64(given)
        )
    except (OSError, library.Error) as error:
        raise UsageError(
            f"{given} is neither the file nor the text of a minisign public key: {error}"
        ) from None


def sign(bundles: list[Path], key: Any) -> Iterator[Path]:
    """Signs each bundle whose content is that of its name."""
    for path in bundles:
        data = _content(path)
        if digest(data.decode()) != path.stem:
            raise ChangedError(f"{path} was changed: its content does not match its digest")
        comment = f"timestamp:{int(time.time())}\tfile:{path.name}\thashed"
        signature = bytes(key.sign(data, trusted_comment=comment)).decode()
        write_durably(path.with_name(path.name + ENDING), signature + "\n")
        yield path


def verify(bundles: list[Path], key: Any | None) -> Iterator[Verified]:
    for path in bundles:
        proof, reason = _proof(path, key)
        yield Verified(bundle=path.stem, proof=proof, reason=reason)


def _proof(path: Path, key: Any | None) -> tuple[Proof, str]:
    data = _content(path)
    if digest(data.decode(errors="replace")) != path.stem:
        return "changed", "its content does not match its digest"
    beside = path.with_name(path.name + ENDING)
    if not beside.is_file():
        return "digest", ""
    if key is None:
        return "unchecked", ""
    library = minisign()
    try:
        signature = library.Signature.from_bytes(beside.read_bytes())
        key.verify(data, signature)
    except library.Error as error:
        return "forged", f"{beside.name}: {error}"
    # The comment is signed too: a signature of another bundle stays that bundle's.
    if f"file:{path.name}" not in signature.trusted_comment.split("\t"):
        return "forged", f"{beside.name}: the signature names another file"
    return "signed", ""


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
