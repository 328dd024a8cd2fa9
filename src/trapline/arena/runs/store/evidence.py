"""Evidence bundles: one text each, addressed by its digest, so that a changed byte is seen."""

import hashlib
import json
import os
import re
import secrets
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from trapline.arena.errors import ArenaError, ChangedError, UsageError
from trapline.arena.record import Bundle

_DIGEST = re.compile("[0-9a-f]{64}")


class Evidence(Protocol):
    def text(self, address: str) -> str:
        """What is kept at this address, changed or not; `UsageError` where nothing is."""
        ...

    def is_whole(self, address: str) -> bool:
        """Whether what is kept there is what its address says."""
        ...

    def keep(self, address: str, text: str) -> None:
        """Is only over when the text would survive a power cut."""
        ...

    def addresses(self, beginning: str) -> list[str]: ...


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def canonical(bundle: Bundle) -> str:
    """The one text of a bundle that its address is computed from."""
    data = bundle.model_dump(mode="json")
    data["cell"]["bundle"] = ""
    # Bundles from before these were recorded keep their address.
    for name in ("origin", "flaw", "trap_set", "measures"):
        if not data["cell"][name]:
            del data["cell"][name]
    return json.dumps(data, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def opened(text: str, address: str, name: str) -> Bundle:
    """The bundle in a text, refused when it is not the text of its address."""
    if digest(text) != address:
        raise ChangedError(f"{name} was changed: its content does not match its digest")
    try:
        return Bundle.model_validate_json(text)
    except ValidationError as error:
        raise ArenaError(f"{name} is not an evidence bundle: {error.errors()[0]['msg']}") from None


def read_bundle(path: Path) -> Bundle:
    """A bundle from its file; the file's name is its digest."""
    text = _read(path)
    if not _DIGEST.fullmatch(path.stem) and not _is_bundle(text):
        raise UsageError(f"{path.name} is not an evidence bundle")
    return opened(text, path.stem, path.name)


def _is_bundle(text: str) -> bool:
    try:
        Bundle.model_validate_json(text)
    except ValidationError:
        return False
    return True


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"no bundle {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ArenaError(f"{path} cannot be read: {error}") from None


class EvidenceFiles:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def text(self, address: str) -> str:
        return _read(self._folder / f"{address}.json")

    def is_whole(self, address: str) -> bool:
        try:
            return digest(self.text(address)) == address
        except ArenaError:
            return False

    def keep(self, address: str, text: str) -> None:
        write_durably(self._folder / f"{address}.json", text)

    def addresses(self, beginning: str) -> list[str]:
        found = (path.stem for path in self._folder.glob("[0-9a-f]*.json"))
        return sorted(name for name in found if name.startswith(beginning))


def write_durably(path: Path, text: str) -> None:
    """The file is there whole, or not at all, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
