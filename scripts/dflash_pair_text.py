"""Python source as text to learn from: of the standard library, of packages, of wheels."""

import hashlib
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from email import message_from_bytes
from importlib import metadata
from pathlib import Path

import numpy as np


def collect(path: Path, options, megabytes: float, sources: list[dict]) -> Path:
    """Python source: modules of packages and of the standard library, mixed, up to a size."""
    documents = [text for package in options.packages for text in wheel_sources(package, sources)]
    for package in options.installed:
        documents += installed_sources(package, sources)
    library = Path(sysconfig.get_path("stdlib"))
    sources.append(
        {"name": "python", "version": sys.version.split()[0], "licence": "PSF-2.0 (library)"}
    )
    for file in sorted(library.glob("*.py")) + sorted(library.glob("[a-z]*/*.py")):
        if not {"site-packages", "test", "tests", "idlelib"} & set(file.parts):
            documents.append(file.read_text(encoding="utf-8", errors="replace"))
    clean = (one.replace("\f", "\n").strip() for one in documents)
    mixed = sorted({one for one in clean if one}, key=drawn)
    kept = some_of(mixed, megabytes)
    path.write_text("\f".join(kept), encoding="utf-8")
    millions = sum(map(len, kept)) / 1e6
    print(f"{len(kept)} documents, {millions:.1f} million characters", flush=True)
    return path


def drawn(document: str) -> bytes:
    """An order that has nothing to do with where a document comes from."""
    return hashlib.sha256(b"order" + document.encode("utf-8", "replace")).digest()


def some_of(documents: list[str], megabytes: float) -> list[str]:
    kept, total = [], 0
    for document in documents:
        if total >= megabytes * 1e6:
            break
        kept.append(document)
        total += len(document)
    return kept


def installed_sources(package: str, sources: list[dict]) -> list[str]:
    """The modules of an installed package, its tests left out."""
    try:
        found = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        raise SystemExit(f"error: {package} is not installed") from None
    sources.append(
        {"name": package, "version": found.version, "licence": licence_of(found.metadata)}
    )
    texts = []
    for file in sorted(found.files or [], key=str):
        if file.suffix == ".py" and not {"test", "tests", "testing"} & set(file.parts):
            path = Path(str(found.locate_file(file)))
            if path.is_file():
                texts.append(path.read_text(encoding="utf-8", errors="replace"))
    return texts


def licence_of(facts) -> str:
    """What a package says of its licence: in one word, in a line, or by classifiers."""
    for key in ("License-Expression", "License"):
        lines = (facts.get(key) or "").strip().splitlines()
        if lines and lines[0].strip().upper() != "UNKNOWN":
            return lines[0].strip()[:80]
    kinds = [line for line in facts.get_all("Classifier") or [] if line.startswith("License ::")]
    return "; ".join(line.split(" :: ")[-1] for line in kinds) or "not said"


def wheel_sources(package: str, sources: list[dict]) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
        subprocess.run([*command, folder, "--only-binary", ":all:", package], check=True)
        texts = []
        for wheel in Path(folder).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                about = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
                facts = message_from_bytes(archive.read(about))
                sources.append(
                    {"name": package, "version": facts["Version"], "licence": licence_of(facts)}
                )
                names = [name for name in sorted(archive.namelist()) if name.endswith(".py")]
                texts += [archive.read(name).decode("utf-8", "replace") for name in names]
        return texts


def pieces_of(windows: np.ndarray, count: int, width: int, seed: int) -> list[list[int]]:
    """`count` pieces of `width` tokens from random places of the windows, by seed."""
    random = np.random.default_rng(seed)
    rows = random.integers(0, len(windows), count)
    begins = random.integers(0, windows.shape[1] - width + 1, count)
    return windows[rows[:, None], begins[:, None] + np.arange(width)].tolist()
